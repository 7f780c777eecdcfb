"""vLLM's kernels with FLASH_ATTN: attention without pages in training, paged in the engine."""

from lite.primitive.kernels.vllm.attention import flash as attention
from lite.primitive.kernels.vllm.attention import flash_paged as paged_attention
from lite.primitive.kernels.vllm.experts import routed_experts
from lite.primitive.kernels.vllm.gemm import linear
from lite.primitive.kernels.vllm.head import sampler_logprobs, token_logprobs
from lite.primitive.kernels.vllm.mamba import causal_conv1d, gated_rms_norm, relu2, ssd_scan
from lite.primitive.kernels.vllm.norm import add_rms_norm, rms_norm
from lite.primitive.kernels.vllm.pointwise import embedding, rotary, swiglu
from lite.primitive.kernels.vllm.router import grouped_topk, router_logits, topk_softmax

NAME = "vllm/FLASH_ATTN"

__all__ = [
    "NAME",
    "add_rms_norm",
    "attention",
    "causal_conv1d",
    "embedding",
    "gated_rms_norm",
    "grouped_topk",
    "linear",
    "paged_attention",
    "relu2",
    "rms_norm",
    "rotary",
    "routed_experts",
    "router_logits",
    "sampler_logprobs",
    "ssd_scan",
    "swiglu",
    "token_logprobs",
    "topk_softmax",
]
