"""The replay rule as the engine keeps it, on a plain recurrence: whatever way a sequence takes through steps and pages, its rows have the
bits of one scan of the whole. Pages hold NaN wherever the engine did not write."""

import random
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lite.primitive.compare import bits
from lite.primitive.kernels.visible import SSDShape
from lite.primitive.parallel.packing import Seqlens
from lite.vllm_plugin import replay
from tests.recurrence import causal_conv1d, ssd_scan

L, W = 4, 4
SHAPE = SSDShape(heads=2, head_dim=3, groups=1, state=2, chunk=L)
C = SHAPE.heads * SHAPE.head_dim + 2 * SHAPE.groups * SHAPE.state
NULL = 0  # the page that padding points at


KERNELS = SimpleNamespace(causal_conv1d=causal_conv1d, ssd_scan=ssd_scan)


# A small engine: it decides what a step holds, the functions under test do the rest.


class Request:
    def __init__(self, length: int, prompt: int, mixer: replay.Mixer):
        self.xbc, self.dt, self.prompt = torch.randn(length, C), torch.randn(length, SHAPE.heads), prompt
        seqlens = Seqlens.of([length], [length])
        rows = causal_conv1d(self.xbc, mixer.conv_weight, mixer.conv_bias, None, seqlens)
        self.want, _ = ssd_scan(rows, self.dt, mixer.A, mixer.D, mixer.dt_bias, None, seqlens, SHAPE)
        self.restart()

    def restart(self) -> None:
        self.computed, self.slot, self.got = 0, -1, []

    @property
    def done(self) -> bool:
        return self.computed == len(self.xbc)

    @property
    def exact(self) -> bool:
        return torch.equal(bits(torch.cat(self.got)), bits(self.want[: self.computed]))


class Engine:
    def __init__(self, pages: int = 6):
        self.mixer = replay.Mixer(torch.randn(C, W), torch.randn(C), -torch.rand(2) - 0.1, torch.randn(2), torch.randn(2), SHAPE)
        shapes = (W - 1, C), (SHAPE.heads, SHAPE.head_dim, SHAPE.state), (L, C), (L, SHAPE.heads)
        self.pages = replay.Pages(*(torch.full((pages, *shape), torch.nan) for shape in shapes))
        self.free = list(range(1, pages))

    def request(self, length: int, prompt: int = 1) -> Request:
        return Request(length, prompt, self.mixer)

    def step(self, decoding: list[Request], prompts: list[tuple[Request, int]], padding: int = 0) -> None:
        """One token of each that decodes, beside padding, then pieces of prompts."""
        for request in (*decoding, *(r for r, _ in prompts)):
            if request.slot < 0:
                request.slot = self.free.pop()
        if decoding:
            none = torch.full((padding,), NULL, dtype=torch.int32)
            slots = torch.cat([torch.tensor([r.slot for r in decoding]).int(), none])
            computed = torch.cat([torch.tensor([r.computed for r in decoding]).int(), none])
            xbc, dt = (torch.stack([getattr(r, name)[r.computed] for r in decoding]) for name in ("xbc", "dt"))
            xbc, dt = (torch.cat([t, torch.full((padding, t.shape[1]), torch.nan)]) for t in (xbc, dt))
            self._take(decoding, [1] * len(decoding), replay.decode(KERNELS, self.mixer, self.pages, slots, computed, xbc, dt))
        if prompts:
            requests, new = zip(*prompts, strict=True)
            pieces = replay.Pieces.of([r.computed for r in requests], new, L, "cpu")
            slots = torch.tensor([r.slot for r in requests]).int()
            xbc, dt = (torch.cat([getattr(r, name)[r.computed : r.computed + n] for r, n in prompts]) for name in ("xbc", "dt"))
            self._take(requests, new, replay.prefill(KERNELS, self.mixer, self.pages, slots, pieces, xbc, dt))

    def _take(self, requests: Any, new: Any, y: Tensor) -> None:
        start = 0
        for request, count in zip(requests, new, strict=True):
            request.got.append(y[start : start + count])
            request.computed += count
            start += count

    def leave(self, request: Request) -> None:
        """Its page goes back as it is."""
        self.free.append(request.slot)
        request.slot = -1


@pytest.fixture
def engine() -> Engine:
    torch.manual_seed(0)
    return Engine()


def run(engine: Engine, pieces: list[int]) -> Request:
    """A request alone: a prefill in these pieces; pieces of 0 stand for a decode step."""
    request = engine.request(sum(max(n, 1) for n in pieces))
    for n in pieces:
        engine.step([] if n else [request], [(request, n)] if n else [])
    return request


@pytest.mark.parametrize("cuts", [cuts for k in (0, 1, 2) for cuts in combinations(range(1, 2 * L + 1), k)], ids=str)
def test_a_prefill_cut_anywhere_and_the_decode_after_it_are_one_scan(engine: Engine, cuts: tuple[int, ...]) -> None:
    ends = [0, *cuts, 2 * L + 1]
    request = run(engine, [b - a for a, b in pairwise(ends)] + [0] * (L + 1))
    assert request.done and request.exact


@pytest.mark.parametrize("prompt", range(2 * L + 2))
def test_decode_after_any_prompt_is_one_scan(engine: Engine, prompt: int) -> None:
    """A prompt of no rows: the first token decodes."""
    request = run(engine, ([prompt] if prompt else []) + [0] * (2 * L + 1))
    assert request.done and request.exact


@pytest.mark.parametrize("padding", [0, 1, 3])
def test_first_tokens_decode_among_others_and_padding(engine: Engine, padding: int) -> None:
    old, firsts = run(engine, [5]), [engine.request(L + 2) for _ in range(2)]
    old.xbc, old.dt, old.want = (torch.cat([t, t[:1].new_full((1, t.shape[1]), 9.0)]) for t in (old.xbc, old.dt, old.want))
    engine.step([old, *firsts], [], padding)
    for _ in range(L + 1):
        engine.step(firsts, [], padding)
    assert all(r.done and r.exact for r in firsts)


def served(engine: Engine, seed: int, requests: int = 14) -> list[Request]:
    """Requests that come, are cut, decode beside others, are preempted and start again, and leave their pages to others."""
    rng = random.Random(seed)
    waiting = [engine.request(n := rng.randint(1, 4 * L), rng.randint(1, n)) for _ in range(requests)]
    running: list[Request] = []
    finished: list[Request] = []
    while waiting or running:
        while waiting and engine.free and rng.random() < 0.6:
            request = waiting.pop(0)
            request.slot = engine.free.pop(rng.randrange(len(engine.free)))
            running.append(request)
        rng.shuffle(running)
        decoding, prompts = [], []
        for request in running:
            left = request.prompt - request.computed
            if left <= 0 or (left == 1 and not prompts):
                decoding.append(request)
            elif rng.random() < 0.8:
                prompts.append((request, rng.randint(1, left)))
        engine.step(decoding, prompts, padding=rng.randint(0, 2))
        for request in [r for r in running if r.done or rng.random() < 0.05]:
            running.remove(request)
            engine.leave(request)
            if request.done:
                finished.append(request)
            else:
                request.restart()
                waiting.append(request)
    return finished


@pytest.mark.parametrize("seed", range(6))
def test_requests_that_come_and_go_have_the_bits_of_one_scan(engine: Engine, seed: int) -> None:
    finished = served(engine, seed)
    assert len(finished) == 14 and all(r.exact for r in finished)


def test_decode_in_parts_has_the_same_bits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "DECODE_SEQUENCES", 2)
    assert all(r.exact for r in served(engine, 1))


# Planted errors.


def stale_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new page is taken for what its last request left."""
    monkeypatch.setattr(replay.page_io, "read_states", lambda held, slots, valid: held[slots])


def state_of_a_partial_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is taken at the last row in place of the last boundary."""

    def scan(xbc: Tensor, dt: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        y, _ = ssd_scan(xbc, dt, *args)
        return y, ssd_scan(xbc, dt, *args[:-1], SHAPE._replace(chunk=1))[1]

    monkeypatch.setattr(KERNELS, "ssd_scan", scan)


def pieces_of(change: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        of = replay.Pieces.of
        monkeypatch.setattr(replay.Pieces, "of", lambda *args: change(of(*args)))

    return plant


PLANTS = {
    "stale state": stale_state,
    "a partial chunk's state": state_of_a_partial_chunk,
    "held rows shifted by one": pieces_of(lambda p: p._replace(held_row=(p.held_row - 1).clamp(min=0))),
    "kept rows shifted by one": pieces_of(lambda p: p._replace(kept_at=(p.kept_at - 1).clamp(min=0))),
    "another sequence's held rows": pieces_of(lambda p: p._replace(held_of=p.held_of.flip(0))),
    "a token too few computed": pieces_of(lambda p: p._replace(computed=(p.computed - 1).clamp(min=0))),
}


@pytest.fixture(params=PLANTS)
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    PLANTS[request.param](monkeypatch)
    yield request.param


def test_a_wrong_state_or_row_is_noticed(engine: Engine, planted: str) -> None:
    assert not all(r.exact for seed in range(3) for r in served(engine, seed)), planted


def test_the_state_of_a_chunk_that_is_not_full_yet_is_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for the boundary in a decode step."""
    monkeypatch.setattr(replay.page_io, "write_states", lambda held, slots, full, states: held.__setitem__(slots, states))
    assert not all(r.exact for r in served(engine, 0))
