"""Configuration. A key that is not known is an error that names the nearest valid one; nothing is dropped silently."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

from lite.errors import InputError, nearest
from lite.model.protocol import ParallelConfig

__all__ = ["FsdpConfig", "MegatronLiteConfig", "OptimizerConfig", "ParallelConfig", "RuntimeConfig", "from_dict"]

T = TypeVar("T")


def _check_values(config: Any) -> None:
    """Numbers that are numbers, choices that exist. InputError names the field."""
    for name, hint in get_type_hints(type(config)).items():
        value, where = getattr(config, name), f"{type(config).__name__}.{name}"
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        if choices and value not in choices:
            raise InputError(where, f"{value!r} is not supported", nearest(str(value), map(str, choices)))
        allowed = {int: (int,), float: (int, float), bool: (bool,), str: (str,)}.get(hint)
        if allowed and (not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)):
            raise InputError(where, f"{value!r} is no {hint.__name__}", "give one (YAML reads 1e-5 as text, 1.0e-5 as a number)")


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

    def __post_init__(self) -> None:
        _check_values(self)
        if not 0 < self.lr < 1e6:
            fix = "choose one above 0 and below 1e6 (or no optimizer, to score only)"
            raise InputError("OptimizerConfig.lr", f"{self.lr} is no learning rate", fix)
        for key, below in (("adam_beta1", 1), ("adam_beta2", 1), ("weight_decay", math.inf), ("min_lr", math.inf), ("adam_eps", math.inf)):
            if not 0 <= getattr(self, key) < below:
                raise InputError(f"OptimizerConfig.{key}", f"is {getattr(self, key)}", f"give 0 or more, below {below}")


@dataclass(frozen=True)
class FsdpConfig:
    """Data parallel and what saves memory; names follow verl's FSDPEngineConfig. No choice changes a logprob's bytes.

    shard                  auto: over the ranks of the process group where there is one of several; always: over one rank, too
    reshard_after_forward  a layer's gathered weights are freed after its forward and gathered again for its backward
    recompute              a layer keeps its inputs only and runs again in backward
    param_offload          shards of masters, gradients and moments rest on the CPU and visit the GPU; needs sharding, and a CPU backend in
                           the process group (cpu:gloo,cuda:nccl)
    optimizer_offload      moments (unsharded: masters too) rest on the CPU, and visit the GPU tensor by tensor
    """

    shard: Literal["auto", "always"] = "auto"
    reshard_after_forward: bool = True
    recompute: bool = False
    param_offload: bool = False
    optimizer_offload: bool = False

    def __post_init__(self) -> None:
        _check_values(self)
        if self.param_offload and self.optimizer_offload:
            raise InputError("FsdpConfig.optimizer_offload", "is a part of param_offload", "set one of them")


@dataclass(frozen=True)
class MegatronLiteConfig:
    """model_name: a family, or "auto" to read the checkpoint's model_type. optimizer None builds a model that only scores.
    override: keys of config.json to replace. impl_cfg: the family's own options."""

    model_name: str = "auto"
    impl: Literal["lite"] = "lite"
    dtype: Literal["bf16", "fp32"] = "bf16"
    device: str = "auto"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    override: Mapping[str, Any] = field(default_factory=dict)
    impl_cfg: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_values(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device)


@dataclass(frozen=True)
class RuntimeConfig:
    hf_path: str | Path
    backend: Literal["mlite"] = "mlite"
    backend_cfg: MegatronLiteConfig = field(default_factory=MegatronLiteConfig)

    def __post_init__(self) -> None:
        _check_values(self)


def from_dict(cls: type[T], given: Mapping[str, Any], where: str = "config") -> T:
    """cls(**given), nested configs from nested mappings. InputError for an unknown or missing key."""
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    values = {}
    for key, value in given.items():
        if key not in names:
            raise InputError(where, f"unknown key {key!r}", nearest(key, names))
        nested = next((t for t in (hints[key], *get_args(hints[key])) if is_dataclass(t)), None)
        values[key] = from_dict(nested, value, f"{where}.{key}") if nested and isinstance(value, Mapping) else value  # type: ignore[arg-type]
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise InputError(where, f"lacks {f.name!r}", "give it")
    return cls(**values)
