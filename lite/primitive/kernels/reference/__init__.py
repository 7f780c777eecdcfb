"""The reference kernel set: plain PyTorch, fp32 or bf16, on any device, batch-invariant by construction.

Rounding inside: rotary and attention compute in fp32 throughout and round once at the end.
"""

from lite.primitive.kernels.reference.attention import attention, paged_attention
from lite.primitive.kernels.reference.gemm import linear
from lite.primitive.kernels.reference.head import sample, sampler_logprobs, token_logprobs
from lite.primitive.kernels.reference.mamba import causal_conv1d, gated_rms_norm, ssd_scan
from lite.primitive.kernels.reference.moe import grouped_topk, routed_experts, router_logits, topk_softmax
from lite.primitive.kernels.reference.pointwise import add_rms_norm, embedding, relu2, rms_norm, rotary, swiglu

NAME = "reference"

__all__ = ["NAME", "add_rms_norm", "attention", "causal_conv1d", "embedding", "gated_rms_norm", "grouped_topk", "linear",
           "paged_attention", "relu2", "rms_norm", "rotary", "routed_experts", "router_logits", "sample", "sampler_logprobs", "ssd_scan",
           "swiglu", "token_logprobs", "topk_softmax"]  # fmt: skip
