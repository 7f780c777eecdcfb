"""verl's own configurations with ours: composed, and built as verl's drivers and workers do."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from omegaconf import DictConfig
from verl.trainer import config as verl_config
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import McoreEngineConfig, RolloutConfig
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl_mlite.configs import optimizer_config
from verl_mlite.engine import MliteEngine
from verl_mlite.engine_config import MliteEngineConfig

from lite.errors import InputError
from tests.recipe_commands import ARMS, NAMES, overrides

SEARCH = "hydra.searchpath=[pkg://verl_mlite.config]"
PPO = [SEARCH, "model_engine=mlite", "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
ENGINE = "actor_rollout_ref.actor.engine"
VLLM = "+actor_rollout_ref.rollout.engine_kwargs.vllm"


def composed(overrides: list[str], name: str = "ppo_trainer") -> DictConfig:
    with initialize_config_dir(str(Path(verl_config.__file__).parent), version_base=None):
        return compose(name, overrides)


def refused(build: Any, *arguments: Any) -> str:
    """The message of the InputError behind what Hydra raises."""
    with pytest.raises((InstantiationException, InputError)) as caught:
        build(*arguments)
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, InputError):
        error = error.__cause__
    assert error is not None, caught.value
    return str(error)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", NAMES)
def test_recipes_compose_and_are_built_as_the_driver_and_the_workers_do(name: str, arm: str) -> None:
    config = composed(overrides(name, arm=arm))
    validate_config(config, use_reference_policy=False, use_critic=False)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    omega_conf_to_dataclass(config.algorithm)
    assert isinstance(actor.engine, MliteEngineConfig if arm == "1" else McoreEngineConfig)
    assert actor.strategy == ("mlite" if arm == "1" else "megatron") and not config.critic.enable
    assert isinstance(rollout, RolloutConfig) and rollout.calculate_log_probs and not rollout.full_determinism
    if arm == "1":
        assert isinstance(omega_conf_to_dataclass(config.actor_rollout_ref.ref.engine), MliteEngineConfig)
        assert actor.engine.recompute and not rollout.enable_prefix_caching
        # verl writes it as JSON, so nothing in it may be a container of Hydra's
        assert rollout.engine_kwargs["vllm"]["compilation_config"] == {
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "custom_ops": ["all"],
        }  # fmt: skip
    elif name == "nemotron_h":
        assert actor.engine.router_replay.mode == "R3" and rollout.enable_rollout_routing_replay


@pytest.mark.parametrize("arm", ARMS)
def test_sft_composes_and_is_built_as_the_trainer_does(arm: str) -> None:
    engine = [SEARCH, "engine=mlite"] if arm == "1" else ["engine=megatron"]
    config = composed([*engine, "optim=megatron"], "sft_trainer_engine")
    built = omega_conf_to_dataclass(config.engine)
    assert isinstance(built, MliteEngineConfig if arm == "1" else McoreEngineConfig)
    assert optimizer_config(omega_conf_to_dataclass(config.optim)).lr == 1e-3
    for part in (config.checkpoint, config.profiler):
        omega_conf_to_dataclass(part)


def test_the_reference_has_the_actors_parallel_sizes_and_never_trains() -> None:
    config = composed([*PPO, f"{ENGINE}.attention_backend_override=TRITON_ATTN"])
    ref = config.actor_rollout_ref.ref.engine
    assert ref.forward_only and ref.attention_backend_override == "TRITON_ATTN"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("+%s.recompte=full", "recompte"),
        ("+%s.impl_cfg.recompte=full", "engine.impl_cfg.recompte: is not a known key; did you mean 'recompute'"),
        ("+%s.router_replay.mod=R3", "engine.router_replay.mod: is not a known key; did you mean 'mode'"),
        ("%s.impl_cfg=null", "engine.impl_cfg: is None; give {} or some of use_thd"),
    ],
)
def test_a_misspelt_engine_key_fails_by_name(key: str, said: str) -> None:
    config = composed([*PPO, key % ENGINE])
    with pytest.raises(InstantiationException, match=said):
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def test_a_replay_may_be_asked_for_as_verls_own_engines_are_asked() -> None:
    engine = omega_conf_to_dataclass(composed([*PPO, f"+{ENGINE}.router_replay.mode=R3"]).actor_rollout_ref.actor).engine
    assert engine.replays_routes and not omega_conf_to_dataclass(composed(PPO).actor_rollout_ref.actor).engine.replays_routes


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_p: is 0.9 in exact mode; set it to 1: the trainer counts"),
        ("actor_rollout_ref.rollout.top_k=5", "actor_rollout_ref.rollout.top_k: is 5 in exact mode; set it to -1: the trainer counts"),
        ("algorithm.rollout_correction.bypass_mode=True", "algorithm.rollout_correction.bypass_mode: is True in exact mode; set it to F"),
    ],
)
def test_exact_mode_refuses_such_a_rollout_without_preflight(override: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By main_ppo alone: the driver and every worker build the engine's configuration, which has these from the rollout's."""
    config = composed([*PPO, override])
    omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    monkeypatch.setenv("MLITE_EXACT", "1")
    assert refused(omega_conf_to_dataclass, config.actor_rollout_ref.actor).startswith(said)
    omega_conf_to_dataclass(composed(PPO).actor_rollout_ref.actor)


# The public DeepSeek-V4 recipe (verl#7688): every key of its engine, in the way it is given there.
NOT_BUILT = {
    f"{ENGINE}.pp=4": "engine.pp",
    f"{ENGINE}.cp=2": "engine.cp",
    f"{ENGINE}.ep=16": "engine.ep",
    f"{ENGINE}.resync_format=block_fp8": "engine.resync_format",
    f"+{ENGINE}.resync_config.expert_dtype=fp8": "engine.resync_config",
    f"+{ENGINE}.impl_cfg.optimizer=dist_opt": "engine.impl_cfg.optimizer",
}
NOT_BUILT_IN_ITS_BASELINE = {
    f"{ENGINE}.attention_backend_override=fused": "engine.attention_backend_override",
    f"+{ENGINE}.impl_cfg.use_deepep=True": "engine.impl_cfg.use_deepep",
}
BUILT = [
    f"~{ENGINE}.grad_offload",
    "~actor_rollout_ref.ref.engine.grad_offload",
    f"{ENGINE}.load_hf_weights=True",
    f"{ENGINE}.param_offload=True",
    f"{ENGINE}.optimizer_offload=True",
    f"+{ENGINE}.cross_entropy_fusion=True",
    f"+{ENGINE}.impl_cfg.recompute=full",
]
EXACT_ALIGNMENT = [
    f"{ENGINE}.impl=vllm",
    f"+{ENGINE}.seed=42",
    f"+{ENGINE}.full_determinism=True",
    f"{ENGINE}.attention_backend_override=null",
    "actor_rollout_ref.rollout.full_determinism=True",
    "actor_rollout_ref.rollout.seed=42",
    f"{VLLM}.all2all_backend=deepep_low_latency",
    f"{VLLM}.linear_backend=deep_gemm",
]
BASELINE_R3 = [f"{ENGINE}.router_replay_mode=R3", "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"]
OFFLOADED = {"offload_fraction": "1.0", "use_precision_aware_optimizer": "True", "decoupled_weight_decay": "True"}
COMMON = [
    *(f"+actor_rollout_ref.actor.optim.override_optimizer_config.{key}={value}" for key, value in OFFLOADED.items()),
    "actor_rollout_ref.model.use_fused_kernels=True",
    f"{VLLM}.disable_custom_all_reduce=True",
    f"{VLLM}.worker_extension_cls=verl_mlite.rollout.vllm_worker.MLiteVLLMColocateWorkerExtension",
    f"{VLLM}.kv_cache_dtype=fp8",
    f"{VLLM}.hf_overrides.quantization_config.weight_block_size=[128,128]",
    f"{VLLM}.compilation_config={{cudagraph_mode:FULL_DECODE_ONLY}}",
    "+data.apply_chat_template_kwargs.enable_thinking=True",
    "+reward.reward_kwargs.overlong_buffer_cfg.enable=True",
    '+ray_kwargs.ray_init.runtime_env.env_vars.VLLM_BATCH_INVARIANT="1"',
    "trainer.use_v1=False",
]


@pytest.mark.parametrize("mode", [[*NOT_BUILT, *EXACT_ALIGNMENT], [*NOT_BUILT, *NOT_BUILT_IN_ITS_BASELINE, *BASELINE_R3]])
def test_the_overrides_of_the_public_recipe_compose_and_what_is_not_built_is_refused_by_name(mode: list[str], tmp_path: Path) -> None:
    # it brings two groups of its own, which the package it was written for lacks
    for group, text in (
        ("model_engine/mlite", "# @package _global_\nmodel_engine: mlite\n"),
        ("critic/mlite_critic", "_target_: verl.workers.config.CriticConfig\nenable: false\nstrategy: mlite\n"),
    ):
        path = tmp_path / f"{group}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    search = f"hydra.searchpath=[file://{tmp_path},pkg://verl_mlite.config]"
    config = composed([search, *PPO[1:], *BUILT, *mode, *COMMON])
    assert config.actor_rollout_ref.actor.engine.ep == 16 and config.actor_rollout_ref.ref.engine.ep == 16
    assert "grad_offload" not in config.actor_rollout_ref.actor.engine
    assert refused(omega_conf_to_dataclass, config.actor_rollout_ref.actor).startswith("engine.")


@pytest.mark.parametrize(("override", "said"), (NOT_BUILT | NOT_BUILT_IN_ITS_BASELINE).items())
def test_each_key_of_the_public_recipe_that_is_not_built_is_refused_by_its_name(override: str, said: str) -> None:
    actor = composed([*PPO, override]).actor_rollout_ref.actor
    assert refused(omega_conf_to_dataclass, actor).startswith(f"{said}: ")


@pytest.mark.parametrize("mode", [EXACT_ALIGNMENT[:4], BASELINE_R3])
def test_the_rest_of_the_public_recipes_engine_is_built(mode: list[str]) -> None:
    engine = omega_conf_to_dataclass(composed([*PPO, *BUILT, *mode]).actor_rollout_ref.actor).engine
    assert engine.recompute and engine.param_offload and engine.replays_routes == (mode is BASELINE_R3)


def test_what_the_public_recipe_asks_of_the_optimizer_is_refused_by_its_name() -> None:
    optim = omega_conf_to_dataclass(composed([*PPO, *COMMON[:3]]).actor_rollout_ref.actor.optim)
    assert "optim.override_optimizer_config: " in refused(optimizer_config, optim)


def test_a_critic_is_refused_by_name() -> None:
    critic = EngineRegistry.get_engine_cls(model_type="value_model", backend="mlite")
    assert refused(critic).startswith("critic.enable: ")


# Only checkpoint_engine.backend=delta_sharded asks for these, which preflight refuses: no fingerprint would be checked.
UNBUILT_EXPORTS = {"get_per_tensor_param_shard", "get_per_tensor_param_delta_shard"}


def test_no_method_of_verls_engine_is_inherited_unimplemented() -> None:
    def source(member: Any) -> str:
        return inspect.getsource(member.fget if isinstance(member, property) else member)

    members = {name: m for name, m in vars(BaseEngine).items() if inspect.isfunction(m) or isinstance(m, property)}
    abstract = {name for name, member in members.items() if "raise NotImplementedError" in source(member)}
    assert {"initialize", "forward_backward_batch", "is_param_offload_enabled"} < abstract
    assert abstract - set(vars(MliteEngine)) == UNBUILT_EXPORTS
    for name in abstract & set(vars(MliteEngine)):
        assert "raise NotImplementedError" not in source(vars(MliteEngine)[name]), name


def test_the_engines_methods_take_what_verls_callers_give() -> None:
    """Every parameter of verl's signature, by its name; more than verl's own declaration where callers give more."""
    for name, member in vars(BaseEngine).items():
        if inspect.isfunction(member) and name in vars(MliteEngine):
            ours = inspect.signature(getattr(MliteEngine, name)).parameters
            open_ended = any(p.kind is p.VAR_KEYWORD for p in ours.values())
            theirs = [p for p in inspect.signature(member).parameters.values() if p.kind is not p.VAR_KEYWORD]
            assert all(p.name in ours or (open_ended and p.default is not p.empty) for p in theirs), name
    given_by_the_worker = {"layered_summon": False, "base_sync_done": True}
    inspect.signature(MliteEngine.get_per_tensor_param).bind(None, **given_by_the_worker)
