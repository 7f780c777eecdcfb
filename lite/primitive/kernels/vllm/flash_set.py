"""vLLM's kernels with FLASH_ATTN: attention without pages in training, paged in the engine."""

from lite.primitive.kernels.vllm.attention import flash as attention
from lite.primitive.kernels.vllm.attention import flash_paged as paged_attention
from lite.primitive.kernels.vllm.gemm import linear
from lite.primitive.kernels.vllm.head import sampler_logprobs, token_logprobs
from lite.primitive.kernels.vllm.norm import add_rms_norm, rms_norm
from lite.primitive.kernels.vllm.pointwise import embedding, rotary, swiglu

NAME = "vllm/FLASH_ATTN"

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
