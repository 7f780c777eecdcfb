"""A request's tokens and logprob bytes are its own: no neighbour, cut, page or preemption shows in them, and the trainer agrees."""

import itertools

import pytest
import torch

from lite.primitive.compare import compare_bytes
from lite.runtime.rollout.embedded import EmbeddedEngine
from lite.runtime.rollout.engine import Prompt, Sampling, Trajectory
from lite.runtime.rollout.paged_cache import PAGE, CachedSequences, PagedCache
from tests.checkpoints import DTYPES, FAMILIES, against_trainer, answers, batch_of, checkpoint, engine, make_prompts, same, trainer

LONG = 40  # tokens of the prompt that is cut: more than two pages and five query tiles
DEEP = 70  # past the first tile of keys
LENGTHS = [1, 5, 17, LONG]
SAMPLING = Sampling(max_tokens=6, n=2, temperature=0.9)


def alone(name: str, dtype: str = "bf16") -> dict:
    """The reference: each request in an engine of its own, prompt in one piece."""
    found = {}
    for prompt in make_prompts(LENGTHS):
        found |= answers(engine(checkpoint(name, dtype), dtype, max_sequences=1).generate([prompt], SAMPLING))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_alone_batched_permuted_and_among_others_are_one(name: str, dtype: str) -> None:
    expected = alone(name, dtype)
    e = engine(checkpoint(name, dtype), dtype)
    mine, others = make_prompts(LENGTHS), make_prompts([33, 2, 9], seed=7)
    assert answers(e.generate(mine, SAMPLING)) == expected
    assert answers(e.generate(mine[::-1], SAMPLING)) == expected
    among = answers(e.generate([others[0], *mine[2:], others[1], *mine[:2], others[2]], SAMPLING))
    assert {key: among[key] for key in expected} == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_cut_of_the_prompt_by_the_step_budget(name: str) -> None:
    """A step budget of c cuts the prompt at c, 2c, ...; over all c every position is the first cut once (1: token by token)."""
    prompt = make_prompts(LENGTHS)[3:]
    sampling = Sampling(max_tokens=2)
    whole = engine(checkpoint(name), max_step_tokens=LONG)
    expected = answers(whole.generate(prompt, sampling))
    assert whole.counters.chunked_prefills == 0
    e = engine(checkpoint(name))
    for cut in range(1, LONG):
        e.max_step_tokens = cut
        assert answers(e.generate(prompt, sampling)) == expected, cut
    assert e.counters.chunked_prefills == LONG - 1


def hidden_in_pieces(e: EmbeddedEngine, ids: tuple[int, ...], cuts: list[int], context: type = CachedSequences) -> torch.Tensor:
    """Hidden states of all tokens, prefilled piece by piece; pages deliberately out of order."""
    cache, pages, parts = PagedCache(8, e.device), [], []
    cache.free = [5, 2, 7, 0, 3, 6, 1, 4]
    for start, stop in itertools.pairwise([0, *cuts, len(ids)]):
        assert cache.grow(pages, stop)
        parts.append(e.bundle.module.hidden(torch.tensor(ids[start:stop]), context(cache, [(pages, start, stop - start)])))
    return torch.cat(parts)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("name", "dtype"), [(FAMILIES[0], "fp32"), *((name, "bf16") for name in FAMILIES)])
def test_every_cut_of_the_prompt_through_the_cache(name: str, dtype: str) -> None:
    """Below the scheduler: [0:c] then [c:] leaves every token's hidden state, not only the sampled one's, as it was."""
    e, ids = engine(checkpoint(name, dtype), dtype), make_prompts([DEEP])[0].ids
    whole = hidden_in_pieces(e, ids, [])
    assert torch.isfinite(whole).all()
    for cut in range(1, DEEP):
        assert same(hidden_in_pieces(e, ids, [cut]), whole), cut
    assert same(hidden_in_pieces(e, ids, list(range(1, DEEP))), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_preempted_requests_answer_as_if_nothing_had_happened(dtype: str) -> None:
    prompts, sampling = make_prompts([20, 25, 30, 12]), Sampling(max_tokens=24)
    roomy = engine(checkpoint("llama", dtype), dtype)
    expected = answers(roomy.generate(prompts, sampling))
    assert roomy.counters.preemptions == 0
    tight = engine(checkpoint("llama", dtype), dtype, cache_tokens=4 * PAGE)
    assert answers(tight.generate(prompts, sampling)) == expected
    assert tight.counters.preemptions > 0


def test_pages_given_back_and_reused_leave_no_trace() -> None:
    """With room for one request at a time, the second writes into the pages of the first; before it the pool is NaN."""
    first, second = make_prompts([LONG, 21])
    sampling = Sampling(max_tokens=8)
    expected = answers(engine(checkpoint()).generate([second], sampling))
    e = engine(checkpoint(), cache_tokens=3 * PAGE)
    both = e.generate([first, second], sampling)
    assert answers(both[1:]) == expected
    assert torch.isfinite(torch.cat([t.logprobs for t in both])).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_engine_and_trainer_give_the_same_bytes(name: str, dtype: str, temperature: float) -> None:
    """Continuous batching on one side, one packed forward on the other, with autograd and without."""
    folder = checkpoint(name, dtype)
    e = engine(folder, dtype, max_step_tokens=24, max_sequences=3)
    done = e.generate(make_prompts([1, 1, 5, 17, LONG]), Sampling(max_tokens=7, n=2, temperature=temperature))
    runtime, handle = trainer(folder, dtype)
    assert against_trainer(done, runtime, handle, temperature).exact
    batch = batch_of(done, temperature)
    result = runtime.forward_backward(handle, batch, lambda scores, b, step: (-scores.logprob.sum(), {}))
    assert result.requires_grad == [True]
    compared = compare_bytes(torch.cat([t.logprobs for t in done]), result.log_probs[0][batch.loss_mask])
    assert compared.exact and compared.valid_tokens == 5 * 2 * 7
    assert not against_trainer(done, runtime, handle, temperature * 1.01).exact  # a comparison that could not fail would prove nothing


def test_counters_name_the_situations_that_the_tokens_met() -> None:
    e = engine(checkpoint(), max_step_tokens=16, max_sequences=3, cache_tokens=5 * PAGE)
    e.generate(make_prompts([30, 4, 25, 3, 20]), Sampling(max_tokens=20))
    c = e.counters
    assert min(c.joins, c.mixed_batches, c.chunked_prefills, c.preemptions) > 0
    assert c.sequences == 5 and 0 < c.rows_max_in_batch <= 16


def test_counters_stay_at_zero_where_nothing_of_the_kind_can_happen() -> None:
    """One request that fits: no neighbour to join, nothing to cut, nothing to push out."""
    e = engine(checkpoint())
    e.generate(make_prompts([12]), Sampling(max_tokens=4))
    c = e.counters
    assert (c.joins, c.mixed_batches, c.chunked_prefills, c.preemptions) == (0, 0, 0, 0)
    assert (c.sequences, c.rows_max_in_batch) == (1, 12)


class OneRowOff(CachedSequences):
    """Reads one key of the first sequence from the place of the token before it."""

    def extend_kv(self, layer, k, v):
        keys, values, seqlens = super().extend_kv(layer, k, v)
        if seqlens.cu_k[1] > 2:
            keys[2] = keys[1]
        return keys, values, seqlens


class Rounded(CachedSequences):
    """Keeps keys at fewer bits than the trainer's are: an fp8-like cache."""

    def extend_kv(self, layer, k, v):
        return super().extend_kv(layer, k.to(torch.float8_e4m3fn).to(k.dtype), v)


class Shifted(CachedSequences):
    """Counts positions from the piece in hand and not from the sequence's start."""

    def __init__(self, cache, sequences):
        super().__init__(cache, sequences)
        self.positions = torch.cat([torch.arange(new) for _, _, new in sequences])


@pytest.mark.parametrize("broken", [OneRowOff, Rounded, Shifted])
def test_a_wrong_cache_is_seen(broken: type) -> None:
    """The comparison must find what it is for: errors that leave the text plausible."""
    folder = checkpoint()
    runtime, handle = trainer(folder)
    prompts: list[Prompt] = make_prompts([5, 17])

    def generate(context: type) -> list[Trajectory]:
        return engine(folder, context=context).generate(prompts, Sampling(max_tokens=6))

    assert against_trainer(generate(CachedSequences), runtime, handle).exact
    compared = against_trainer(generate(broken), runtime, handle)
    assert compared.mismatch > 0 and compared.nonfinite == 0
