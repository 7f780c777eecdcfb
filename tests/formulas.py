"""Every visible kernel as the textbook formula in fp64, written apart from lite, differentiable by ATen's autograd.

`rounded` puts the contract's rounding points in: the value is rounded to the model dtype, the gradient passes straight through.
Everything here takes and gives fp64; `dtype` says which model dtype the formula rounds to.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lite.primitive.kernels.visible import SSDShape
from lite.primitive.parallel.packing import Seqlens


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype).double() + (x - x.detach())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = rounded(x @ weight.T, dtype)
    return y if bias is None else rounded(y + bias, dtype)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    one_hot = torch.nn.functional.one_hot(ids, weight.shape[0]).double()
    return one_hot @ weight


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return rounded(x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight, dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    total = rounded(x + residual, dtype)
    return rms_norm(total, weight, eps, dtype), total


def turned(x: Tensor, positions: Tensor, cos_sin: Tensor, dtype: torch.dtype) -> Tensor:
    """x[T, heads, D] as D/2 complex numbers, multiplied by cos + i sin of their position."""
    half = x.shape[-1] // 2
    angle = torch.complex(cos_sin[positions, :half], cos_sin[positions, half:])[:, None]
    product = torch.complex(x[..., :half], x[..., half:]) * angle
    return rounded(torch.cat([product.real, product.imag], dim=-1), dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, seqlens: Seqlens, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One sequence and one head at a time, with the whole score matrix."""
    cu_q, cu_k = seqlens.cu_q, seqlens.cu_k
    heads = []
    logsumexp = []
    for i in range(len(cu_q) - 1):
        q_i, k_i, v_i = q[cu_q[i] : cu_q[i + 1]], k[cu_k[i] : cu_k[i + 1]], v[cu_k[i] : cu_k[i + 1]]
        n, m, group = q_i.shape[0], k_i.shape[0], q.shape[1] // k.shape[1]
        seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        scores = [(q_i[:, h] @ k_i[:, h // group].T * scale).masked_fill(~seen, -torch.inf) for h in range(q.shape[1])]
        heads.append(torch.stack([scores[h].softmax(-1) @ v_i[:, h // group] for h in range(q.shape[1])], dim=1))
        logsumexp.append(torch.stack([s.logsumexp(-1) for s in scores], dim=1))
    return rounded(torch.cat(heads), dtype), torch.cat(logsumexp)


def swiglu(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    gate, up = gate_up.tensor_split(2, dim=-1)
    return rounded(rounded(gate * torch.sigmoid(gate), dtype) * up, dtype)


def relu2(x: Tensor, dtype: torch.dtype) -> Tensor:
    return rounded(x.clamp(min=0).pow(2), dtype)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None, lengths: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """One token at a time: the last W rows of its sequence times the taps."""
    W = weight.shape[1]
    before = x.new_zeros(len(lengths), W - 1, x.shape[1]) if history is None else history
    out = []
    for past, rows in zip(before, x.split(list(lengths)), strict=True):
        known = torch.cat([past, rows])
        for t in range(len(rows)):
            out.append((known[t : t + W] * weight.T).sum(0) + (0 if bias is None else bias))
    s = torch.stack(out)
    return rounded(s * torch.sigmoid(s), dtype)


def ssd_scan(
    xbc: Tensor, dt: Tensor, A: Tensor, D: Tensor, dt_bias: Tensor, boundary: Tensor | None, lengths: Sequence[int], shape: SSDShape,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The recurrence, one token after the other; of whole sequences or from `boundary` on. -> (y of every row, state after the last
    full chunk)."""
    H, P, G, N, L = shape
    outs, ends = [], []
    for i, (rows, steps) in enumerate(zip(xbc.split(list(lengths)), dt.split(list(lengths)), strict=True)):
        end = state = xbc.new_zeros(H, P, N) if boundary is None else boundary[i]
        for t, (row, step) in enumerate(zip(rows, (steps + dt_bias).exp().log1p(), strict=True)):
            x = row[: H * P].view(H, P)
            B, C = (part.view(G, N).repeat_interleave(H // G, dim=0) for part in row[H * P :].chunk(2))
            state = (step * A).exp()[:, None, None] * state + step[:, None, None] * x[:, :, None] * B[:, None, :]
            outs.append(((state * C[:, None, :]).sum(-1) + D[:, None] * x).flatten())
            end = state if (t + 1) % L == 0 else end
        ends.append(end)
    return rounded(torch.stack(outs), dtype), torch.stack(ends)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float, dtype: torch.dtype) -> Tensor:
    gated = x * gate * torch.sigmoid(gate)
    parts = [part / (part.pow(2).mean(-1, keepdim=True) + eps).sqrt() for part in gated.chunk(groups, dim=-1)]
    return rounded(rounded(torch.cat(parts, dim=-1), dtype) * weight, dtype)


def topk_softmax(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1).topk(k)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids


def grouped_topk(
    logits: Tensor, bias: Tensor, k: int, groups: int, topk_groups: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """One token at a time, in lists."""
    weights, ids = [], []
    for scores in 1 / (1 + (-logits).exp()):
        biased = (scores + bias).tolist()
        size = len(biased) // groups
        members = [range(g * size, (g + 1) * size) for g in range(groups)]
        members.sort(key=lambda group: sum(sorted(biased[e] for e in group)[-2:]), reverse=True)
        chosen = sorted((e for group in members[:topk_groups] for e in group), key=lambda e: biased[e], reverse=True)[:k]
        w = scores[chosen]
        weights.append(w / w.sum() if renormalize else w)
        ids.append(chosen)
    return torch.stack(weights), torch.tensor(ids)


def routed_experts(
    x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, activation: str, dtype: torch.dtype
) -> Tensor:
    """Every expert computes every token; a token takes those it chose."""
    act = {"silu": swiglu, "relu2_no_mul": relu2}[activation]
    every = torch.stack([act(linear(x, up, None, dtype), dtype) @ down.T for up, down in zip(w13, w2, strict=True)], dim=1)
    chosen = every[torch.arange(len(x))[:, None], ids.long()]
    return rounded(rounded(weights[..., None] * chosen, dtype).sum(1), dtype)


def token_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor, vocab_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    z = rounded(hidden @ weight[:vocab_size].T, dtype) / temperature[:, None]
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)
    return log_p.gather(1, labels[:, None])[:, 0], entropy
