"""RMSNorm as both processes compute it.

vLLM's batch-invariant mode is exact for the norm alone (a Triton kernel, a row a program). With a residual it calls a CUDA kernel whose
block, and with it the order of the sum, depends on whether the call has 256 rows: decode and prefill differ in 4 of 5 tokens. Here the
residual is added first and the Triton norm follows; the plugin installs this very function in the engine.
"""

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from vllm.model_executor.layers.batch_invariant import rms_norm_batch_invariant

    return rms_norm_batch_invariant(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total
