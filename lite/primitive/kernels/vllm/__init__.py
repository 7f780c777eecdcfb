"""vLLM's own kernels on Hopper as pure functions, and the patched ones that trainer and engine share.

Two sets, one an attention backend: `flash_set` (FLASH_ATTN, FlashAttention 3) and `triton_set` (TRITON_ATTN). vLLM is imported inside
functions. Every file's facts are of vLLM 0.26.0; `version.py` refuses another.
"""


def enter_batch_invariance() -> None:
    """Puts this process into vLLM's batch-invariant mode, as an engine in it would: for good, and before its first product on the GPU."""
    import os

    from lite.primitive.kernels.vllm.version import require_verified_version

    require_verified_version()
    os.environ["VLLM_BATCH_INVARIANT"] = "1"  # vLLM reads it when its modules load
    from vllm.model_executor.layers.batch_invariant import init_batch_invariance

    init_batch_invariance()
