"""VJPs on a Hopper GPU in bf16: tensor cores for every product, fp32 for every accumulation, deterministic.

What is not a product of matrices is torch.py's. Products are `torch.mm` with `out_dtype` fp32 (measured as fast as Transformer Engine's
`general_gemm` at these shapes); `torch.bmm` is not used: batch-invariant mode replaces it by a function without autograd. The attention's
backward is FlashAttention 2's as ATen ships it, in its deterministic order, from the visible forward's output and lse.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from lite.primitive.kernels.vjp import Grads, Needs, Values, torch_moe
from lite.primitive.kernels.vjp import torch as torch_vjp
from lite.primitive.kernels.vjp.mamba import causal_conv1d, ssd_scan
from lite.primitive.kernels.vjp.torch import (
    add_rms_norm,
    embedding,
    gated_rms_norm,
    grouped_topk,
    relu2,
    rms_norm,
    rotary,
    router_logits,
    ssm_decay,
    swiglu,
    topk_softmax,
)

__all__ = ["add_rms_norm", "attention", "causal_conv1d", "embedding", "gated_rms_norm", "grouped_topk", "linear", "relu2", "rms_norm",
           "rotary", "routed_experts", "router_logits", "ssd_scan", "ssm_decay", "swiglu", "token_logprobs", "topk_softmax"]  # fmt: skip


def linear(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """y = x W^T + b: dx = dy W, dW = dy^T x, db = sum of dy."""
    x, weight, dy = values["x"], values["weight"], d["y"]
    assert dy is not None
    grads = {}
    if "x" in needs:
        grads["x"] = torch.mm(dy, weight)
    if "weight" in needs:
        grads["weight"] = torch.mm(dy.t(), x, out_dtype=torch.float32)
    if "bias" in needs:
        grads["bias"] = dy.float().sum(0)
    return grads


def attention(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """FlashAttention's backward. A forward that kept no lse (the Triton kernel) is followed by FlashAttention's own forward first:
    out and lse must belong together, or the softmax's gradient no longer sums to 0."""
    q, k, v, out, lse, scale = (values[name] for name in ("q", "k", "v", "out", "lse", "scale"))
    lengths = values["seqlens"]
    d_out = d["out"]
    assert d_out is not None
    seed = offset = torch.zeros(2, dtype=torch.uint64, device=q.device)
    if lse.numel() == 0:
        out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *lengths, 0.0, True, False, scale=scale
        )
    else:
        lse = lse.t()
    with _deterministic():
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            d_out.contiguous(), q, k, v, out, lse.contiguous(), *lengths, 0.0, True, seed, offset, scale=scale
        )
    return {"q": dq, "k": dk, "v": dv}


@contextmanager
def _deterministic() -> Iterator[None]:
    """ATen's flash backward adds dq in a fixed order only where the process asks for deterministic algorithms; filling its empty outputs
    with NaN, which comes with that, would only cost time."""
    asked, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(asked, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def tensor_core_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bf16 operands (a is rounded to b's dtype), accumulated and kept in fp32."""
    return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)


token_logprobs = partial(torch_vjp.token_logprobs, product=tensor_core_product)
routed_experts = partial(torch_moe.routed_experts, grouped=torch_moe.TENSOR_CORES)
