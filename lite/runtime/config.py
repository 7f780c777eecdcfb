"""Configuration. A key that is not known is an error that names the nearest valid one; nothing is dropped silently."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

from lite.errors import InputError, nearest
from lite.model.protocol import ParallelConfig

__all__ = ["MegatronLiteConfig", "OptimizerConfig", "ParallelConfig", "RuntimeConfig", "from_dict"]

T = TypeVar("T")


@dataclass(frozen=True)
class OptimizerConfig:
    """Names follow verl's McoreOptimizerConfig."""

    optimizer: Literal["adam"] = "adam"
    lr: float = 1e-6
    min_lr: float = 0.0
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    lr_warmup_init: float = 0.0
    lr_warmup_steps: int = 0
    lr_decay_steps: int | None = None
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"


@dataclass(frozen=True)
class MegatronLiteConfig:
    """model_name: a family, or "auto" to read the checkpoint's model_type. optimizer None builds a model that only scores.
    override: keys of config.json to replace. impl_cfg: the family's own options."""

    model_name: str = "auto"
    impl: Literal["lite"] = "lite"
    dtype: Literal["bf16", "fp32"] = "bf16"
    device: str = "auto"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    override: Mapping[str, Any] = field(default_factory=dict)
    impl_cfg: Mapping[str, Any] = field(default_factory=dict)

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device)


@dataclass(frozen=True)
class RuntimeConfig:
    hf_path: str
    backend: Literal["mlite"] = "mlite"
    backend_cfg: MegatronLiteConfig = field(default_factory=MegatronLiteConfig)


def from_dict(cls: type[T], given: Mapping[str, Any], where: str = "config") -> T:
    """cls(**given), nested configs from nested mappings. InputError for an unknown or missing key or a value out of its choices."""
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    values = {}
    for key, value in given.items():
        if key not in names:
            raise InputError(where, f"unknown key {key!r}", nearest(key, names))
        nested = next((t for t in (hints[key], *get_args(hints[key])) if is_dataclass(t)), None)
        values[key] = from_dict(nested, value, f"{where}.{key}") if nested and isinstance(value, Mapping) else value  # type: ignore[arg-type]
        choices = get_args(hints[key]) if get_origin(hints[key]) is Literal else ()
        if choices and value not in choices:
            raise InputError(f"{where}.{key}", f"{value!r} is not supported", nearest(str(value), map(str, choices)))
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise InputError(where, f"lacks {f.name!r}", "give it")
    return cls(**values)
