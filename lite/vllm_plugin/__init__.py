"""What a vLLM process loads through the `vllm.general_plugins` entry point: the engine's side of exactness.

Inert without MLITE_EXACT=1: installing this package changes no other vLLM run on the machine. With it, every kernel choice is pinned here,
and each worker can be asked what it really runs (`handshake`). An unverified vLLM version is refused.
"""

import os
from typing import Any

from lite.errors import InputError

PINS = {
    # V1 casts logits to fp32 before it divides by the temperature; V2 writes the quotient back in bf16
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # flashinfer, where it is installed, would sample by kernels of its own
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def register() -> None:
    """The entry point; vLLM calls it once in every process."""
    if os.environ.get("MLITE_EXACT") != "1":
        return
    from lite.primitive.kernels.vllm.version import require_verified_version

    require_verified_version()
    if os.environ.get("VLLM_BATCH_INVARIANT") != "1":
        found = os.environ.get("VLLM_BATCH_INVARIANT", "unset")
        raise InputError("VLLM_BATCH_INVARIANT", f"is {found} while MLITE_EXACT=1", "set it to 1 before vllm is imported")
    for name, value in PINS.items():
        if os.environ.get(name, value) != value:
            raise InputError(name, f"is {os.environ[name]} while MLITE_EXACT=1", f"leave it unset: exact mode needs {value}")
        os.environ[name] = value
    from lite.vllm_plugin.layers import install

    install()


def handshake(worker: Any) -> dict[str, Any]:
    """What this worker really runs; called inside it. InputError where a layer that must be replaced is not."""
    import lite
    from lite.primitive.kernels.vllm.version import require_verified_version
    from lite.vllm_plugin.layers import replaced_layers

    config = worker.vllm_config
    if (ranks := config.parallel_config.world_size) != 1:
        raise InputError("vllm worker", f"is one of {ranks}, which was not verified", "run each engine on one GPU")
    model = worker.get_model()
    backends = {m.attn_backend.get_name() for m in model.modules() if type(m).__name__ == "Attention"}
    return {
        "plugin": lite.__version__,
        "vllm": require_verified_version(),
        "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT") == "1",
        "replaced": replaced_layers(model),
        "attention": sorted(backends),
        "runner": type(worker.model_runner).__module__,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "compilation_mode": int(config.compilation_config.mode),
        "page": config.cache_config.block_size,
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "logprobs_mode": config.model_config.logprobs_mode,
    }
