"""VJPs on a Hopper GPU in bf16: tensor cores for every product, fp32 for every accumulation, deterministic.

What is not a product of matrices is Triton's where activations are large (triton.py, triton_mamba.py, triton_moe.py), torch.py's elsewhere.
Products are `torch.mm` with `out_dtype` fp32 (measured as fast as Transformer Engine's `general_gemm` at these shapes); `torch.bmm` is not
used: batch-invariant mode replaces it by a function without autograd. The attention's backward is FlashAttention 2's as ATen ships it, in
its deterministic order, from the visible forward's output and lse.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lite.primitive.kernels.vjp import Grads, Needs, Values, triton_mamba, triton_moe
from lite.primitive.kernels.vjp import triton as fused
from lite.primitive.kernels.vjp.mamba import causal_conv1d, ssd_scan
from lite.primitive.kernels.vjp.torch import (
    VOCAB_CHUNK,
    embedding,
    grouped_topk,
    rotary,
    router_logits,
    ssm_decay,
    topk_softmax,
)
from lite.primitive.kernels.vjp.triton_moe import routed_experts

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
        out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, True, False, scale=scale)
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


def rms_norm(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    dy = d["y"]
    assert dy is not None
    dx, d_weight = fused.rms_norm(values["x"], values["weight"], values["eps"], dy)
    return {"x": dx, "weight": d_weight}


def add_rms_norm(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """(norm(t), t) of t = x + residual: both get the norm's gradient plus what flowed into t."""
    if d["y"] is None:
        assert d["total"] is not None
        return {"x": d["total"], "residual": d["total"]}
    dt, d_weight = fused.rms_norm(values["total"], values["weight"], values["eps"], d["y"], d["total"])
    return {"x": dt, "residual": dt, "weight": d_weight}


def swiglu(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    dy = d["y"]
    assert dy is not None
    return {"gate_up": fused.swiglu(values["gate_up"], dy)}


def relu2(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    dy = d["y"]
    assert dy is not None
    return {"x": triton_moe.relu2(values["x"], dy)}


def gated_rms_norm(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    x, gate, weight, dy = values["x"], values["gate"], values["weight"], d["y"]
    assert dy is not None
    found = triton_mamba.gated_rms_norm(x, gate, weight, values["groups"], values["eps"], dy)
    return dict(zip(("x", "gate", "weight"), found, strict=True))


def token_logprobs(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """torch.py has the formula. Logits are made again chunk by chunk and become their own gradient in place."""
    hidden, weight, labels, temperature = (values[name] for name in ("hidden", "weight", "labels", "temperature"))
    log_z = values["max"] + torch.log(values["sum"])
    dx = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if "weight" in needs else None
    for start in range(0, values["vocab_size"], VOCAB_CHUNK):
        w = weight[start : min(start + VOCAB_CHUNK, values["vocab_size"])]
        z = torch.mm(hidden, w.t())
        dz = fused.logits_(z, labels, temperature, log_z, values["entropy"], d["logprob"], d["entropy"], start)
        dx += torch.mm(dz, w, out_dtype=torch.float32)
        if d_weight is not None:
            d_weight[start : start + w.shape[0]] = torch.mm(dz.t(), hidden, out_dtype=torch.float32)
    grads = {"hidden": dx.to(hidden.dtype)}
    return grads if d_weight is None else grads | {"weight": d_weight}
