"""Grouped-query attention over packed sequences, with optional rotary, qk-norm and biases."""

import torch
from torch import Tensor, nn

from lite.primitive.modules.context import SequenceContext
from lite.primitive.modules.linear import Linear
from lite.primitive.modules.norm import RMSNorm
from lite.primitive.ops.bridges import Ops


class GQAttention(nn.Module):
    """layer: the index under which the sequence context keeps this layer's keys. qk_norm: RMSNorm over each head before rotary."""

    def __init__(
        self,
        layer: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        ops: Ops,
        dtype: torch.dtype,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
    ):
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, heads, kv_heads, head_dim
        self.ops = ops
        self.qkv = Linear(hidden, (heads + 2 * kv_heads) * head_dim, ops, dtype, bias=qkv_bias)
        self.out = Linear(heads * head_dim, hidden, ops, dtype, bias=out_bias)
        self.q_norm = RMSNorm(head_dim, qk_norm_eps, ops, dtype) if qk_norm_eps is not None else None
        self.k_norm = RMSNorm(head_dim, qk_norm_eps, ops, dtype) if qk_norm_eps is not None else None

    def forward(self, x: Tensor, context: SequenceContext, cos_sin: Tensor | None) -> Tensor:
        """x[T, hidden] -> [T, hidden]; cos_sin[P, head_dim], None: no rotary."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos_sin is not None:
            q, k = self.ops.rotary(q, k, context.positions, cos_sin)
        keys, values, seqlens = context.extend_kv(self.layer, k, v)
        mixed = self.ops.attention(q, keys, values, seqlens, self.head_dim**-0.5)
        return self.out(mixed.flatten(1))
