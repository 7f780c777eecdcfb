"""A setting is honoured or refused by name; a misspelt one never runs as the default."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import lite
from lite import MegatronLiteConfig, OptimizerConfig, PackedBatch, ParallelConfig, RuntimeConfig, create_runtime
from lite.errors import InputError
from lite.model.registry import families, family
from lite.runtime.config import from_dict
from lite.runtime.runtime import Runtime
from tests.checkpoints import FAMILIES, checkpoint


def refused(config: dict[str, Any], *said: str) -> None:
    with pytest.raises(InputError) as caught:
        create_runtime({"hf_path": str(checkpoint())} | config).build_model()
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in said), message


def test_the_names_of_the_upstream_design_are_there() -> None:
    """Code written against Megatron Core's Lite imports these from the package."""
    for thing in (MegatronLiteConfig, OptimizerConfig, PackedBatch, ParallelConfig, RuntimeConfig):
        assert getattr(lite, thing.__name__) is thing and thing.__name__ in lite.__all__
    assert isinstance(create_runtime(RuntimeConfig(hf_path=str(checkpoint()))), Runtime)
    assert {"backend", "hf_path", "backend_cfg"} == set(RuntimeConfig.__dataclass_fields__)
    assert {"tp", "ep", "etp", "pp", "vpp", "cp"} == set(ParallelConfig.__dataclass_fields__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = lite.no_such_name


@pytest.mark.parametrize(
    ("config", "where", "key", "meant"),
    [
        ({"backendcfg": {}}, "RuntimeConfig", "backendcfg", "backend_cfg"),
        ({"backend_cfg": {"modelname": "auto"}}, "RuntimeConfig.backend_cfg", "modelname", "model_name"),
        ({"backend_cfg": {"parallel": {"ttp": 1}}}, "RuntimeConfig.backend_cfg.parallel", "ttp", "tp"),
        ({"backend_cfg": {"fsdp": {"param_ofload": True}}}, "RuntimeConfig.backend_cfg.fsdp", "param_ofload", "param_offload"),
        ({"backend_cfg": {"optimizer": {"weight_decy": 0.1}}}, "RuntimeConfig.backend_cfg.optimizer", "weight_decy", "weight_decay"),
        ({"backend_cfg": {"optimizer": {"learning_rate": 1}}}, "RuntimeConfig.backend_cfg.optimizer", "learning_rate", "lr"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(config: dict[str, Any], where: str, key: str, meant: str) -> None:
    refused(config, where + ":", f"unknown key {key!r}", meant)


def test_an_unknown_option_of_the_family_is_refused() -> None:
    refused({"backend_cfg": {"impl_cfg": {"flash": True}}}, "impl_cfg", "'flash'")


def test_an_unknown_override_is_refused_and_a_known_one_is_honoured() -> None:
    refused({"backend_cfg": {"override": {"rope_thetta": 5.0}}}, "config.json", "'rope_thetta'", "'rope_theta'")
    config = {"hf_path": str(checkpoint()), "backend_cfg": {"override": {"rope_theta": 5.0}}}
    assert create_runtime(config).build_model().bundle.config.rotary.theta == 5.0


def test_a_key_without_default_that_is_not_given_is_refused() -> None:
    with pytest.raises(InputError, match=r"RuntimeConfig.*hf_path"):
        create_runtime({})


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        ({"backend": "megatron"}, "RuntimeConfig.backend", "megatron"),
        ({"backend_cfg": {"impl": "bridge"}}, "MegatronLiteConfig.impl", "bridge"),
        ({"backend_cfg": {"fsdp": {"shard": "never"}}}, "FsdpConfig.shard", "never"),
        ({"backend_cfg": {"dtype": "fp16"}}, "MegatronLiteConfig.dtype", "fp16"),
        ({"backend_cfg": {"optimizer": {"optimizer": "sgd"}}}, "OptimizerConfig.optimizer", "sgd"),
        ({"backend_cfg": {"optimizer": {"lr_decay_style": "cosin"}}}, "OptimizerConfig.lr_decay_style", "cosin"),
    ],
)
def test_a_value_out_of_its_choices_is_refused(config: dict[str, Any], key: str, value: str) -> None:
    refused(config, key + ":", repr(value), "not supported")


@pytest.mark.parametrize(("key", "value"), [("lr", "1e-5"), ("lr", True), ("lr_warmup_steps", 1.5), ("lr", 0.0)])
def test_a_value_of_the_wrong_kind_is_refused(key: str, value: object) -> None:
    """YAML reads 1e-5 as text; training at a learning rate that is text, or 0, must not start."""
    refused({"backend_cfg": {"optimizer": {key: value}}}, f"OptimizerConfig.{key}", str(value))


@pytest.mark.parametrize("lr", [0.0, 1e30])
def test_a_learning_rate_out_of_range_is_told_both_ends(lr: float) -> None:
    with pytest.raises(InputError, match=r"OptimizerConfig\.lr: .* is no learning rate; choose one above 0 and below 1e6"):
        OptimizerConfig(lr=lr)


def test_dataclasses_are_checked_like_keys() -> None:
    with pytest.raises(InputError, match=r"MegatronLiteConfig\.dtype"):
        MegatronLiteConfig(dtype="fp16")  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", ["tp", "ep", "etp", "pp", "vpp", "cp"])
def test_more_ranks_than_are_built_are_refused(axis: str) -> None:
    """Silently running tp 2 as tp 1 would train on two copies of one shard's batch."""
    refused({"backend_cfg": {"parallel": {axis: 2}}}, f"parallel.{axis}", "2")


@pytest.mark.parametrize("model_type", sorted(t for name in families() for t in family(name).HF_MODEL_TYPES))
def test_auto_reads_the_checkpoints_model_type(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    runtime = create_runtime({"hf_path": str(tmp_path)})
    assert model_type in runtime.protocol.HF_MODEL_TYPES and runtime.family in FAMILIES


def test_a_family_given_by_name_is_taken_and_a_misspelt_one_refused() -> None:
    other = next(name for name in FAMILIES if name != "llama")
    assert create_runtime({"hf_path": str(checkpoint("llama")), "backend_cfg": {"model_name": other}}).family == other
    refused({"backend_cfg": {"model_name": "lama"}}, "'lama'", "'llama'")


def test_keys_and_dataclasses_say_the_same() -> None:
    keys = {
        "hf_path": "somewhere",
        "backend_cfg": {"dtype": "fp32", "parallel": {"tp": 1}, "optimizer": {"lr": 0.5, "lr_decay_style": "cosine"}},
    }
    optimizer = OptimizerConfig(lr=0.5, lr_decay_style="cosine")
    spelled = RuntimeConfig("somewhere", backend_cfg=MegatronLiteConfig(dtype="fp32", parallel=ParallelConfig(tp=1), optimizer=optimizer))
    assert from_dict(RuntimeConfig, keys) == spelled
    assert from_dict(RuntimeConfig, {"hf_path": "x", "backend_cfg": {"optimizer": None}}).backend_cfg.optimizer is None


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_dtype_and_device_are_what_the_model_gets(name: str, dtype: torch.dtype) -> None:
    handle = create_runtime({"hf_path": str(checkpoint()), "backend_cfg": {"dtype": name, "device": "cpu"}}).build_model()
    assert {(p.dtype, p.device.type) for p in handle.module.parameters()} == {(dtype, "cpu")}


def test_without_an_optimizer_the_model_only_scores() -> None:
    runtime = create_runtime({"hf_path": str(checkpoint()), "backend_cfg": {"optimizer": None}})
    handle = runtime.build_model()
    batch = PackedBatch.from_samples([([1, 2], [3])])
    assert runtime.forward_backward(handle, batch, forward_only=True).log_probs[0][1] < 0
    for call in (runtime.optimizer_step, runtime.zero_grad, runtime.lr_scheduler_step):
        with pytest.raises(InputError, match="without an optimizer"):
            call(handle)


def test_a_backward_needs_a_loss_and_the_announced_number_of_micro_batches() -> None:
    runtime = create_runtime({"hf_path": str(checkpoint())})
    handle = runtime.build_model()
    batch = PackedBatch.from_samples([([1, 2], [3])])
    with pytest.raises(InputError, match="loss function"):
        runtime.forward_backward(handle, batch)
    with pytest.raises(InputError, match="1 micro-batches, 2 announced"):
        runtime.forward_backward(handle, batch, num_microbatches=2, forward_only=True)


def test_an_error_says_the_same_after_it_has_passed_between_processes() -> None:
    error = InputError(Path("config.json"), "holds\nno layers", "correct it")
    assert str(error) == "config.json: holds no layers; correct it"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
