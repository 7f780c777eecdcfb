"""vLLM's own kernels on Hopper as pure functions, and the patched ones that trainer and engine share.

Two sets, one an attention backend: `flash_set` (FLASH_ATTN, FlashAttention 3) and `triton_set` (TRITON_ATTN). vLLM is imported inside
functions. Every file's facts are of vLLM 0.26.0; `version.py` refuses another.
"""
