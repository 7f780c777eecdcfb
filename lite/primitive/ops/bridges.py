"""The differentiable operations of one kernel set: each is one of its visible kernels with one VJP.

Modules are given an `Ops` and call it; which kernels run was decided once, by whoever built it.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lite.primitive.kernels.visible import SSDShape, VisibleKernels
from lite.primitive.ops.aligned import VJP, visible_forward
from lite.primitive.parallel.packing import Seqlens


class Ops:
    """visible: the kernel set that inference runs. vjp: a module of backwards with one function for each of its kernels."""

    def __init__(self, visible: VisibleKernels, vjp: ModuleType):
        self.visible: Any = visible
        self._linear = VJP(("x", "weight", "bias"), ("y",), ("x", "weight"), vjp.linear)
        self._embedding = VJP(("ids", "weight"), ("y",), ("ids", "weight"), vjp.embedding)
        self._rms_norm = VJP(("x", "weight", "eps"), ("y",), ("x", "weight"), vjp.rms_norm)
        self._add_rms_norm = VJP(("x", "residual", "weight", "eps"), ("y", "total"), ("total", "weight"), vjp.add_rms_norm)
        self._rotary = VJP(("q", "k", "positions", "cos_sin"), ("q_out", "k_out"), ("positions", "cos_sin"), vjp.rotary)
        self._attention = VJP(
            ("q", "k", "v", "seqlens", "scale"),
            ("out", "lse"),
            ("q", "k", "v", "out", "lse"),
            vjp.attention,
            constants=("lse",),
        )
        self._swiglu = VJP(("gate_up",), ("y",), ("gate_up",), vjp.swiglu)
        self._relu2 = VJP(("x",), ("y",), ("x",), vjp.relu2)
        self._causal_conv1d = VJP(
            ("x", "weight", "bias", "history", "seqlens"), ("y",), ("x", "weight", "bias", "history"), vjp.causal_conv1d
        )
        self._ssd_scan = VJP(
            ("xbc", "dt", "A", "D", "dt_bias", "boundary", "seqlens", "shape"),
            ("y", "last_boundary"),
            ("xbc", "dt", "A", "D", "dt_bias", "boundary"),
            vjp.ssd_scan,
            constants=("last_boundary",),
        )
        self._gated_rms_norm = VJP(("x", "gate", "weight", "groups", "eps"), ("y",), ("x", "gate", "weight"), vjp.gated_rms_norm)
        self._ssm_decay = VJP(("A_log",), ("A",), ("A",), vjp.ssm_decay)
        self._router_logits = VJP(("x", "weight", "out_dtype"), ("y",), ("x", "weight"), vjp.router_logits)
        self._topk_softmax = VJP(
            ("logits", "k", "renormalize"), ("weights", "ids"), ("logits", "ids"), vjp.topk_softmax, constants=("ids",)
        )
        self._grouped_topk = VJP(
            ("logits", "bias", "k", "groups", "topk_groups", "renormalize"),
            ("weights", "ids"),
            ("logits", "ids"),
            vjp.grouped_topk,
            constants=("ids",),
        )
        self._routed_experts = VJP(
            ("x", "w13", "w2", "weights", "ids", "activation"), ("y",), ("x", "w13", "w2", "weights", "ids"), vjp.routed_experts
        )
        self._token_logprobs = VJP(
            ("hidden", "weight", "labels", "temperature", "vocab_size", "with_entropy"),
            ("logprob", "entropy", "max", "sum"),
            ("hidden", "weight", "labels", "temperature", "entropy", "max", "sum"),
            vjp.token_logprobs,
            constants=("max", "sum"),
        )

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return visible_forward(self.visible.linear, self._linear, x, weight, bias)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return visible_forward(self.visible.embedding, self._embedding, ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return visible_forward(self.visible.rms_norm, self._rms_norm, x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return visible_forward(self.visible.add_rms_norm, self._add_rms_norm, x, residual, weight, eps)

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        return visible_forward(self.visible.rotary, self._rotary, q, k, positions, cos_sin)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, seqlens: Seqlens, scale: float) -> Tensor:
        return visible_forward(self.visible.attention, self._attention, q, k, v, seqlens, scale)[0]

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return visible_forward(self.visible.swiglu, self._swiglu, gate_up)

    def relu2(self, x: Tensor) -> Tensor:
        return visible_forward(self.visible.relu2, self._relu2, x)

    def causal_conv1d(self, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None, seqlens: Seqlens) -> Tensor:
        return visible_forward(self.visible.causal_conv1d, self._causal_conv1d, x, weight, bias, history, seqlens)

    def ssd_scan(
        self,
        xbc: Tensor,
        dt: Tensor,
        A: Tensor,
        D: Tensor,
        dt_bias: Tensor,
        boundary: Tensor | None,
        seqlens: Seqlens,
        shape: SSDShape,
    ) -> tuple[Tensor, Tensor]:
        """-> (y[Tq, H P], boundary[S, H, P, N] fp32); boundaries, given and returned, are constants."""
        return visible_forward(self.visible.ssd_scan, self._ssd_scan, xbc, dt, A, D, dt_bias, boundary, seqlens, shape)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        return visible_forward(self.visible.gated_rms_norm, self._gated_rms_norm, x, gate, weight, groups, eps)

    def ssm_decay(self, A_log: Tensor) -> Tensor:
        """A_log[H] -> A[H] fp32 = -exp(A_log), the same with every kernel set."""
        return visible_forward(lambda A_log: -torch.exp(A_log.float()), self._ssm_decay, A_log)

    def router_logits(self, x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
        return visible_forward(self.visible.router_logits, self._router_logits, x, weight, out_dtype)

    def topk_softmax(self, logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        """-> (weights[T, k] fp32, ids[T, k] int32); the gradient flows through the weights."""
        return visible_forward(self.visible.topk_softmax, self._topk_softmax, logits, k, renormalize)

    def grouped_topk(self, logits: Tensor, bias: Tensor, k: int, groups: int, topk_groups: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        """-> (weights[T, k] fp32, ids[T, k] int32); the gradient flows through the weights, and none to the bias."""
        return visible_forward(self.visible.grouped_topk, self._grouped_topk, logits, bias, k, groups, topk_groups, renormalize)

    def routed_experts(self, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, activation: str) -> Tensor:
        return visible_forward(self.visible.routed_experts, self._routed_experts, x, w13, w2, weights, ids, activation)

    def token_logprobs(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor, vocab_size: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """-> (logprob[T], entropy[T]), fp32."""
        outputs = visible_forward(
            self.visible.token_logprobs, self._token_logprobs, hidden, weight, labels, temperature, vocab_size, with_entropy
        )
        return outputs[0], outputs[1]


def vllm_ops(attention: str) -> Ops:
    """vLLM's kernels with the given attention backend (FLASH_ATTN or TRITON_ATTN) and backwards on tensor cores: Hopper, bf16."""
    from lite.primitive.kernels.vjp import cuda as cuda_vjp
    from lite.primitive.kernels.vllm import flash_set, triton_set

    return Ops({"FLASH_ATTN": flash_set, "TRITON_ATTN": triton_set}[attention], cuda_vjp)


def reference_ops() -> Ops:
    """The reference kernels with torch's backwards: any device, fp32 or bf16."""
    from lite.primitive.kernels import reference
    from lite.primitive.kernels.vjp import torch as torch_vjp

    return Ops(reference, torch_vjp)
