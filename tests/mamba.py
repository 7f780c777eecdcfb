"""Inputs of Mamba-2's scan at the magnitudes of trained models, and an engine's way through it: the replay rule of `VisibleKernels`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lite.primitive.kernels import reference
from lite.primitive.kernels.visible import SSDShape
from lite.primitive.parallel.packing import Seqlens

Scan = Callable[..., tuple[Tensor, Tensor]]
SMALL = SSDShape(heads=4, head_dim=8, groups=2, state=16, chunk=16)


@dataclass
class ScanInputs:
    """xbc[T, C] and dt[T, H] of one sequence or several, and the layer's parameters. Steps are about 0.02 to 0.5, A is -1 to -16."""

    xbc: Tensor
    dt: Tensor
    A: Tensor
    D: Tensor
    dt_bias: Tensor
    shape: SSDShape

    @classmethod
    def random(cls, tokens: int, shape: SSDShape, dtype: torch.dtype) -> "ScanInputs":
        H, P, G, N, _ = shape
        xbc = torch.randn(tokens, H * P + 2 * G * N).to(dtype)
        dt, bias = torch.randn(tokens, H).to(dtype), torch.empty(H).uniform_(-3, -1).to(dtype)
        return cls(xbc, dt, -torch.empty(H).uniform_(1, 16), torch.randn(H).to(dtype), bias, shape)

    def rows(self, index: Tensor | slice) -> "ScanInputs":
        return ScanInputs(self.xbc[index].clone(), self.dt[index].clone(), self.A, self.D, self.dt_bias, self.shape)

    def scan(self, lengths: Sequence[int], boundary: Tensor | None = None, scan: Scan = reference.ssd_scan) -> tuple[Tensor, Tensor]:
        """All rows as whole packed sequences, or from `boundary` on."""
        return scan(self.xbc, self.dt, self.A, self.D, self.dt_bias, boundary, Seqlens.of(lengths, lengths), self.shape)


@dataclass
class Served:
    """A sequence in an engine: rows start .. seen are replayed with the next ones; boundary[H, P, N] is the state before `start`."""

    inputs: ScanInputs
    boundary: Tensor
    start: int = 0
    seen: int = 0

    @classmethod
    def of(cls, inputs: ScanInputs) -> "Served":
        H, P, _, N, _ = inputs.shape
        return cls(inputs, torch.zeros(H, P, N))


def serve(sequences: Sequence[Served], counts: Sequence[int], scan: Scan = reference.ssd_scan) -> list[Tensor]:
    """One step of an engine: the next counts[i] tokens of each sequence -> their y."""
    first, L = sequences[0].inputs, sequences[0].inputs.shape.chunk
    spans = [slice(s.start, s.seen + n) for s, n in zip(sequences, counts, strict=True)]
    xbc, dt = (torch.cat([getattr(s.inputs, name)[span] for s, span in zip(sequences, spans, strict=True)]) for name in ("xbc", "dt"))
    seqlens = Seqlens.of(counts, [span.stop - span.start for span in spans])
    y, boundary = scan(xbc, dt, first.A, first.D, first.dt_bias, torch.stack([s.boundary for s in sequences]), seqlens, first.shape)
    for s, n, after in zip(sequences, counts, boundary, strict=True):
        s.seen, s.boundary = s.seen + n, after
        s.start = s.seen // L * L
    return list(y.split(list(counts)))


def served(inputs: ScanInputs, pieces: Sequence[int], scan: Scan = reference.ssd_scan) -> tuple[Tensor, Tensor]:
    """One sequence in pieces -> (y, the boundary at the end)."""
    sequence = Served.of(inputs)
    y = torch.cat([serve([sequence], [n], scan)[0] for n in pieces])
    return y, sequence.boundary
