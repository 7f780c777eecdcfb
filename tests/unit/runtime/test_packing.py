"""Packing decides memory and speed, never a byte: a sample scores the same in any micro-batch, place and layout."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lite.errors import InputError
from lite.primitive.parallel.packing import micro_batches
from lite.runtime.batch import PackedBatch
from lite.runtime.runtime import Handle, Runtime
from tests.checkpoints import DTYPES, FAMILIES, checkpoint, make_samples, same, trainer

SAMPLES = make_samples([(1, 1), (5, 9), (17, 3), (2, 31), (40, 30), (8, 8)], seed=3)
LENGTHS = [len(prompt) + len(response) for prompt, response in SAMPLES]
Scores = dict[int, tuple[Tensor, Tensor]]  # sample -> logprobs and entropies of its response


def score(opened: tuple[Runtime, Handle], layout: list[list[int]], mask: bool = True, temperature: float = 0.8) -> Scores:
    """Scores SAMPLES in micro-batches that hold these samples in this order."""
    batches = [PackedBatch.from_samples([SAMPLES[i] for i in group], temperature=temperature) for group in layout]
    given_masks = [b.loss_mask for b in batches]
    if not mask:
        batches = [dataclasses.replace(b, loss_mask=None) for b in batches]
    result = opened[0].forward_backward(opened[1], batches, forward_only=True)
    assert len(result.log_probs) == len(result.entropy) == len(layout)
    found: Scores = {}
    for group, keep, logprob, entropy in zip(layout, given_masks, result.log_probs, result.entropy, strict=True):
        sizes = [len(SAMPLES[i][1]) for i in group]
        found |= dict(zip(group, zip(logprob[keep].split(sizes), entropy[keep].split(sizes), strict=True), strict=True))
    return found


def equal(a: Scores, b: Scores) -> bool:
    return a.keys() == b.keys() and all(same(x, y) for i in a for x, y in zip(a[i], b[i], strict=True))


@pytest.fixture(scope="module", params=[(name, dtype) for name in FAMILIES for dtype in DTYPES], ids="-".join)
def opened(request: pytest.FixtureRequest) -> tuple[Runtime, Handle]:
    name, dtype = request.param
    return trainer(checkpoint(name, dtype), dtype)


@st.composite
def layouts(draw: Callable) -> list[list[int]]:
    """A permutation of the samples, cut anywhere."""
    order = draw(st.permutations(range(len(SAMPLES))))
    cuts = sorted(draw(st.sets(st.integers(1, len(SAMPLES) - 1))))
    return [list(order[start:stop]) for start, stop in itertools.pairwise([0, *cuts, len(order)])]


def test_any_packing_of_the_samples_gives_the_same_bytes(opened: tuple[Runtime, Handle]) -> None:
    alone = score(opened, [[i] for i in range(len(SAMPLES))])
    assert all(bool(x.isfinite().all()) and bool((x != 0).any()) for pair in alone.values() for x in pair)

    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(layouts())
    def check(layout: list[list[int]]) -> None:
        assert equal(score(opened, layout), alone)

    check()


def test_two_micro_batch_budgets_give_the_same_bytes(opened: tuple[Runtime, Handle]) -> None:
    """verl#6280: logprobs moved with ppo_max_token_len_per_gpu."""
    wide, narrow = micro_batches(LENGTHS, sum(LENGTHS)), micro_batches(LENGTHS, max(LENGTHS))
    assert len(wide) == 1 < len(narrow)
    assert equal(score(opened, wide), score(opened, narrow))


def test_logprob_and_entropy_are_the_same_on_every_layout(opened: tuple[Runtime, Handle]) -> None:
    """Packed or alone, the response's rows or all rows: entropy is honoured on each (practice: chunked entropy, on the packed one only)."""
    packed, alone = [list(range(len(SAMPLES)))], [[i] for i in range(len(SAMPLES))]
    first = score(opened, packed)
    for layout, mask in ((packed, False), (alone, True), (alone, False)):
        assert equal(score(opened, layout, mask), first)
    assert all(bool((entropy > 0).all()) for _, entropy in first.values())


def test_the_last_token_of_one_sequence_is_not_seen_by_the_next(opened: tuple[Runtime, Handle]) -> None:
    """The boundary: B's first row stands right after A's last one. A's own scores do change."""
    batch = PackedBatch.from_samples([SAMPLES[1], SAMPLES[3]])
    last = batch.seq_lens[0] - 1
    changed = batch.input_ids.clone()
    changed[last] = (changed[last] + 1) % 96
    labels = batch.labels.clone()
    labels[last - 1] = changed[last]
    before, after = opened[0].forward_backward(
        opened[1], [batch, dataclasses.replace(batch, input_ids=changed, labels=labels)], forward_only=True
    ).log_probs  # fmt: skip
    assert same(after[last:], before[last:])
    assert not same(after[:last], before[:last])


def test_temperature_by_token_is_each_samples_own(opened: tuple[Runtime, Handle]) -> None:
    cold, warm = score(opened, [[1]], temperature=0.6), score(opened, [[2]], temperature=1.3)
    batch = PackedBatch.from_samples([SAMPLES[1], SAMPLES[2]])
    mixed = dataclasses.replace(batch, temperature=torch.tensor([0.6] * LENGTHS[1] + [1.3] * LENGTHS[2]))
    logprobs = opened[0].forward_backward(opened[1], mixed, forward_only=True).log_probs[0][batch.loss_mask]
    assert same(logprobs, torch.cat([cold[1][0], warm[2][0]]))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(50, 200))
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_micro_batches_keep_every_sample_once_in_order_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = micro_batches(lengths, budget)
    assert [i for group in groups for i in group] == list(range(len(lengths)))
    assert all(group and sum(lengths[i] for i in group) <= budget for group in groups)
    for group, following in itertools.pairwise(groups):
        assert sum(lengths[i] for i in group) + lengths[following[0]] > budget  # full: the next sample did not fit


def refused(said: str, make: Callable[[], object]) -> None:
    with pytest.raises(InputError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


IDS = torch.arange(6)


@pytest.mark.parametrize(
    ("said", "make"),
    [
        ("loss_mask: marks no token", lambda: PackedBatch(IDS, IDS, (6,), torch.zeros(6, dtype=torch.bool))),
        ("loss_mask: has 5 entries for 6", lambda: PackedBatch(IDS, IDS, (6,), torch.ones(5, dtype=torch.bool))),
        ("labels: has 5 entries for 6", lambda: PackedBatch(IDS, IDS[1:], (6,))),
        ("position_ids: has 7 entries for 6", lambda: PackedBatch(IDS, IDS, (6,), position_ids=torch.arange(7))),
        ("adds up to 5 for 6", lambda: PackedBatch(IDS, IDS, (2, 3))),
        ("empty sequence", lambda: PackedBatch(IDS, IDS, (6, 0))),
        ("empty sequence", lambda: PackedBatch(IDS[:0], IDS[:0], ())),
        ("sample 1: the prompt is empty", lambda: PackedBatch.from_samples([([1], [2]), ([], [2])])),
        ("sample 0: the response is empty", lambda: PackedBatch.from_samples([([1], [])])),
        ("sample 1: 9 tokens do not fit .* 8", lambda: micro_batches([8, 9], 8)),
    ],
)
def test_a_batch_that_cannot_be_is_refused(said: str, make: Callable[[], object]) -> None:
    refused(said, make)


@pytest.mark.parametrize(
    ("said", "sample"),
    [
        ("257 tokens, the model allows 256", ([1] * 256, [1])),
        ("token 96 is outside the 96 words", ([96], [1])),
        ("token 97 is outside the 96 words", ([1], [97])),
        ("token -1 is outside the 96 words", ([-1], [1])),
        ("token -100 is outside the 96 words", ([1], [-100])),
    ],
)
def test_a_batch_that_this_model_cannot_score_is_refused(said: str, sample: tuple[list[int], list[int]]) -> None:
    runtime, handle = trainer(checkpoint())
    batch = PackedBatch.from_samples([([1], [2]), sample])
    refused(said, lambda: runtime.forward_backward(handle, batch, forward_only=True))


def test_a_label_that_nobody_scores_may_be_anything_but_a_scored_one_may_not() -> None:
    """-100, the usual "ignore" label, has no logprob: at a scored row it would come back as -inf, at another one it does no harm."""
    runtime, handle = trainer(checkpoint())
    batch = PackedBatch.from_samples([SAMPLES[1], SAMPLES[2]])
    clean = runtime.forward_backward(handle, batch, forward_only=True).log_probs[0]
    for ignored in (-100, 10**6):
        labels = torch.where(batch.loss_mask, batch.labels, ignored)
        assert same(runtime.forward_backward(handle, dataclasses.replace(batch, labels=labels), forward_only=True).log_probs[0], clean)
        labels = torch.where(batch.loss_mask, ignored, batch.labels)
        refused(f"token {ignored} is outside", lambda labels=labels: runtime.forward_backward(
            handle, dataclasses.replace(batch, labels=labels), forward_only=True))  # fmt: skip


def test_the_longest_sequence_the_model_allows_is_scored() -> None:
    runtime, handle = trainer(checkpoint())
    sample = make_samples([(255, 1)])
    result = runtime.forward_backward(handle, PackedBatch.from_samples(sample), forward_only=True)
    assert torch.isfinite(result.log_probs[0]).all() and result.log_probs[0][254] < 0


@pytest.mark.parametrize(
    ("change", "names"),
    [({"temperature": 0.0}, "temperature"), ({"position_ids": torch.tensor([0, 1, 2, -1])}, "position_ids"),
     ({"position_ids": torch.tensor([0, 1, 2, 10**6])}, "position_ids")],
)  # fmt: skip
def test_a_temperature_or_position_that_means_nothing_is_refused(change: dict, names: str) -> None:
    """A negative position would silently read the rotary table's end."""
    runtime, handle = trainer(checkpoint("llama", "fp32"), "fp32")
    with pytest.raises(InputError, match=names):
        runtime.forward_backward(handle, dataclasses.replace(PackedBatch.from_samples([((1, 2), (3, 4))]), **change), forward_only=True)
