"""vLLM's kernels with TRITON_ATTN: the Triton kernel over pages on both sides."""

from lite.primitive.kernels.vllm.attention import triton as attention
from lite.primitive.kernels.vllm.attention import triton_paged as paged_attention
from lite.primitive.kernels.vllm.gemm import linear
from lite.primitive.kernels.vllm.head import sampler_logprobs, token_logprobs
from lite.primitive.kernels.vllm.norm import add_rms_norm, rms_norm
from lite.primitive.kernels.vllm.pointwise import embedding, rotary, swiglu

NAME = "vllm/TRITON_ATTN"

__all__ = [
    "NAME",
    "add_rms_norm",
    "attention",
    "embedding",
    "linear",
    "paged_attention",
    "rms_norm",
    "rotary",
    "sampler_logprobs",
    "swiglu",
    "token_logprobs",
]
