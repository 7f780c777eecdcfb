"""Each refusal, planted alone in a job that passes."""

from typing import Any

import pytest
import ray
import torch
from verl_mlite.preflight import CHECKS, checked, main, preflight
from verl_mlite.preflight_job import Job, composed
from verl_mlite.preflight_tables import SETTINGS, SETTINGS_OF_BOTH, WORKER

from lite.errors import InputError
from tests.recipe_commands import overrides
from tests.verl_machine import ACTOR, ENGINE, FORWARDED, GONE, MODEL, ROLLOUT, VLLM, Machine, recipe_config


def test_a_sound_job_passes_and_each_check_says_what_it_saw(machine: Machine) -> None:
    lines = machine.run()
    assert lines[0] == "arm: exact, here and in every worker"
    assert "vllm 0.26.0, which was verified" in lines and f"model: {machine.model}, qwen3" in lines
    assert len(lines) > len(SETTINGS) + len(CHECKS) - 1
    assert not ray.is_initialized() and not torch.cuda.is_initialized()


def test_a_sound_hybrid_passes(hybrid: Machine) -> None:
    lines = hybrid.run()
    assert "packages: vllm, mamba_ssm, causal_conv1d" in lines and f"{VLLM}.mamba_ssm_cache_dtype = float32" in lines


def test_a_sound_baseline_passes_and_needs_no_plugin(hybrid: Machine) -> None:
    hybrid.has(plugin="other:register")
    lines = hybrid.run(arm="0")
    assert lines[0] == "arm: baseline, here and in every worker" and "packages: vllm, megatron.core, megatron.bridge" in lines


ADDED = "is not a key of verl's configuration, and + adds it without effect; did you mean"
NO_KEY = "is not a key of verl's configuration; did you mean "

# key, what is planted there, what the refusal says after the key
PLANTED = [
    ("algorithm.rollout_correction.bypass_mode", True, "is True; set it to False: otherwise the trainer's logprobs are never compared"),
    (f"{ACTOR}.strategy", "megatron", "is 'megatron'; add model_engine=mlite"),
    (f"{ROLLOUT}.name", "sglang", "is 'sglang'; set it to vllm"),
    (f"{ROLLOUT}.top_p", 0.95, "is 0.95; set it to 1"),
    (f"{ROLLOUT}.top_k", 20, "is 20; set it to -1"),
    (f"{ROLLOUT}.calculate_log_probs", False, "is False; set it to True"),
    (f"{ROLLOUT}.enable_prefix_caching", True, "is True; set it to False"),
    (f"{ROLLOUT}.logprobs_mode", "processed_logprobs", "is 'processed_logprobs'; set it to raw_logprobs, which fits temperature 1.0"),
    (f"{ROLLOUT}.quantization", "fp8", "is 'fp8'; leave it null"),
    (f"{ROLLOUT}.tensor_model_parallel_size", 2, "is 2; set it to 1: an engine on one GPU"),
    (f"{ROLLOUT}.pipeline_model_parallel_size", 2, "is 2; set it to 1"),
    (f"{ROLLOUT}.data_parallel_size", 2, "is 2; set it to 1"),
    (f"{ROLLOUT}.expert_parallel_size", 2, "is 2; set it to 1"),
    (f"{ROLLOUT}.checkpoint_engine.backend", "delta_sharded", "is 'delta_sharded'; set it to naive"),
    (f"{ROLLOUT}.full_determinism", True, "is True with rollout.n=8: all samples of a prompt get one seed"),
    (f"{MODEL}.lora_rank", 8, "is 8; set it to 0: all weights are trained"),
    (f"{MODEL}.lora.rank", 8, "is 8; set it to 0: all weights are trained"),
    (f"{MODEL}.lora_adapter_path", "/nope", "is '/nope'; leave it null"),
    (f"{ROLLOUT}.dtype", "float16", "is 'float16'; set it to bfloat16"),
    (f"{ENGINE}.dtype", "float32", "is 'float32'; set it to bfloat16"),
    (f"{MODEL}.mtp.enable", True, "is True; set it to False"),
    (f"{ENGINE}.router_replay_mode", "R3", "is 'R3'; leave it off: routers agree by themselves"),
    (f"{ENGINE}.router_replay.mode", "R3", "is 'R3'; leave it off"),
    (f"{ROLLOUT}.enable_rollout_routing_replay", True, "is True; leave it off"),
    (f"{ACTOR}.calculate_sum_pi_squared", True, "is True; set it to False"),
    ("trainer.default_hdfs_dir", "hdfs://x", "is 'hdfs://x'; leave it null and copy the folder"),
    ("critic.enable", True, "is True; set it to False: a critic is not built"),
    (f"{VLLM}.worker_extension_cls", GONE, f"is not set; add +{VLLM}.worker_extension_cls={WORKER}"),
    (f"{VLLM}.worker_extension_cls", "a.B", "is 'a.B'; add "),
    (f"{VLLM}.attention_backend", "TRITON_ATTN", "is 'TRITON_ATTN'; set it to the trainer's, FLASH_ATTN"),
    (f"{VLLM}.compilation_config.mode", 3, "is 3; set compilation_config="),
    (f"{VLLM}.compilation_config.cudagraph_mode", "FULL_AND_PIECEWISE", "is 'FULL_AND_PIECEWISE'; set compilation_config="),
    (f"{VLLM}.compilation_config.custom_ops", ["none"], "is ['none']; set compilation_config="),
    (f"{VLLM}.async_scheduling", True, "is True; set it to False"),
    (f"{VLLM}.enable_flashinfer_autotune", GONE, "is not set; set it to False"),
    (f"{VLLM}.enable_prefix_caching", True, "was not verified, and wins over verl's own key; leave it out"),
    (f"{VLLM}.kv_cache_dtype", "fp8", "was not verified"),
    (f"{ENGINE}.cross_entropy_fuson", True, "is not a known key; did you mean 'cross_entropy_fusion'?"),
    ("actor_rollout_ref.ref.engine.tpp", 2, "is not a known key; did you mean"),
    (f"{FORWARDED}.MLITE_EXACT", "0", f"is 0, 1 here; set {FORWARDED}.MLITE_EXACT='\"1\"'"),
    (f"{FORWARDED}.MLITE_EXACT", GONE, f"is 0, 1 here; add +{FORWARDED}.MLITE_EXACT='\"1\"'"),
    (f"{FORWARDED}.VLLM_BATCH_INVARIANT", "0", "is 0, 1 here; set "),
    ("data.val_files", ["/none.parquet"], "/none.parquet is no file; correct the path"),
    (f"{VLLM}.gpu_memory_utilization", 7, "was not verified, and wins over verl's own key; leave it out"),
    (f"{VLLM}.compilation_config.pass_config", {"fuse_norm_quant": True}, "was not verified; leave it out"),
    (f"{ROLLOUT}.max_model_len", 20_000, "is 20000, of a model whose max_position_embeddings is 16384; give at most as many"),
    ("actor_rollout_ref.hybrid_engine", False, "is False; leave it True"),
    (f"{ROLLOUT}.load_format", "bogus", "is 'bogus'; choose dummy"),
    ("trainer.resume_mode", "bogus", "is 'bogus'; choose auto, disable or resume_path"),
    ("trainer.logger", ["consol"], "is 'consol'; did you mean 'console'?"),
    (f"{ACTOR}.policy_loss.loss_mode", "vanila", "is 'vanila'; did you mean 'vanilla'?"),
    (f"{ACTOR}.ppo_max_token_len_per_gpu", 20, "is 20, of prompts and responses of up to 10240 tokens together; give at least as many"),
    (f"{ROLLOUT}.max_model_len", 100, "is 100, of prompts and responses of up to 10240 tokens"),
    ("reward.custom_reward_function.path", "/nope.py", "/nope.py is no file; correct the path"),
    (f"{ROLLOUT}.n", 1, "is 1: a sample alone has no group to be compared with; give a whole number above 1"),
    (f"{MODEL}.path", None, "is not set; give the folder of a checkpoint"),
    ("reward.reward_manager.name", "dapoo", "is 'dapoo'; did you mean 'dapo'?"),
    ("data.train_files", 5, "is 5; name a file of prompts, or several"),
    ("data.train_files", [5], "is [5]; name a file"),
    ("data.train_batch_size", 64, "is 64, of 32 prompts in data.train_files; give at most as many"),
]


@pytest.mark.parametrize(("key", "value", "says"), PLANTED)
def test_what_would_void_the_run_is_refused_with_where_and_what_to_do(machine: Machine, key: str, value: Any, says: str) -> None:
    assert machine.refusal({key: value}).startswith(f"{key}: {says}")


@pytest.mark.parametrize(("key", "value"), [(f"{ACTOR}.loss_agg_mode", "token-median"), (f"{ROLLOUT}.mode", "sync")])
def test_what_verl_itself_refuses_is_said_in_its_words(machine: Machine, key: str, value: str) -> None:
    said = machine.refusal({key: value})
    assert said.startswith("actor_rollout_ref: ") and key.rpartition(".")[2] in said.lower().replace("rollout ", "")


@pytest.mark.parametrize("plant", [
    {f"{ROLLOUT}.n": 1, "algorithm.adv_estimator": "reinforce_plus_plus"},
    {f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4, f"{ROLLOUT}.log_prob_use_dynamic_bsz": False,
     f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 4, f"{ACTOR}.ppo_max_token_len_per_gpu": 64},
    {"reward.custom_reward_function.path": "pkg://mine.reward"},
    {"reward.reward_manager.name": "naive", "reward.reward_kwargs.overlong_buffer_cfg.len": 9999},
    {"data.custom_cls.path": "mine.py", "data.train_files": "a folder"},
    {f"{ROLLOUT}.max_model_len": 20_000, f"{MODEL}.override_config": {"max_position_embeddings": 32768}},
    {"trainer.total_epochs": 3, "trainer.total_training_steps": None, f"{ACTOR}.checkpoint.save_contents": ["hf_model"]},
])  # fmt: skip
def test_what_verl_runs_is_not_refused(machine: Machine, plant: dict[str, Any]) -> None:
    machine.run(plant)


@pytest.mark.parametrize("override", [
    "+ray_kwargs.ray_init.num_gpus=8", "+data.apply_chat_template_kwargs={enable_thinking:True}", "+data.val_batch_size=8",
    "+trainer.rollout_data_dir=/x", f"+{MODEL}.override_config={{}}", f"+{ACTOR}.optim.lr_decay_steps=9",
    f"+{ENGINE}.impl_cfg.recompute=null",
])  # fmt: skip
def test_keys_that_hydra_takes_for_good_are_not_taken_for_misspelt(override: str) -> None:
    composed([o for o in overrides("qwen3_dense") if not o.startswith(override.split("=")[0])] + [override])


def test_every_setting_is_planted() -> None:
    assert {key for key, *_ in (*SETTINGS, *SETTINGS_OF_BOTH)} <= {key for key, *_ in PLANTED}


def test_another_temperature_needs_other_logprobs(machine: Machine) -> None:
    assert machine.refusal({f"{ROLLOUT}.temperature": 0.6}) == (
        f"{ROLLOUT}.logprobs_mode: is 'raw_logprobs'; set it to processed_logprobs, which fits temperature 0.6"
    )


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (f"{ENGINE}.param_offload", "no", "engine.param_offload: 'no' is not built; choose from True, False"),
        (f"{ENGINE}.model_name", "qwen4", "model family: 'qwen4' is not known; did you mean 'qwen3'?"),
        (f"{ENGINE}.ep", 16, "engine.ep: 16 is not built; choose from 1"),
        (f"{ENGINE}.impl_cfg.recomput", "full", "engine.impl_cfg.recomput: is not a known key; did you mean 'recompute'?"),
        (f"{ENGINE}.router_replay", {"mod": "R3"}, "engine.router_replay.mod: is not a known key; did you mean 'mode'?"),
        ("actor_rollout_ref.ref.engine.tp", 2, "engine.tp: 2 is not built; choose from 1"),
        ("actor_rollout_ref.ref.engine.impl_cfg.recomput", "full", "engine.impl_cfg.recomput: is not a known key"),
        (f"{ACTOR}.checkpoint.save_contents", ["model"], "checkpoint.save_contents: holds ['model']; name all of "),
        (f"{ACTOR}.checkpoint.load_contents", ["model", "hf_model"], "checkpoint.load_contents: holds ['hf_model', 'model']; name all"),
        (f"{ACTOR}.checkpoint.save_contents", ["hf-model"], "checkpoint.save_contents: holds ['hf-model']; choose from "),
        (f"{ACTOR}.checkpoint.async_save", True, "checkpoint.async_save: is not built; set it to False"),
        (f"{ACTOR}.optim.weight_decay_incr_style", "cosine", "optim.weight_decay_incr_style: 'cosine' is not built; leave it at constant"),
        (f"{ACTOR}.optim.use_precision_aware_optimizer", True, "optim.use_precision_aware_optimizer: True is not built; leave it at False"),
        (f"{ACTOR}.optim.use_checkpoint_opt_param_scheduler", True, "optim.use_checkpoint_opt_param_scheduler: True is not built"),
    ],
)
def test_what_the_engine_itself_refuses_is_said_in_its_words(machine: Machine, key: str, value: Any, says: str) -> None:
    assert machine.refusal({key: value}).startswith(says)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (f"{ENGINE}.attention_backend=X", f"{ENGINE}.attention_backend: {NO_KEY}'attention_backend_override'?"),
        ("actor_rollout_ref.actor.enigne.tp=1", f"actor_rollout_ref.actor.enigne.tp: {NO_KEY}'engine'?"),
        (f"~{ENGINE}.grad_ofload", f"{ENGINE}.grad_ofload: {NO_KEY}'grad_offload'?"),
        ("+trainer.save_frequency=1", f"trainer.save_frequency: {ADDED} 'save_freq'?"),
        ("+trainer.total_training_step=3", f"trainer.total_training_step: {ADDED} 'total_training_steps'?"),
        ("++trainer.save_frequency=1", f"trainer.save_frequency: {ADDED} 'save_freq'?"),
        ("trainer.save_freq.x=1", "trainer.save_freq.x: is not a key of verl's configuration; leave it out: save_freq holds no keys"),
        (f"{ROLLOUT}.mtp.enable=True", f"{ROLLOUT}.mtp.enable: is not a key of verl's configuration; leave it out: mtp holds no keys"),
        (f"{ROLLOUT}.engine_kwargs.trtllm.a=1", f"{ROLLOUT}.engine_kwargs.trtllm.a: is not a key of verl's configuration; trtllm has none"),
        ("trainer.logger.x=1", "overrides: invalid literal for int() with base 10: 'x'; correct them"),
        (f"+{ENGINE}.tp=1", f"overrides: Could not append to config. An item is already at '{ENGINE}.tp'."),
        ("model_engine=mlit", "overrides: In 'ppo_trainer': Could not find 'model_engine/mlit'"),
    ],
)  # fmt: skip
def test_what_hydra_does_not_take_is_named_with_the_nearest_key(override: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        preflight([*overrides("qwen3_dense"), override], {})
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("invariant", "exact"), [("1", "0"), ("0", "1"), ("1", None), (None, "1"), ("yes", "yes")])
def test_switches_that_disagree_are_refused(invariant: str | None, exact: str | None) -> None:
    found = {"VLLM_BATCH_INVARIANT": invariant, "MLITE_EXACT": exact}
    job = Job(recipe_config("qwen3_dense", "1"), {name: value for name, value in found.items() if value is not None})
    with pytest.raises(InputError, match=r"environment: VLLM_BATCH_INVARIANT is .* and MLITE_EXACT is .*; set both to 1"):
        checked(job)


def test_packages_that_are_not_there_or_not_verified_are_refused(hybrid: Machine) -> None:
    hybrid.has(missing="mamba_ssm")
    assert hybrid.refusal() == "packages: mamba_ssm is not installed; pip install '.[gpu]' in the checkout"
    hybrid.has(missing="causal_conv1d")
    assert hybrid.refusal().startswith("packages: causal_conv1d is not installed")
    hybrid.has(missing="megatron.core")
    assert hybrid.refusal(arm="0").startswith("packages: megatron.core is not installed")
    hybrid.has(missing="clearml")
    said = hybrid.refusal({"trainer.logger": ["console", "clearml"]})
    assert said == "trainer.logger: clearml is not installed; pip install it, or leave it out"
    hybrid.has(vllm="0.27.0")
    assert hybrid.refusal().startswith("vllm: version 0.27.0 was not verified; install 0.26.0")
    hybrid.has(vllm="0.26.0", plugin="other:register")
    assert "so vLLM does not see its plugin" in hybrid.refusal()


def test_a_hybrid_whose_states_are_not_fp32_is_refused(hybrid: Machine) -> None:
    said = hybrid.refusal({f"{VLLM}.mamba_ssm_cache_dtype": "bfloat16"})
    assert said.startswith(f"{VLLM}.mamba_ssm_cache_dtype: is 'bfloat16'; add +")


NUMBERS = {
    f"{ROLLOUT}.max_num_seqs": 0, "trainer.total_training_steps": 2.5, "data.seed": "abc",
    "data.train_batch_size": "abc", f"{ACTOR}.optim.lr": "big", f"{ROLLOUT}.n": 0, f"{ROLLOUT}.temperature": 0,
    f"{ROLLOUT}.seed": "abc",
    f"{ROLLOUT}.max_num_batched_tokens": -1, f"{ACTOR}.ppo_epochs": 0, "trainer.test_freq": "abc",
    "trainer.total_epochs": 0, "trainer.save_freq": "abc", f"{ROLLOUT}.gpu_memory_utilization": 5,
    "trainer.n_gpus_per_node": 0, f"{ACTOR}.ppo_mini_batch_size": 64,
}  # fmt: skip


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_that_is_none_or_proves_nothing_is_refused(machine: Machine, key: str) -> None:
    assert machine.refusal({key: NUMBERS[key]}).startswith(f"{key}: is {NUMBERS[key]!r}")


@pytest.mark.parametrize(("name", "hint"), [("gea", "is 'gea'; did you mean 'gae'?"), ("gae", "is 'gae'; ")])
def test_an_estimator_that_is_unknown_or_needs_a_critic_is_refused(machine: Machine, name: str, hint: str) -> None:
    said = machine.refusal({"algorithm.adv_estimator": name}, arm="0" if name == "gea" else "1")
    assert said.startswith(f"algorithm.adv_estimator: {hint}")


OPTIMIZER = {"optimizer": "sgd", "weight_decay": -1, "betas": [0.9], "lr_decay_style": "nosuch", "override_optimizer_config": {"x": 1}}


@pytest.mark.parametrize("key", OPTIMIZER)
def test_an_optimizer_that_the_engine_does_not_build_is_refused(machine: Machine, key: str) -> None:
    said = machine.refusal({f"{ACTOR}.optim.{key}": OPTIMIZER[key]})
    assert key in said and "full_key" not in said


def test_a_reward_that_falls_over_more_than_the_response_is_refused(machine: Machine) -> None:
    key = "reward.reward_kwargs.overlong_buffer_cfg.len"
    for length in (8193, 0, "abc"):
        assert machine.refusal({key: length}) == f"{key}: is {length!r}, of responses of up to 8192 tokens; give 1 to as many"


def test_a_batch_or_experts_that_the_gpus_cannot_share_are_refused(hybrid: Machine) -> None:
    mini = f"{ACTOR}.ppo_mini_batch_size"
    said = hybrid.refusal({"data.train_batch_size": 3, mini: 3, f"{ROLLOUT}.n": 3})
    assert said.startswith("data.train_batch_size: is 3, of 3 responses each, on 8 GPUs")
    key = f"{ACTOR}.megatron.expert_model_parallel_size"
    assert hybrid.refusal({"trainer.n_gpus_per_node": 4}, arm="0") == f"{key}: is 8, on 4 GPUs; give one that divides them"


@pytest.mark.parametrize("key", [f"{MODEL}.use_remove_padding", f"{ACTOR}.megatron.use_remove_padding"])
def test_a_baseline_that_packs_a_hybrid_is_refused(hybrid: Machine, key: str) -> None:
    assert "without the boundaries that Mamba layers need" in hybrid.refusal({key: True}, arm="0")


def test_the_exact_trainer_without_its_switches_is_refused(machine: Machine) -> None:
    said = machine.refusal({f"{ACTOR}.strategy": "mlite"}, arm="0")
    assert said.startswith("environment: VLLM_BATCH_INVARIANT and MLITE_EXACT are off: model_engine=mlite is not exact so")


def test_the_engine_without_its_searchpath_is_refused_with_the_override_that_finds_it() -> None:
    with pytest.raises(InputError, match=r"Could not find 'model_engine/mlite'.*; add hydra\.searchpath=\[pkg://verl_mlite\.config\]"):
        composed(["model_engine=mlite"])


def test_help_is_no_override(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["preflight", "-h"])
    assert main() == 0 and "--compose" in capsys.readouterr().out


def test_an_override_without_a_key_is_refused() -> None:
    with pytest.raises(InputError, match=r"overrides: .*; write each as key=value"):
        composed(["=3"])
