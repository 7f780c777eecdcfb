"""The family's side of `lite.model.protocol.ModelProtocol`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lite.model.protocol import ModelBundle, ParallelConfig
from lite.model.qwen3.checkpoint import WEIGHTS
from lite.model.qwen3.config import proxy_config, read_config
from lite.model.qwen3.model import assemble
from lite.primitive.modules.decoder import DecoderConfig
from lite.primitive.ops.bridges import Ops

__all__ = ["HF_MODEL_TYPES", "WEIGHTS", "ImplConfig", "build_model", "build_model_config", "proxy_config"]

HF_MODEL_TYPES = ("qwen3",)


@dataclass(frozen=True)
class ImplConfig:
    """No options of its own."""


def build_model_config(source: Mapping[str, Any], **overrides: Any) -> DecoderConfig:
    return read_config({**source, **overrides})


def build_model(
    model_cfg: DecoderConfig, *, impl_cfg: ImplConfig, parallel: ParallelConfig, kernels: Ops, dtype: torch.dtype
) -> ModelBundle:
    return ModelBundle(assemble(model_cfg, kernels, dtype), model_cfg, WEIGHTS, model_cfg.layers)
