"""How tokens are drawn: by the distribution that the trainer scores, each request from a random stream of its own."""

import dataclasses
import math

import pytest
import torch

from lite.errors import InputError
from lite.primitive.parallel.packing import PackedSequences
from lite.runtime.rollout.engine import Prompt, Sampling, Trajectory, request_seed
from tests.checkpoints import answers, checkpoint, engine, make_prompts

NOT_NEUTRAL = {
    "top_p": 0.9, "top_k": 50, "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
}  # fmt: skip


@pytest.mark.parametrize("key", NOT_NEUTRAL)
def test_what_bends_the_distribution_is_refused_by_name(key: str) -> None:
    """trl's top_p of 0.9 gave ratios that no trainer could reproduce: its softmax runs over the whole vocabulary."""
    with pytest.raises(InputError, match=rf"sampling\.{key}.*{NOT_NEUTRAL[key]}.*exact mode") as caught:
        Sampling(**{key: NOT_NEUTRAL[key]})
    assert "\n" not in str(caught.value)


def test_every_field_that_could_bend_the_distribution_is_in_the_list_above() -> None:
    harmless = {"temperature", "max_tokens", "n", "seed", "eos_token_ids"}
    assert {f.name for f in dataclasses.fields(Sampling)} == harmless | set(NOT_NEUTRAL)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_not_above_zero_is_refused(temperature: float) -> None:
    """Greedy decoding has no density to compare; logits divided by 0 have none at all."""
    with pytest.raises(InputError, match=r"sampling\.temperature"):
        Sampling(temperature=temperature)


@pytest.mark.parametrize("counts", [{"n": 0}, {"max_tokens": 0}])
def test_an_empty_request_is_refused(counts: dict[str, int]) -> None:
    with pytest.raises(InputError, match="at least 1"):
        Sampling(**counts)


@pytest.mark.parametrize(
    ("ids", "said"), [((), "empty"), ((3, 96), "vocabulary of 96"), ((-1,), "vocabulary"), ((1,) * 253, r"253 \+ 4 tokens.*256")]
)
def test_a_prompt_the_model_cannot_read_is_refused(ids: tuple[int, ...], said: str) -> None:
    with pytest.raises(InputError, match=f"prompt bad: .*{said}"):
        engine(checkpoint()).generate([Prompt("bad", ids)], Sampling(max_tokens=4))


def test_a_request_larger_than_the_cache_is_refused_and_not_waited_for() -> None:
    with pytest.raises(InputError, match="cache_tokens"):
        engine(checkpoint(), cache_tokens=32).generate(make_prompts([30]), Sampling(max_tokens=4))


def test_samples_of_one_group_differ_under_one_fixed_seed() -> None:
    """A fixed seed handed to every sample gives a group of copies, whose advantages are all 0: no error, and nothing learnt."""
    done = engine(checkpoint()).generate(make_prompts([6]), Sampling(n=8, max_tokens=12, seed=5))
    assert len({t.response_ids for t in done}) == 8
    assert len({t.prompt_ids for t in done}) == 1


def test_equal_prompts_under_two_names_are_drawn_apart() -> None:
    ids = make_prompts([6])[0].ids
    done = engine(checkpoint()).generate([Prompt("a", ids), Prompt("b", ids)], Sampling(max_tokens=12))
    assert done[0].response_ids != done[1].response_ids


def test_request_seeds_do_not_run_into_each_other() -> None:
    """The parts of a request's name stay apart ("1/1" and "11" are two), and a torch generator takes the number."""
    seeds = [request_seed(s, uid, n) for s in (0, 1, 11) for uid in ("1", "11", "1/1") for n in (0, 1, 11)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_in_another_batch_and_other_tokens_than_another_seed() -> None:
    prompts = make_prompts([6, 3, 20])
    draw = lambda which, seed: answers(engine(checkpoint()).generate(which, Sampling(n=2, max_tokens=10, seed=seed)))
    together = draw(prompts, 3)
    assert draw(prompts[1:2], 3).items() <= together.items()
    assert draw(prompts[::-1], 3) == together
    assert all(draw(prompts, 4)[key] != together[key] for key in together)


def test_a_response_ends_with_its_stop_token_and_no_later_than_max_tokens() -> None:
    e, prompts = engine(checkpoint()), make_prompts([4, 9])
    stop = tuple(range(0, 96, 3))
    free = e.generate(prompts, Sampling(n=8, max_tokens=10))
    done = e.generate(prompts, Sampling(n=8, max_tokens=10, eos_token_ids=stop))

    def cut(t: Trajectory) -> tuple[int, ...]:
        end = next((i + 1 for i, token in enumerate(t.response_ids) if token in stop), len(t.response_ids))
        return t.response_ids[:end]

    assert [t.response_ids for t in done] == [cut(t) for t in free]
    assert {len(t.response_ids) for t in done} > {1}
    assert all(len(t.logprobs) == len(t.response_ids) for t in done)


def test_trajectories_come_prompt_by_prompt_sample_by_sample() -> None:
    prompts = make_prompts([30, 1, 8])
    done = engine(checkpoint(), max_step_tokens=10).generate(prompts, Sampling(n=3, max_tokens=5, eos_token_ids=tuple(range(20))))
    assert [(t.uid, t.sample) for t in done] == [(p.uid, s) for p in prompts for s in range(3)]
    assert [t.prompt_ids for t in done[::3]] == [p.ids for p in prompts]


def logits_of(prompt: Prompt) -> torch.Tensor:
    """fp32 logits of the prompt's next token, by a dense product instead of the engine's chunks."""
    e = engine(checkpoint(dtype="fp32"), "fp32")
    n = len(prompt.ids)
    hidden = e.bundle.module.hidden(torch.tensor(prompt.ids), PackedSequences.of([n]))
    return hidden[-1] @ e.bundle.module.head.weight.t()


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_tokens_come_as_often_as_their_probability_says(temperature: float) -> None:
    """Chi-square of 1500 first tokens against softmax(logits / T); the wrong temperature must fail the same test."""
    draws, prompt = 1500, make_prompts([7])[0]
    e = engine(checkpoint(dtype="fp32"), "fp32", max_sequences=500, max_step_tokens=3500)
    done = e.generate([prompt], Sampling(n=draws, max_tokens=1, temperature=temperature, seed=11))
    counts = torch.bincount(torch.tensor([t.response_ids[0] for t in done]), minlength=96).double()

    def chi_square(t: float) -> tuple[float, int]:
        """-> (statistic, degrees of freedom); words expected fewer than 8 times are one bin."""
        expected = torch.softmax(logits_of(prompt).double() / t, -1) * draws
        rare = expected < 8
        pooled = lambda x: torch.cat([x[~rare], x[rare].sum()[None]])
        o, x = pooled(counts), pooled(expected)
        return float(((o - x) ** 2 / x).sum()), len(x) - 1

    statistic, freedom = chi_square(temperature)
    limit = freedom + 4 * math.sqrt(2 * freedom)  # four standard deviations of a chi-square variable
    assert freedom > 10 and statistic < limit
    assert chi_square(temperature * 1.5)[0] > limit


def test_two_prompts_of_one_uid_are_refused() -> None:
    """They would share a random stream, and a comparison by uid could not tell them apart."""
    twice = [Prompt("same", (1, 2)), Prompt("same", (3,))]
    with pytest.raises(InputError, match="share a uid"):
        engine(checkpoint()).generate(twice, Sampling(max_tokens=1))
