"""Checks on the device in hand, at one model's shapes, that a kernel set keeps the promises of `visible.py`.

The reference set is batch-invariant as long as a GEMM tile treats its rows alike and a batched product its matrices; whether that
holds is a property of the machine's BLAS, so it is measured before a model is built on it, not assumed.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lite.errors import ProbeError
from lite.primitive.compare import bits
from lite.primitive.kernels.visible import VisibleKernels
from lite.primitive.parallel.packing import Seqlens

ROWS = 100  # more than three GEMM tiles, and not a multiple of one
# Not a multiple of any tile. A GPU's kernels pick other paths for long sequences, so the probe must be long there.
LENGTH, LENGTH_ON_GPU = 150, 4200


@dataclass(frozen=True)
class ModelShapes:
    """linears: (outputs, inputs) of every projection. norms: normalised sizes. attention: (query heads, key heads, head size) or None.
    swiglu: intermediate sizes. head: (vocabulary, hidden)."""

    linears: tuple[tuple[int, int], ...]
    norms: tuple[int, ...]
    attention: tuple[int, int, int] | None
    swiglu: tuple[int, ...]
    head: tuple[int, int]


@dataclass(frozen=True)
class Probe:
    """One promise, checked. first_row: the first row whose bytes differ, None where all agree."""

    kernel: str
    check: str
    shape: tuple[int, ...]
    first_row: int | None

    @property
    def ok(self) -> bool:
        return self.first_row is None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"shape": list(self.shape), "ok": self.ok}


def probe_kernels(kernels: Any, shapes: ModelShapes, dtype: torch.dtype, device: torch.device, page: int = 16) -> tuple[Probe, ...]:
    """Every check, in order; page is the engine's. Raises ProbeError at the first broken promise.

    "threads" only reports: a result that depends on the number of threads is still the same on both sides of one process.
    """
    return _probed(kernels, shapes, dtype, device, page, torch.get_num_threads())


@lru_cache(maxsize=64)
def _probed(
    kernels: Any, shapes: ModelShapes, dtype: torch.dtype, device: torch.device, page: int, threads: int
) -> tuple[Probe, ...]:
    """A property of the machine and of how many threads it works with, so found once for each."""
    found = []
    for probe in _checks(kernels, shapes, dtype, device, page):
        if not probe.ok and probe.check != "threads":
            raise ProbeError(
                f"kernel {kernels.NAME}.{probe.kernel}: {probe.check} broken at shape {probe.shape} in {dtype} on {device}: "
                f"first differing row {probe.first_row}; exact logprobs cannot be promised on this machine"
            )
        found.append(probe)
    return tuple(found)


def _checks(kernels: VisibleKernels, shapes: ModelShapes, dtype: torch.dtype, device: torch.device, page: int) -> Any:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    for outputs, inputs in shapes.linears:
        weight = random(outputs, inputs, scale=inputs**-0.5)
        run = lambda x, weight=weight: kernels.linear(x, weight, None)  # noqa: E731
        x = random(ROWS, inputs)
        yield Probe("linear", "row invariance", (outputs, inputs), _first_differing(run, x))
        if device.type == "cpu":
            yield Probe("linear", "threads", (outputs, inputs), _thread_dependence(run, x))
    for size in shapes.norms:
        weight = random(size)
        run = lambda x, weight=weight: kernels.rms_norm(x, weight, 1e-6)  # noqa: E731
        yield Probe("rms_norm", "row invariance", (size,), _first_differing(run, random(ROWS, size)))
        run = lambda x, weight=weight: kernels.add_rms_norm(x, x.flip(-1), weight, 1e-6)[0]  # noqa: E731
        yield Probe("add_rms_norm", "row invariance", (size,), _first_differing(run, random(ROWS, size)))
    for size in shapes.swiglu:
        yield Probe("swiglu", "row invariance", (size,), _first_differing(kernels.swiglu, random(ROWS, 2 * size, scale=2.0)))
    if shapes.attention is not None:
        heads, _, dim = shapes.attention
        angles = random(1, dim)

        def turned(x: Tensor) -> Tensor:
            positions = torch.zeros(len(x), dtype=torch.int64, device=device)
            return kernels.rotary(x.view(-1, heads, dim), x.view(-1, heads, dim)[:, :1].contiguous(), positions, angles)[0]

        yield Probe("rotary", "row invariance", (heads, dim), _first_differing(turned, random(ROWS, heads * dim)))
        yield from _attention_checks(kernels, shapes.attention, random, page)
    vocab, hidden = shapes.head
    weight = random(vocab, hidden, scale=3 * hidden**-0.5)

    def logprob(x: Tensor) -> Tensor:
        labels = torch.full(x.shape[:1], vocab // 2, device=device)
        return kernels.token_logprobs(x, weight, labels, torch.ones(len(x), device=device), vocab, False)[0][:, None]

    x = random(ROWS, hidden)
    yield Probe("token_logprobs", "row invariance", shapes.head, _first_differing(logprob, x))
    labels, warm = torch.arange(ROWS, device=device) * (vocab // ROWS), torch.linspace(0.5, 1.5, ROWS, device=device)
    sampler = bits(kernels.sampler_logprobs(x, weight, labels, warm, vocab))
    differs = sampler != bits(kernels.token_logprobs(x, weight, labels, warm, vocab, True)[0])
    yield Probe("token_logprobs", "equals the sampler's", shapes.head, int(differs.nonzero()[0]) if differs.any() else None)


def _first_differing(run: Callable[[Tensor], Tensor], x: Tensor) -> int | None:
    """Compares rows of one call with the same rows alone, in odd company and in another order. -> the first that differs."""
    whole = bits(run(x))
    order = torch.arange(len(x) - 1, -1, -1, device=x.device)
    for rows in (order[:1], order[-1:], order[10:13], order[40:57], order):
        differs = (bits(run(x[rows])) != whole[rows]).flatten(1).any(1)
        if differs.any():
            return int(rows[differs].min())
    return None


def _thread_dependence(run: Callable[[Tensor], Tensor], x: Tensor) -> int | None:
    threads = torch.get_num_threads()
    many = bits(run(x))
    torch.set_num_threads(1)
    try:
        one = bits(run(x))
    finally:
        torch.set_num_threads(threads)
    differs = (one != many).any(1)
    return int(differs.nonzero()[0]) if differs.any() else None


def _attention_checks(kernels: VisibleKernels, shape: tuple[int, int, int], random: Callable[..., Tensor], page: int) -> Any:
    """Training's packed attention against what the engine computes from pages: whole, cut into pieces, token by token."""
    query_heads, kv_heads, dim = shape
    device = random(1).device
    length = LENGTH_ON_GPU if device.type == "cuda" else LENGTH
    lengths = (length, 37, 1)
    total = sum(lengths)
    q, k, v = random(total, query_heads, dim), random(total, kv_heads, dim), random(total, kv_heads, dim)
    packed = bits(kernels.attention(q, k, v, Seqlens.of(lengths, lengths, device), dim**-0.5)[0])

    def differing(spans: list[tuple[int, int]]) -> int | None:
        """One call over several cuts (start, stop) of the first sequence: its queries start .. stop with its keys up to stop."""
        rows = torch.cat([torch.arange(start, stop) for start, stop in spans]).to(device)
        keys = torch.cat([torch.arange(stop) for _, stop in spans]).to(device)
        seqlens = Seqlens.of([stop - start for start, stop in spans], [stop for _, stop in spans], device)
        again = bits(kernels.paged_attention(q[rows], k[keys], v[keys], seqlens, dim**-0.5, page)[0])
        differs = (again != packed[rows]).flatten(1).any(1)
        return int(rows[differs].min()) if differs.any() else None

    def first(calls: list[list[tuple[int, int]]]) -> int | None:
        return min((row for spans in calls if (row := differing(spans)) is not None), default=None)

    yield Probe("attention", "packed equals alone", shape, first([[(0, length)]]))
    yield Probe("attention", "chunked prefill equals prefill", shape, first([[(0, 7)], [(7, 71)], [(71, length), (0, 7)]]))
    places = sorted({0, 1, 31, 63, 64, 100, 127, 128, *range(200, length, 61), length - 1})
    steps = [(t, t + 1) for t in places]
    # decode steps alone, in a batch of their own (kernels choose by the longest query of a call) and beside a prefill
    calls = [[step] for step in steps] + [steps[i : i + 8] for i in range(0, len(steps), 8)] + [[*steps[:8], (0, 71)]]
    yield Probe("attention", "decode equals prefill", shape, first(calls))
