"""Reference Mamba-2: convolution, chunked scan and gated norm, with a token's bits free of its company.

The scan walks the chunks of a sequence in order, all sequences side by side. A chunk is L rows from a multiple of L tokens of its
sequence on, padded with zero rows: its products have one shape whatever the chunk holds, a row of them reads no later row (the weights
of those are exactly 0), sums along the chunk are prefix sums whose order is fixed, and the state goes from chunk to chunk in fp32. So a
token has the same bits in a prefill, in a piece of it and in decode, as long as the rows since its chunk's start are given with it.
"""

import torch
from torch import Tensor

from lite.primitive.kernels.reference.pointwise import prefix_sum, silu, softplus, tree_sum
from lite.primitive.kernels.visible import SSDShape
from lite.primitive.parallel.packing import Seqlens


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None, seqlens: Seqlens) -> Tensor:
    W = weight.shape[1]
    source = conv_source(x, history, W)
    acc = x.new_zeros(1, x.shape[1], dtype=torch.float32) if bias is None else bias.float()
    for rows, tap in zip(tap_rows(seqlens, len(x), W, history is not None), weight.float().unbind(1), strict=True):
        acc = acc + tap * source[rows]
    return silu(acc).to(x.dtype)


def conv_source(x: Tensor, history: Tensor | None, width: int) -> Tensor:
    """What the taps read, fp32: the rows of x[T, C], those of history[S, width - 1, C], one zero row."""
    parts = [x, x.new_zeros(1, x.shape[1])] if history is None else [x, history.flatten(0, 1), x.new_zeros(1, x.shape[1])]
    return torch.cat(parts).float()


def tap_rows(seqlens: Seqlens, tokens: int, width: int, with_history: bool) -> list[Tensor]:
    """For each tap the row of `conv_source` that each token [T] reads."""
    first = seqlens.cu_q[:-1].long()
    row = torch.arange(tokens, device=first.device)
    seq = torch.repeat_interleave(torch.arange(len(first), device=first.device), seqlens.cu_q.diff().long(), output_size=tokens)
    found = []
    for tap in range(width):
        back = row - (width - 1) + tap
        place = back - first[seq]  # in the sequence; negative: before it
        before = tokens + seq * (width - 1) + place + (width - 1) if with_history else tokens
        found.append(torch.where(place >= 0, back, before))
    return found


def ssd_scan(
    xbc: Tensor, dt: Tensor, A: Tensor, D: Tensor, dt_bias: Tensor, boundary: Tensor | None, seqlens: Seqlens, shape: SSDShape
) -> tuple[Tensor, Tensor]:
    H, P, _, N, L = shape
    Tk = len(xbc)
    first, length = seqlens.cu_k[:-1].long(), seqlens.cu_k.diff().long()
    state = xbc.new_zeros(len(first), H, P, N, dtype=torch.float32) if boundary is None else boundary.clone()

    # one zero row past the end stands for everything that pads a chunk: it moves nothing, for its step is 0
    rows = torch.cat([xbc, xbc.new_zeros(1, xbc.shape[1])]).float()
    steps = softplus(dt.float() + dt_bias.float())
    steps = torch.cat([steps, steps.new_zeros(1, H)])
    y = rows.new_empty(Tk + 1, H * P)
    offsets = torch.arange(L, device=xbc.device)
    for start in range(0, seqlens.max_k, L):
        active = (length > start).nonzero()[:, 0]
        place = start + offsets
        row = torch.where(place < length[active, None], first[active, None] + place, Tk)
        y[row], after = _chunk(rows[row], steps[row], A, D, state[active], shape)
        full = length[active] >= start + L
        state[active[full]] = after[full]

    len_q = seqlens.cu_q.diff().long()
    shift = torch.repeat_interleave((seqlens.cu_k - seqlens.cu_q)[1:].long(), len_q)
    return y[torch.arange(len(shift), device=xbc.device) + shift].to(xbc.dtype), state


def _chunk(xbc: Tensor, steps: Tensor, A: Tensor, D: Tensor, state: Tensor, shape: SSDShape) -> tuple[Tensor, Tensor]:
    """One chunk of n sequences: xbc[n, L, C], steps[n, L, H], state[n, H, P, N] before it -> (y[n, L, H * P], the state after it)."""
    H, P, G, N, L = shape
    n, R = len(xbc), H // G
    x, B, C = xbc.split([H * P, G * N, G * N], dim=-1)
    x = x.view(n, L, H, P).transpose(1, 2).contiguous()
    B, C = (t.view(n, L, G, N).transpose(1, 2).reshape(n * G, L, N).contiguous() for t in (B, C))
    d = steps.transpose(1, 2).contiguous()  # [n, H, L]
    decay = prefix_sum(d * A[:, None])  # log of what is left at t of what was there at the chunk's start

    future = torch.ones(L, L, dtype=torch.bool, device=x.device).triu(1)
    kept = torch.exp(decay[..., :, None] - decay[..., None, :]).masked_fill(future, 0.0) * d[..., None, :]  # [n, H, L, L]
    scores = torch.bmm(C, B.transpose(1, 2).contiguous())
    weights = scores.view(n, G, 1, L, L) * kept.view(n, G, R, L, L)
    inside = torch.bmm(weights.view(n * H, L, L), x.view(n * H, L, P)).view(n, H, L, P)
    before = torch.bmm(C, state.view(n * G, R * P, N).transpose(1, 2).contiguous())
    before = before.view(n, G, L, R, P).transpose(2, 3).reshape(n, H, L, P) * torch.exp(decay)[..., None]
    y = (inside + before) + D.float()[:, None, None] * x

    left = x * (torch.exp(decay[..., -1:] - decay) * d)[..., None]
    added = torch.bmm(left.transpose(2, 3).reshape(n * G, R * P, L).contiguous(), B).view(n, H, P, N)
    return y.transpose(1, 2).reshape(n, L, H * P), torch.exp(decay[..., -1])[..., None, None] * state + added


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    gated = (x.float() * silu(gate.float().contiguous())).unflatten(-1, (groups, -1))
    mean_square = tree_sum(gated * gated) / gated.shape[-1]
    rstd = 1.0 / torch.sqrt(mean_square + eps)
    return (gated * rstd[..., None]).flatten(-2).to(x.dtype) * weight
