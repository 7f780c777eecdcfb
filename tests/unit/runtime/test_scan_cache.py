"""The engine's cache under a scan: what lies before the tokens in hand, through cuts, companies, preemption and reused pages."""

import pytest
import torch

from lite.primitive.parallel.packing import PackedSequences
from lite.runtime.rollout.paged_cache import PAGE, CachedSequences, PagedCache

CHUNK, WIDTH, LAYER = 4, 3, 2
CPU = torch.device("cpu")


def rows(name: int, start: int, stop: int) -> torch.Tensor:
    """Row t of a sequence is (name, t): nothing else looks like it."""
    return torch.stack([torch.full((stop - start,), float(name)), torch.arange(start, stop).float()], dim=1)


def state(name: int, boundary: int) -> torch.Tensor:
    return torch.tensor([float(name), float(boundary)]).view(2, 1, 1)


class Sequence:
    def __init__(self, name: int, cache: PagedCache):
        self.name, self.past, self.pages = name, 0, []
        self.cache = cache

    def grow(self, new: int) -> tuple[list[int], int, int]:
        assert self.cache.grow(self.pages, self.past + new)
        return self.pages, self.past, new


def step(cache: PagedCache, *sequences: tuple[Sequence, int]) -> None:
    """Feeds each sequence that many of its rows, and holds what the context gives back against what was ever fed."""
    context = CachedSequences(cache, [s.grow(new) for s, new in sequences])
    fed = torch.cat([rows(s.name, s.past, s.past + new) for s, new in sequences])
    history = context.conv_history(LAYER, fed, WIDTH)
    xbc, dt, boundary, seqlens = context.extend_scan(LAYER, fed, fed + 0.5, CHUNK)
    starts = [s.past // CHUNK * CHUNK for s, _ in sequences]
    want = torch.cat([rows(s.name, start, s.past + new) for (s, new), start in zip(sequences, starts, strict=True)])
    assert torch.equal(xbc, want) and torch.equal(dt, want + 0.5)
    assert seqlens.cu_q.diff().tolist() == [new for _, new in sequences]
    assert seqlens.cu_k.diff().tolist() == [s.past + new - start for (s, new), start in zip(sequences, starts, strict=True)]
    assert context.seqlens.cu_k.tolist() == context.seqlens.cu_q.tolist() == seqlens.cu_q.tolist()
    for i, (s, _) in enumerate(sequences):
        before = rows(s.name, max(s.past - WIDTH + 1, 0), s.past)
        assert torch.equal(history[i], torch.cat([torch.zeros(WIDTH - 1 - len(before), 2), before]))
        given = torch.zeros(2, 1, 1) if boundary is None else boundary[i]
        assert torch.equal(given, state(s.name, starts[i]) if starts[i] else torch.zeros(2, 1, 1))
    context.keep_boundary(LAYER, torch.stack([state(s.name, (s.past + new) // CHUNK * CHUNK) for s, new in sequences]))
    for s, new in sequences:
        s.past += new


@pytest.mark.parametrize("first", range(1, 2 * CHUNK + 2))
def test_a_sequence_cut_at_every_place_then_decoded(first: int) -> None:
    cache = PagedCache(4, CPU)
    s = Sequence(1, cache)
    step(cache, (s, first))
    if first < 2 * CHUNK + 1:
        step(cache, (s, 2 * CHUNK + 1 - first))
    for _ in range(2 * CHUNK):
        step(cache, (s, 1))


def test_sequences_that_join_leave_and_share_steps_keep_their_own() -> None:
    cache = PagedCache(6, CPU)
    a, b, c = (Sequence(name, cache) for name in (1, 2, 3))
    step(cache, (a, 5))
    step(cache, (a, 1), (b, 17))
    step(cache, (b, 1), (a, 3))
    cache.release(a.pages)
    step(cache, (c, 2), (b, 4))  # in the pages that a has left, with whatever a stored there
    step(cache, (b, 1), (c, 1))
    cache.release(b.pages)
    again = Sequence(2, cache)  # preempted: from the start, by recomputation
    step(cache, (c, 9), (again, PAGE + 7))
    step(cache, (again, 1), (c, 1))


def test_a_context_that_gives_another_row_would_be_seen() -> None:
    class OneRowLate(CachedSequences):
        def boundary(self, past: int, chunk: int) -> int:
            return super().boundary(past, chunk) + (past % chunk > 1)

    cache = PagedCache(4, CPU)
    original = globals()["CachedSequences"]
    s = Sequence(1, cache)
    step(cache, (s, 6))
    globals()["CachedSequences"] = OneRowLate
    try:
        with pytest.raises(AssertionError):
            step(cache, (s, 1))
    finally:
        globals()["CachedSequences"] = original


def test_what_was_never_written_is_not_a_number() -> None:
    cache = PagedCache(2, CPU)
    pool = cache.pool(0, "xbc", torch.zeros(1, 2))
    assert torch.isnan(pool).all() and pool.shape == (2 * PAGE, 2)
    assert cache.states(0, torch.zeros(1, 2, 3)).shape == (2, 2, 3)


def test_in_training_nothing_lies_before() -> None:
    context, x = PackedSequences.of([3, 2]), torch.randn(5, 2)
    assert context.conv_history(0, x, 4) is None
    xbc, dt, boundary, seqlens = context.extend_scan(0, x, x, 4)
    assert xbc is x and dt is x and boundary is None and seqlens is context.seqlens
