"""The operations of a lite model through torch's own kernels and ordinary autograd: the *native* baseline of the trainer.

Same methods as `lite.primitive.ops.bridges.Ops`, so the same modules run on them. Gradients of weights come in the model dtype, as autograd
gives them. The attention's backward is deterministic, as ours is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.native_mamba_moe import NativeMambaMoE
from lite.primitive.parallel.packing import Seqlens

ROWS = 2048  # of logits held at once; the backward makes them again


class NativeOps(NativeMambaMoE):
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, weight.shape, weight, eps), total

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos_sin[positions][:, None, :].chunk(2, dim=-1)

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

        return turned(q), turned(k)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, seqlens: Seqlens, scale: float) -> Tensor:
        """Of whole sequences: queries and keys have the same lengths, as in training."""
        return packed_attention(q, k, v, seqlens.cu_q, seqlens.max_q, scale)

    def token_logprobs(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor, vocab_size: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        chunks = zip(hidden.split(ROWS), labels.split(ROWS), temperature.split(ROWS), strict=True)
        scores = [checkpoint(_logprobs, *chunk, weight[:vocab_size], with_entropy, use_reentrant=False) for chunk in chunks]
        return torch.cat([logprob for logprob, _ in scores]), torch.cat([entropy for _, entropy in scores])


def _logprobs(hidden: Tensor, labels: Tensor, temperature: Tensor, weight: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
    log_p = F.log_softmax(F.linear(hidden, weight).float() / temperature[:, None], dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1) if with_entropy else torch.zeros_like(temperature)
    return log_p.gather(1, labels[:, None])[:, 0], entropy


def packed_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float) -> Tensor:
    """Causal attention of packed whole sequences, q[T, Hq, D], k and v[T, Hk, D]: FlashAttention 2 as ATen ships it; on a CPU, one
    sequence after the other."""
    if q.is_cuda:
        return _PackedFlash.apply(q, k, v, cu_seqlens, longest, scale)
    lengths = cu_seqlens.diff().tolist()
    mixed = [
        F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in qkv), is_causal=True, scale=scale, enable_gqa=True)
        for qkv in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    ]
    return torch.cat([out[0].transpose(0, 1) for out in mixed])


class _PackedFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float) -> Tensor:
        out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, seed, offset)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, out, lse, cu_seqlens, seed, offset = ctx.saved_tensors
        with _deterministic():
            grads = torch.ops.aten._flash_attention_backward(
                d_out.contiguous(), q, k, v, out, lse, cu_seqlens, cu_seqlens, ctx.longest, ctx.longest, 0.0, True, seed, offset,
                scale=ctx.scale,
            )  # fmt: skip
        return *grads, None, None, None


@contextmanager
def _deterministic() -> Iterator[None]:
    """ATen's flash backward adds dq in a fixed order only where the process asks for deterministic algorithms; filling its empty
    outputs with NaN, which also comes with that, would only cost the baseline time."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill
