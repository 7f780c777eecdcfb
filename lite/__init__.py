"""Megatron Lite: a training forward that calls the rollout engine's kernels, so that both sides' logprobs are the same bytes.

The names below are resolved on first use, so that `mlite --help` does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lite.runtime.batch import PackedBatch as PackedBatch
    from lite.runtime.config import FsdpConfig as FsdpConfig
    from lite.runtime.config import MegatronLiteConfig as MegatronLiteConfig
    from lite.runtime.config import OptimizerConfig as OptimizerConfig
    from lite.runtime.config import ParallelConfig as ParallelConfig
    from lite.runtime.config import RuntimeConfig as RuntimeConfig
    from lite.runtime.runtime import create_runtime as create_runtime

__version__ = "0.1.0"

_HOMES = {
    "PackedBatch": "lite.runtime.batch",
    "FsdpConfig": "lite.runtime.config",
    "MegatronLiteConfig": "lite.runtime.config",
    "OptimizerConfig": "lite.runtime.config",
    "ParallelConfig": "lite.runtime.config",
    "RuntimeConfig": "lite.runtime.config",
    "create_runtime": "lite.runtime.runtime",
}
__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lite' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
