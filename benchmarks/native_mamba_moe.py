"""Mamba-2's and the experts' part of `native_ops`: on a GPU mamba_ssm's and causal_conv1d's kernels and torch's grouped product, on a CPU
the plain formulas. Their backwards add in whatever order their authors left them, as a user of these packages gets them.

Modules call convolution, scan and gated norm apart, so this is `mamba_split_conv1d_scan_combined` as the kernels that it is made of.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lite.primitive.kernels.visible import SSDShape
from lite.primitive.parallel.packing import Seqlens


class NativeMambaMoE:
    """Of whole sequences, as in training: no history, no boundary."""

    def relu2(self, x: Tensor) -> Tensor:
        return F.relu(x).square()

    def causal_conv1d(self, x: Tensor, weight: Tensor, bias: Tensor | None, history: None, seqlens: Seqlens) -> Tensor:
        if x.is_cuda:
            from causal_conv1d import causal_conv1d_fn

            rows = x[None].transpose(1, 2)  # [1, C, T], channels last: the layout that takes seq_idx
            return causal_conv1d_fn(rows, weight, bias, seq_idx=sequence_of_rows(seqlens, len(x)), activation="silu")[0].t()
        channels, width = weight.shape
        mixed = [
            F.conv1d(rows.t()[None], weight[:, None], bias, padding=width - 1, groups=channels)[0, :, : len(rows)].t()
            for rows in x.split(seqlens.cu_q.diff().tolist())
        ]
        return F.silu(torch.cat(mixed))

    def ssm_decay(self, A_log: Tensor) -> Tensor:
        return -torch.exp(A_log.float())

    def ssd_scan(
        self, xbc: Tensor, dt: Tensor, A: Tensor, D: Tensor, dt_bias: Tensor, boundary: None, seqlens: Seqlens, shape: SSDShape
    ) -> tuple[Tensor, None]:
        """-> (y[T, H P], no boundary: training keeps none)."""
        H, P, G, N, L = shape
        T = len(xbc)
        x, B, C = xbc.split([H * P, G * N, G * N], dim=-1)
        x, B, C = x.view(T, H, P), B.view(T, G, N), C.view(T, G, N)
        D, dt_bias = D.float(), dt_bias.float()  # the kernels add up their gradients in these tensors' dtype
        if xbc.is_cuda:
            from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

            y = mamba_chunk_scan_combined(
                x[None], dt[None], A, B[None], C[None], L, D=D, dt_bias=dt_bias, seq_idx=sequence_of_rows(seqlens, T), dt_softplus=True
            )
            return y.view(T, H * P), None
        step = F.softplus(dt.float() + dt_bias)
        B, C = (t.repeat_interleave(H // G, dim=1) for t in (B, C))
        rows = zip(*(t.split(seqlens.cu_q.diff().tolist()) for t in (x, step, B, C)), strict=True)
        y = torch.cat([_recurrence(A, *sequence) for sequence in rows]) + D[:, None] * x
        return y.to(xbc.dtype).view(T, H * P), None

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        size = x.shape[-1] // groups
        if x.is_cuda:
            from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

            return rmsnorm_fn(x, weight, None, z=gate, eps=eps, group_size=size, norm_before_gate=False)
        gated = (x.float() * F.silu(gate.float())).unflatten(-1, (groups, size))
        return F.rms_norm(gated, (size,), eps=eps).flatten(-2).to(x.dtype) * weight

    def router_logits(self, x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
        return F.linear(x.to(out_dtype), weight.to(out_dtype))

    def topk_softmax(self, logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        weights, ids = logits.float().softmax(-1).topk(k)
        return weights / weights.sum(-1, keepdim=True) if renormalize else weights, ids

    def grouped_topk(self, logits: Tensor, bias: Tensor, k: int, groups: int, topk_groups: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        biased = (scores.detach() + bias).unflatten(1, (groups, -1))
        best = biased.topk(2).values.sum(-1).topk(topk_groups).indices
        outside = torch.ones_like(biased[..., 0], dtype=torch.bool).scatter(1, best, False)
        ids = biased.masked_fill(outside[..., None], -torch.inf).flatten(1).topk(k).indices
        weights = scores.gather(1, ids)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) if renormalize else weights, ids

    def routed_experts(self, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, activation: str) -> Tensor:
        """One grouped product for all experts, of (token, choice) pairs in the order of their experts."""
        experts, order = ids.flatten().sort()
        each = torch.arange(len(w13), dtype=ids.dtype, device=ids.device)
        ends = torch.searchsorted(experts, each, right=True, out_int32=True)  # `bincount` would wait for the device
        up = torch._grouped_mm(x.index_select(0, order // ids.shape[1]), w13.transpose(1, 2), offs=ends)
        active = {"silu": self.swiglu, "relu2_no_mul": self.relu2}[activation](up)
        down = torch._grouped_mm(active, w2.transpose(1, 2), offs=ends)
        weighted = (down * weights.flatten()[order, None]).to(x.dtype)
        return weighted.index_select(0, order.argsort()).view(*ids.shape, -1).sum(1)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def sequence_of_rows(seqlens: Seqlens, rows: int) -> Tensor:
    """The number of each row's sequence, [1, T] int32."""
    return torch.repeat_interleave(seqlens.cu_q.diff().long(), output_size=rows).int()[None]


def _recurrence(A: Tensor, x: Tensor, step: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """One sequence, a token at a time: A[H], x[T, H, P], step[T, H], B and C[T, H, N] -> C_t state_t [T, H, P] in fp32."""
    decays, added = torch.exp(step * A), torch.einsum("th,thp,thn->thpn", step, x.float(), B.float())
    state, read = torch.zeros_like(added[0]), []
    for decay, new, c in zip(decays, added, C.float(), strict=True):
        state = decay[:, None, None] * state + new
        read.append(torch.einsum("hpn,hn->hp", state, c))
    return torch.stack(read)
