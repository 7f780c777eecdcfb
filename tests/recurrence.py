"""The contract of Mamba-2's convolution and scan, a token at a time: slow, plain, and bit for bit the same however a sequence is cut."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lite.primitive.kernels.visible import SSDShape
from lite.primitive.parallel.packing import Seqlens


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None, seqlens: Seqlens) -> Tensor:
    assert bias is not None
    rows, (channels, width) = [], weight.shape
    for s, (start, stop) in enumerate(zip(seqlens.cu_q[:-1].tolist(), seqlens.cu_q[1:].tolist(), strict=True)):
        before = torch.zeros(width - 1, channels) if history is None else history[s]
        padded = torch.cat([before, x[start:stop]])
        rows += [F.silu((padded[t : t + width] * weight.t()).sum(0) + bias) for t in range(stop - start)]
    return torch.stack(rows)


def ssd_scan(
    xbc: Tensor, dt: Tensor, A: Tensor, D: Tensor, dt_bias: Tensor, boundary: Tensor | None, seqlens: Seqlens, shape: SSDShape
) -> tuple[Tensor, Tensor]:
    """One group."""
    assert shape.groups == 1
    assert seqlens.cu_q is seqlens.cu_k, "or the kernel would ask the device how many rows are queries"
    y, boundaries = torch.empty(len(xbc), shape.heads * shape.head_dim), []
    for s, (start, stop) in enumerate(zip(seqlens.cu_k[:-1].tolist(), seqlens.cu_k[1:].tolist(), strict=True)):
        state = torch.zeros(shape.heads, shape.head_dim, shape.state) if boundary is None else boundary[s]
        kept = state
        for t in range(start, stop):
            x, b, c = xbc[t].split([shape.heads * shape.head_dim, shape.state, shape.state])
            x, step = x.view(shape.heads, shape.head_dim), F.softplus(dt[t] + dt_bias)
            state = torch.exp(step * A)[:, None, None] * state + (step[:, None] * x)[..., None] * b
            y[t] = ((state * c).sum(-1) + D[:, None] * x).flatten()
            kept = state if (t - start + 1) % shape.chunk == 0 else kept
        boundaries.append(kept)
    return y, torch.stack(boundaries)
