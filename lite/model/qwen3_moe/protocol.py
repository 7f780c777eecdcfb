"""The family's side of `lite.model.protocol.ModelProtocol`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lite.model.protocol import ModelBundle, ParallelConfig
from lite.model.qwen3_moe.checkpoint import WEIGHTS
from lite.model.qwen3_moe.config import proxy_config, read_config
from lite.model.qwen3_moe.model import assemble
from lite.primitive.modules.decoder import DecoderConfig
from lite.primitive.ops.bridges import Ops

__all__ = ["HF_MODEL_TYPES", "WEIGHTS", "ImplConfig", "build_model", "build_model_config", "proxy_config"]

HF_MODEL_TYPES = ("qwen3_moe",)


@dataclass(frozen=True)
class ImplConfig:
    """No options of its own."""


def build_model_config(source: Mapping[str, Any], **overrides: Any) -> DecoderConfig:
    return read_config({**source, **overrides})


def build_model(
    model_cfg: DecoderConfig, *, impl_cfg: ImplConfig, parallel: ParallelConfig, kernels: Ops, dtype: torch.dtype
) -> ModelBundle:
    module = assemble(model_cfg, kernels, dtype)
    return ModelBundle(module, model_cfg, WEIGHTS, model_cfg.layers, module.routers())
