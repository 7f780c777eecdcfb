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
from lite.primitive.kernels.visible import SSDShape, VisibleKernels
from lite.primitive.parallel.packing import Seqlens

ROWS = 100  # more than three GEMM tiles, and not a multiple of one
# Not a multiple of any tile. A GPU's kernels pick other paths for long sequences, so the probe must be long there.
LENGTH, LENGTH_ON_GPU = 150, 4200


@dataclass(frozen=True)
class ModelShapes:
    """linears: (outputs, inputs) of every projection. norms: normalised sizes. attention: (query heads, key heads, head size) or None.
    swiglu, relu2: intermediate sizes. head: (vocabulary, hidden). mamba: (scan, width of the convolution, groups of the gated norm) or
    None. moe: (experts, experts a token, hidden, intermediate, activation) or None."""

    linears: tuple[tuple[int, int], ...]
    norms: tuple[int, ...]
    attention: tuple[int, int, int] | None
    swiglu: tuple[int, ...]
    head: tuple[int, int]
    mamba: tuple[SSDShape, int, int] | None = None
    moe: tuple[int, int, int, int, str] | None = None
    relu2: tuple[int, ...] = ()


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
def _probed(kernels: Any, shapes: ModelShapes, dtype: torch.dtype, device: torch.device, page: int, threads: int) -> tuple[Probe, ...]:
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
    for size in shapes.relu2:
        yield Probe("relu2", "row invariance", (size,), _first_differing(kernels.relu2, random(ROWS, size)))
    if shapes.moe is not None:
        yield from _expert_checks(kernels, *shapes.moe, random)
    if shapes.mamba is not None:
        yield from _mamba_checks(kernels, *shapes.mamba, random)
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


def _expert_checks(
    kernels: VisibleKernels, experts: int, k: int, hidden: int, intermediate: int, activation: str, random: Callable[..., Tensor]
) -> Any:
    """Router and experts. Every token chooses expert 0, which so has more rows than a tile of any set; the others have few."""
    x, gate = random(ROWS, hidden), random(experts, hidden, scale=hidden**-0.5)
    for dtype in dict.fromkeys((torch.float32, x.dtype)):
        scored = lambda x, dtype=dtype: kernels.router_logits(x, gate, dtype)  # noqa: E731
        yield Probe("router_logits", "row invariance", (experts, hidden), _first_differing(scored, x))
    logits = kernels.router_logits(x, gate, torch.float32)
    bias = random(experts, scale=0.1).float()
    choices: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
        "topk_softmax": lambda z: kernels.topk_softmax(z, k, True),
        "grouped_topk": lambda z: kernels.grouped_topk(z, bias, k, 1, 1, True),
    }
    for name, choose in choices.items():
        both = lambda z, choose=choose: torch.cat([choose(z)[0], choose(z)[1].float()], dim=1)  # noqa: E731
        yield Probe(name, "row invariance", (experts, k), _first_differing(both, logits))

    # a few matrices, each for many experts: random numbers for all of a large model's would take longer than the rest of the probe
    made = torch.arange(experts, device=x.device) % 4
    w13 = random(4, intermediate * (2 if activation == "silu" else 1), hidden, scale=hidden**-0.5)[made]
    w2 = random(4, hidden, intermediate, scale=intermediate**-0.5)[made]
    others = 1 + random(ROWS, experts - 1).argsort(-1)[:, : k - 1]
    ids = torch.cat([made.new_zeros(ROWS, 1), others], dim=1).int()
    weights = random(ROWS, k).float().softmax(-1)
    run = lambda rows: kernels.routed_experts(x[rows], w13, w2, weights[rows], ids[rows], activation)  # noqa: E731
    shape = (experts, k, hidden, intermediate)
    yield Probe("routed_experts", "row invariance", shape, _first_differing(run, torch.arange(ROWS, device=x.device)))


def _mamba_checks(kernels: VisibleKernels, shape: SSDShape, width: int, groups: int, random: Callable[..., Tensor]) -> Any:
    """The convolution and the scan, whole, cut into pieces and token by token (by the replay rule), and the gated norm."""
    H, P, G, N, L = shape
    channels, size = H * P + 2 * G * N, H * P
    device = random(1).device
    every = torch.arange(ROWS, device=device)
    x, gate, norm = random(ROWS, size), random(ROWS, size, scale=2.0), random(size)
    run = lambda rows: kernels.gated_rms_norm(x[rows], gate[rows], norm, groups, 1e-5)  # noqa: E731
    yield Probe("gated_rms_norm", "row invariance", (size, groups), _first_differing(run, every))

    lengths = (37, max(3 * L + 5, ROWS), 1)  # more than two chunks, between two other sequences
    rows, weight, bias = random(sum(lengths), channels), random(channels, width, scale=0.5), random(channels)
    packed = kernels.causal_conv1d(rows, weight, bias, None, Seqlens.of(lengths, lengths, device))
    probed = slice(lengths[0], lengths[0] + lengths[1])
    xbc = rows[probed]
    windows = torch.cat([xbc.new_zeros(width - 1, channels), xbc]).unfold(0, width - 1, 1).transpose(1, 2)

    def decoded(rows: Tensor) -> Tensor:
        """Each row as one new token after its own history."""
        ones = [1] * len(rows)
        return kernels.causal_conv1d(xbc[rows], weight, bias, windows[rows].contiguous(), Seqlens.of(ones, ones, device))

    yield Probe("causal_conv1d", "row invariance", (channels, width), _first_differing(decoded, every))
    differs = (bits(decoded(torch.arange(lengths[1], device=device))) != bits(packed[probed])).any(1)
    row = int(differs.nonzero()[0]) if differs.any() else None
    yield Probe("causal_conv1d", "decode equals prefill", (channels, width), row)
    yield from _scan_checks(kernels, shape, packed, lengths, random)


def _scan_checks(kernels: VisibleKernels, shape: SSDShape, xbc: Tensor, lengths: tuple[int, ...], random: Callable[..., Tensor]) -> Any:
    """Of the second sequence of `lengths`: its rows packed among the others against the same alone, in pieces and token by token."""
    H, L, (offset, length, _), device = shape.heads, shape.chunk, lengths, xbc.device
    dt, D, dt_bias, A = random(len(xbc), H), random(H), random(H, scale=0.5) - 2.0, -torch.exp(random(H).float())

    def scan(rows: Tensor, boundary: Tensor | None, seqlens: Seqlens) -> tuple[Tensor, Tensor]:
        return kernels.ssd_scan(xbc[rows], dt[rows], A, D, dt_bias, boundary, seqlens, shape)

    packed = bits(scan(torch.arange(len(xbc), device=device), None, Seqlens.of(lengths, lengths, device))[0][offset : offset + length])
    boundaries = [torch.zeros(1, H, shape.head_dim, shape.state, device=device)]
    for stop in range(L, length + 1, L):
        boundaries.append(scan(offset + torch.arange(stop, device=device), None, Seqlens.of([stop], [stop], device))[1])

    def differing(spans: list[tuple[int, int]]) -> int | None:
        """One call over several cuts (start, stop) of the sequence, each with the rows since its last boundary again."""
        begins = [start // L * L for start, _ in spans]
        rows = torch.cat([torch.arange(begin, stop) for begin, (_, stop) in zip(begins, spans, strict=True)]).to(device)
        asked = torch.cat([torch.arange(start, stop) for start, stop in spans]).to(device)
        held = [stop - begin for begin, (_, stop) in zip(begins, spans, strict=True)]
        seqlens = Seqlens.of([stop - start for start, stop in spans], held, device)
        y, ends = scan(offset + rows, torch.cat([boundaries[begin // L] for begin in begins]), seqlens)
        differs = (bits(y) != packed[asked]).any(1)
        if differs.any():
            return int(asked[differs].min())
        wrong = bits(ends) != bits(torch.cat([boundaries[stop // L] for _, stop in spans]))
        return min((stop for (_, stop), w in zip(spans, wrong.flatten(1).any(1).tolist(), strict=True) if w), default=None)

    def first(calls: list[list[tuple[int, int]]]) -> int | None:
        return min((row for spans in calls if (row := differing(spans)) is not None), default=None)

    yield Probe("ssd_scan", "packed equals alone", shape, first([[(0, length)]]))
    cuts = [7, L - 1, L, L + 1, 2 * L, 2 * L + 3]
    pieces = [[(0, cut)] for cut in cuts] + [[(cut, length)] for cut in cuts] + [[(7, L + 7), (0, 7), (L + 7, length)]]
    yield Probe("ssd_scan", "cut prefill equals prefill", shape, first(pieces))
    steps = [(t, t + 1) for t in (0, 1, L // 2, L - 1, L, L + 1, 2 * L - 1, 2 * L, 3 * L - 1, 3 * L, length - 1)]
    calls = [[step] for step in steps] + [steps, [*steps[:8], (0, L + 7)]]
    yield Probe("ssd_scan", "decode equals prefill", shape, first(calls))
