"""The engine's configuration as verl builds it, in the driver and in each worker; importing this module registers the engine."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from verl.workers.config import EngineConfig
from verl.workers.config.engine import EngineRouterReplayConfig

from lite.errors import InputError, nearest
from lite.model.registry import family
from verl_mlite.preflight_tables import SETTINGS

IMPLS = ("lite", "vllm", "reference")
ATTENTION = (None, "FLASH_ATTN", "TRITON_ATTN")
REPLAY = ("disabled", "R3")
IMPL_CFG = {"use_thd": True, "use_deepep": False, "optimizer": "fsdp2", "recompute": None}
"""Keys of impl_cfg and their defaults."""
EXACT_ROLLOUT = {key.rpartition(".")[2]: (key, *rest) for key, *rest in SETTINGS if key.endswith((".top_p", ".top_k", ".bypass_mode"))}
"""Keys of exact_rollout, and what preflight asks of them: where they come from, the values they may have, what to do otherwise."""


@dataclass
class MliteEngineConfig(EngineConfig):
    """verl's own engine keys, and:

    impl                        lite: vLLM's kernels on a GPU, the reference kernels elsewhere; vllm and reference name them
    model_name                  a family, or auto: by the checkpoint's model_type
    tp, etp, ep, pp, vpp, cp    parallel sizes; only data parallel (FSDP2 over all ranks) is built
    attention_backend_override  FLASH_ATTN (the default) or TRITON_ATTN: what the rollout runs too
    router_replay_mode          R3: experts as the rollout recorded them (the baseline arm); R2 is not built
    cross_entropy_fusion        true: logits never stay in memory; it is the only way here
    impl_cfg                    use_thd (packed rows, always), recompute (null or full: layers run again in backward), optimizer (fsdp2)
    grad_offload                gradients go with the parameters (param_offload)
    exact_rollout               what the configuration says of the rollout, and exact mode refuses: sampling that cuts tokens off, or
                                logprobs that the trainer takes over unseen
    load_hf_weights, resync_format, resync_config, export_dtype
                                weights come from and go as the checkpoint has them; quantized formats are not built

    dtype float32 is for CPUs. What is not built is refused by name: `InputError`, when the configuration is built.
    """

    _mutable_fields = EngineConfig._mutable_fields | {"router_replay"}

    strategy: str = "mlite"
    impl: str = "lite"
    model_name: str = "auto"
    tp: int = 1
    etp: int = 1
    ep: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    grad_offload: bool = False
    load_hf_weights: bool = True
    attention_backend_override: str | None = None
    resync_format: str | None = None
    resync_config: dict[str, Any] = field(default_factory=dict)
    export_dtype: str | None = None
    router_replay_mode: str = "disabled"
    cross_entropy_fusion: bool = True
    impl_cfg: dict[str, Any] = field(default_factory=dict)
    exact_rollout: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.impl_cfg, Mapping):
            raise InputError("engine.impl_cfg", f"is {self.impl_cfg!r}", f"give {{}} or some of {', '.join(IMPL_CFG)}")
        if not isinstance(self.router_replay, EngineRouterReplayConfig):
            self.router_replay = router_replay(self.router_replay)
        if self.strategy != "mlite":
            raise InputError("engine.strategy", f"is {self.strategy!r}", "leave it at mlite")
        for key in self.impl_cfg:
            if key not in IMPL_CFG:
                raise InputError(f"engine.impl_cfg.{key}", "is not a known key", nearest(key, IMPL_CFG))
        chosen = IMPL_CFG | dict(self.impl_cfg)
        for where, value, built in (
            ("impl", self.impl, IMPLS),
            ("dtype", self.dtype, ("bfloat16", "float32")),
            ("attention_backend_override", self.attention_backend_override, ATTENTION),
            ("router_replay_mode", self.router_replay_mode, REPLAY),
            ("router_replay.mode", self.router_replay.mode, REPLAY),
            ("cross_entropy_fusion", self.cross_entropy_fusion, (True,)),
            ("load_hf_weights", self.load_hf_weights, (True,)),
            *((key, getattr(self, key), (True, False)) for key in ("param_offload", "optimizer_offload", "grad_offload")),
            ("resync_format", self.resync_format, (None,)),
            ("export_dtype", self.export_dtype, (None, self.dtype)),
            ("impl_cfg.use_thd", chosen["use_thd"], (True,)),
            ("impl_cfg.use_deepep", chosen["use_deepep"], (False,)),
            ("impl_cfg.optimizer", chosen["optimizer"], ("fsdp2",)),
            ("impl_cfg.recompute", chosen["recompute"], (None, "full")),
            *((axis, getattr(self, axis), (1, None)) for axis in ("tp", "etp", "ep", "pp", "vpp", "cp")),
        ):
            if value not in built:
                raise InputError(f"engine.{where}", f"{value!r} is not built", f"choose from {', '.join(map(str, built))}")
        if self.model_name != "auto":
            family(self.model_name)
        if os.environ.get("MLITE_EXACT") == "1":
            for key, (where, allowed, fix) in EXACT_ROLLOUT.items():
                if (found := self.exact_rollout.get(key, allowed[0])) not in allowed:
                    raise InputError(where, f"is {found!r} in exact mode", fix)
        if self.resync_config:
            raise InputError("engine.resync_config", f"{dict(self.resync_config)} is not built", "leave it empty")

    @property
    def replays_routes(self) -> bool:
        return "R3" in (self.router_replay_mode, self.router_replay.mode)

    @property
    def recompute(self) -> bool:
        return self.impl_cfg.get("recompute") == "full"


def router_replay(given: Mapping[str, Any]) -> EngineRouterReplayConfig:
    """The group as Hydra has it where a recipe adds it: verl's engine groups build theirs by a `_target_`."""
    known = [key.name for key in fields(EngineRouterReplayConfig) if key.name != "_target_"]
    for key in given:
        if key not in known:
            raise InputError(f"engine.router_replay.{key}", "is not a known key", nearest(key, known))
    if (mode := given.get("mode", "disabled")) not in REPLAY:
        raise InputError("engine.router_replay.mode", f"{mode!r} is not built", f"choose from {', '.join(REPLAY)}")
    return EngineRouterReplayConfig(**given)


from verl_mlite import engine as _registers_itself  # noqa: E402, F401
