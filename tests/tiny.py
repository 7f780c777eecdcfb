"""Tiny random checkpoints with weights of the magnitude that trained ones have.

Weights of 1e-3 would make every branch vanish beside the residual stream, and errors in attention or the MLP with it.
"""

from pathlib import Path
from typing import Any

import torch

from lite import MegatronLiteConfig, OptimizerConfig, RuntimeConfig, create_runtime
from lite.model.protocol import ModelBundle
from lite.model.registry import family
from lite.primitive.ckpt.hf_weights import export_weights
from lite.primitive.ckpt.safetensors_files import write_checkpoint
from lite.runtime.runtime import Handle, Runtime
from tests.checkpoints import build, fill


def tiny_bundle(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, layers: int | None = 2, **overrides: Any) -> ModelBundle:
    """A family's tiny proxy with random weights. overrides: keys of its config.json."""
    bundle = build(family(name).proxy_config("tiny", layers) | overrides, dtype, name)
    fill(bundle.module.named_parameters(), seed)
    return bundle


def tiny_checkpoint(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, layers: int | None = 2, **overrides: Any
) -> Path:
    """Writes that proxy as a Hugging Face checkpoint into folder and returns it. An override of None removes the key."""
    bundle = tiny_bundle(name, dtype, seed, layers, **overrides)
    config = family(name).proxy_config("tiny", layers) | overrides | {"dtype": str(dtype).removeprefix("torch.")}
    config = {key: value for key, value in config.items() if value is not None}
    write_checkpoint(folder, config, export_weights(bundle.weights, bundle.config, bundle.layers, dict(bundle.module.named_parameters())))
    return folder


def tiny_runtime(folder: Path, dtype: str = "fp32", lr: float = 1e-3) -> tuple[Runtime, Handle]:
    """A trainer on the CPU over that checkpoint, loaded."""
    backend = MegatronLiteConfig(dtype=dtype, device="cpu", optimizer=OptimizerConfig(lr=lr))
    runtime = create_runtime(RuntimeConfig(hf_path=str(folder), backend_cfg=backend))
    return runtime, runtime.build_model()
