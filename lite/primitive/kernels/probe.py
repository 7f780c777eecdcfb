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
from lite.primitive.parallel.packing import cumulative_lengths

ROWS = 100  # more than three GEMM tiles, and not a multiple of one
# Not a multiple of any tile. A GPU's kernels pick other paths for long sequences (at head size 64, FlashAttention 3 decodes unlike it
# prefills somewhere between 1,000 and 4,000 keys), so the probe must be long there.
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


@lru_cache(maxsize=64)
def probe_kernels(kernels: Any, shapes: ModelShapes, dtype: torch.dtype, device: torch.device, page: int = 16) -> tuple[Probe, ...]:
    """Every check, in order; page is the engine's. Raises ProbeError at the first broken promise.

    "threads" only reports: a result that depends on the number of threads is still the same on both sides of one process.
    """
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
    for size in shapes.swiglu:
        yield Probe("swiglu", "row invariance", (size,), _first_differing(kernels.swiglu, random(ROWS, 2 * size, scale=2.0)))
    if shapes.attention is not None:
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
    cu = cumulative_lengths(lengths, device)
    packed = bits(kernels.attention(q, k, v, cu, cu, dim**-0.5)[0])

    def differing(start: int, stop: int) -> int | None:
        """Queries start .. stop of the first sequence, beside the whole second one, with the keys up to stop."""
        two = torch.cat([torch.arange(start, stop), torch.arange(length, length + 37)]).to(device)
        keys = torch.cat([torch.arange(stop), torch.arange(length, length + 37)]).to(device)
        cu_q, cu_k = cumulative_lengths((stop - start, 37), device), cumulative_lengths((stop, 37), device)
        again = bits(kernels.paged_attention(q[two], k[keys], v[keys], cu_q, cu_k, dim**-0.5, page)[0])
        differs = (again != packed[two]).flatten(1).any(1)
        return int(two[differs].min()) if differs.any() else None

    def first(spans: list[tuple[int, int]]) -> int | None:
        return min((row for span in spans if (row := differing(*span)) is not None), default=None)

    yield Probe("attention", "packed equals alone", shape, first([(0, length)]))
    yield Probe("attention", "chunked prefill equals prefill", shape, first([(0, 7), (7, 71), (71, length)]))
    places = {0, 1, 31, 63, 64, 100, 127, 128, *range(200, length, 61), length - 1}
    yield Probe("attention", "decode equals prefill", shape, first([(t, t + 1) for t in sorted(places)]))
