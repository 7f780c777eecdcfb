"""What preflight asks of an exact run's configuration, key by key."""

from typing import Any

WORKER = "verl_mlite.worker.ExactWorkerExtension"
ROLLOUT, VLLM = "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.engine_kwargs.vllm"
MEGATRON = "actor_rollout_ref.actor.megatron"
ENGINES = ("actor_rollout_ref.actor.engine", "actor_rollout_ref.ref.engine")

ONE_GPU = "set it to 1: an engine on one GPU is what was verified"
DECODE_GRAPHS = "set compilation_config={mode:0,cudagraph_mode:FULL_DECODE_ONLY,custom_ops:[all]}"
NO_ADAPTER = "set it to 0: all weights are trained"
NO_REPLAY = "leave it off: routers agree by themselves here, and a replay would hide it where they do not"
BF16 = "set it to bfloat16, which alone was verified"
CUTS = "the trainer counts every token: vLLM must not cut any off"

# key, the values it may have, what to do otherwise
SETTINGS_OF_BOTH: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("actor_rollout_ref.hybrid_engine", (True,), "leave it True: verl builds nothing else"),
    ("trainer.resume_mode", ("auto", "disable", "resume_path"), "choose auto, disable or resume_path"),
    (f"{ROLLOUT}.load_format", ("dummy", "auto", "safetensors"), "choose dummy (the first sync is complete), auto or safetensors"),
)

# the same, in the exact arm
SETTINGS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("actor_rollout_ref.actor.strategy", ("mlite",), "add model_engine=mlite"),
    (f"{ROLLOUT}.name", ("vllm",), "set it to vllm"),
    ("algorithm.rollout_correction.bypass_mode", (False,), "set it to False: otherwise the trainer's logprobs are never compared"),
    (f"{ROLLOUT}.calculate_log_probs", (True,), "set it to True: otherwise there is nothing to compare with"),
    (f"{ROLLOUT}.top_p", (1,), f"set it to 1: {CUTS}"),
    (f"{ROLLOUT}.top_k", (-1, 0), f"set it to -1: {CUTS}"),
    (f"{ROLLOUT}.enable_prefix_caching", (False,), "set it to False: a cached prefix was computed in another batch"),
    (f"{ROLLOUT}.dtype", ("bfloat16",), BF16),
    (f"{ENGINES[0]}.dtype", ("bfloat16",), BF16),
    (f"{ENGINES[0]}.router_replay_mode", ("disabled",), NO_REPLAY),
    (f"{ENGINES[0]}.router_replay.mode", ("disabled", None), NO_REPLAY),
    (f"{ROLLOUT}.enable_rollout_routing_replay", (False,), NO_REPLAY),
    ("actor_rollout_ref.actor.calculate_sum_pi_squared", (False,), "set it to False: it is not built"),
    ("trainer.default_hdfs_dir", (None,), "leave it null and copy the folder: it is not built"),
    (f"{ROLLOUT}.quantization", (None,), "leave it null: the trainer has no quantized weights"),
    (f"{ROLLOUT}.tensor_model_parallel_size", (1,), ONE_GPU),
    (f"{ROLLOUT}.pipeline_model_parallel_size", (1,), ONE_GPU),
    (f"{ROLLOUT}.data_parallel_size", (1,), ONE_GPU),
    (f"{ROLLOUT}.expert_parallel_size", (1,), ONE_GPU),
    (f"{ROLLOUT}.checkpoint_engine.backend", ("naive",), "set it to naive: the other ways check no fingerprint"),
    ("actor_rollout_ref.model.lora_rank", (0,), NO_ADAPTER),
    ("actor_rollout_ref.model.lora.rank", (0,), NO_ADAPTER),
    ("actor_rollout_ref.model.lora_adapter_path", (None,), "leave it null: all weights are trained"),
    ("actor_rollout_ref.model.mtp.enable", (False,), "set it to False"),
    ("critic.enable", (False,), "set it to False: a critic is not built, and GRPO needs none"),
    (f"{VLLM}.worker_extension_cls", (WORKER,), f"add +{VLLM}.worker_extension_cls={WORKER}"),
    (f"{VLLM}.compilation_config.mode", (0,), DECODE_GRAPHS),
    (f"{VLLM}.compilation_config.cudagraph_mode", ("FULL_DECODE_ONLY", "NONE"), DECODE_GRAPHS),
    (f"{VLLM}.compilation_config.custom_ops", (["all"],), DECODE_GRAPHS),
    (f"{VLLM}.async_scheduling", (False,), "set it to False"),
    (f"{VLLM}.enable_flashinfer_autotune", (False,), "set it to False"),
)

# key, its type, above what, at most what
NUMBERS: tuple[tuple[str, type, float, float], ...] = (
    ("data.train_batch_size", int, 0, 1e9),
    ("data.max_prompt_length", int, 0, 1e9),
    ("data.max_response_length", int, 0, 1e9),
    ("actor_rollout_ref.actor.ppo_mini_batch_size", int, 0, 1e9),
    ("actor_rollout_ref.actor.optim.lr", float, 0, 1),
    (f"{ROLLOUT}.n", int, 0, 1e9),
    (f"{ROLLOUT}.temperature", float, 0, 1e9),
    (f"{ROLLOUT}.gpu_memory_utilization", float, 0, 1),
    ("trainer.n_gpus_per_node", int, 0, 1e9),
    ("trainer.nnodes", int, 0, 1e9),
    (f"{ROLLOUT}.max_num_seqs", int, 0, 1e9),
    ("trainer.total_training_steps", int, 0, 1e9),
    ("data.seed", int, -1, 1e18),
    (f"{ROLLOUT}.seed", int, -1, 1e18),
    (f"{ROLLOUT}.max_num_batched_tokens", int, 0, 1e9),
    ("actor_rollout_ref.actor.ppo_epochs", int, 0, 1e9),
    ("trainer.save_freq", int, -2, 1e9),
    ("trainer.test_freq", int, -2, 1e9),
    ("trainer.total_epochs", int, 0, 1e9),
)

# which hold a whole prompt and response, and what they depend on
LENGTHS = {
    f"{ROLLOUT}.max_model_len": None,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "actor_rollout_ref.actor.use_dynamic_bsz",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": f"{ROLLOUT}.log_prob_use_dynamic_bsz",
}

# estimators that compare a prompt's samples with each other
GROUPED = {"grpo", "grpo_vectorized", "grpo_passk", "gdpo", "gpg", "opo", "rloo", "rloo_vectorized"}

# loggers that are packages of their own
LOGGERS = {"wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio"}

OPTIONAL = {"trainer.total_training_steps", "data.seed"}  # of the numbers: null has a meaning

# of engine_kwargs.vllm, which verl puts after its own arguments: what else stands there would win over what is checked above
VERIFIED = {
    "worker_extension_cls", "attention_backend", "compilation_config", "async_scheduling", "enable_flashinfer_autotune",
    "mamba_ssm_cache_dtype",
}  # fmt: skip
COMPILATION = {"mode", "cudagraph_mode", "custom_ops"}  # of its compilation_config
