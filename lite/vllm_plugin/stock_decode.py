"""The plugin less its replay: vLLM's own Mamba-2 layer, which decodes by another kernel than it prefills, in batch-invariant mode.

NOT exact, and `handshake` refuses it. It is there to measure what the replay costs (`benchmarks/rollout.py`), chosen by an argument of the
engine and by nothing in the environment: `LLM(worker_cls=WORKER)` with MLITE_EXACT=1.
"""

from typing import Any

WORKER = f"{__name__}.worker"
StockBackend: Any = None  # set by `keep_stock_decode`: vLLM looks a backend up by the name of its class


def worker(**kwargs: Any) -> Any:
    """vLLM's worker. vLLM calls this by its name after it has loaded plugins and before it builds the model."""
    from vllm.v1.worker.gpu_worker import Worker

    keep_stock_decode()
    return Worker(**kwargs)


def keep_stock_decode() -> None:
    """After `layers.install`: takes the exact layer out again, and its backend; the stock one no longer refuses the mode."""
    global StockBackend
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    del op_registry_oot["MambaMixer2"]
    StockBackend = _stock_backend()
    register_backend(MambaAttentionBackendEnum.MAMBA2, f"{__name__}.StockBackend", is_mamba=True)


def _stock_backend() -> type:
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend

    class Backend(Mamba2AttentionBackend):
        @classmethod
        def supports_batch_invariance(cls) -> bool:
            return True

    Backend.__qualname__ = "StockBackend"
    return Backend
