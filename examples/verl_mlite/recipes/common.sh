# What the recipes of this folder share; each sources this file, declares its parameters and calls `launch`.
# The arm is chosen by VLLM_BATCH_INVARIANT alone: 1 (default) is exact, 0 the regular baseline, verl's own Megatron engine.
set -euo pipefail

RECIPE="$(basename "${BASH_SOURCE[1]}" .sh)"
EXACT="${VLLM_BATCH_INVARIANT:-1}"
HELP=""

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

[[ "$EXACT" == 0 || "$EXACT" == 1 ]] || die "VLLM_BATCH_INVARIANT: is '$EXACT'; set it to 1 (exact) or 0 (baseline)"
for name in DRY_RUN COMPOSE_ONLY; do
  [[ "${!name:-0}" == 0 || "${!name:-0}" == 1 ]] || die "$name: is '${!name}'; set it to 1 or leave it out"
done

# param NAME DEFAULT MEANING: a variable of the environment, or its default; -h lists it.
param() {
  printf -v "$1" '%s' "${!1:-$2}"
  HELP+="$(printf '  %-18s %s [%s]' "$1" "$3" "${!1}")"$'\n'
}

# A string as Hydra reads it; `launch` has refused what would mean something to it.
quoted() {
  printf '"%s"' "${1//\"/\\\"}"
}

# A path as it is read from any folder: where Ray runs already, its workers have another than this shell.
absolute() {
  case "$1" in
    "" | /* | "~"* | *://*) printf '%s' "$1" ;;
    *) printf '%s/%s' "$PWD" "$1" ;;
  esac
}

# /a.parquet,b.parquet -> ["/a.parquet","/here/b.parquet"]
files() {
  local path list="" each
  IFS=, read -ra each <<<"$1"
  for path in "${each[@]}"; do
    path="${path#"${path%%[! ]*}"}" # "a , b,"
    path="${path%"${path##*[! ]}"}"
    [[ -z "$path" ]] || list+="${list:+,}$(quoted "$(absolute "$path")")"
  done
  printf '[%s]' "$list"
}

usage() {
  cat <<EOF
usage: [NAME=value ...] bash $RECIPE.sh [Hydra overrides of verl.trainer.main_ppo ...]

  VLLM_BATCH_INVARIANT=1 (default)  exact: the trainer calls vLLM's kernels, model_engine=mlite
  VLLM_BATCH_INVARIANT=0            baseline: vLLM as installed, model_engine=megatron; its output folder ends in -baseline
  DRY_RUN=1                         prints the command and starts nothing
  COMPOSE_ONLY=1                    composes the configuration, prints it and starts nothing

parameters [value now]:
$HELP
examples:
  MODEL_PATH=/models/a TRAIN_FILES=/data/train.parquet VAL_FILES=/data/test.parquet bash $RECIPE.sh
  STEPS=3 bash $RECIPE.sh trainer.save_freq=1
  VLLM_BATCH_INVARIANT=0 DRY_RUN=1 bash $RECIPE.sh
EOF
}

common_params() {
  param TRAIN_FILES "${HOME:-}/data/dapo-math-17k.parquet" "training prompts, several with commas between"
  param VAL_FILES "${HOME:-}/data/aime-2024.parquet" "validation prompts"
  param N_GPUS 8 "GPUs of this node; each has a share of the trainer and an engine of its own"
  param STEPS 20 "after which to stop; neither warmup nor decay depends on it"
  param OUT "$PWD/outputs/$RECIPE" "folder for log, metrics, command and configuration, and for checkpoints where trainer.save_freq asks for them"
  param TRAIN_BATCH 32 "prompts a step, and one update of all of them"
  param SAMPLES 8 "responses a prompt"
  param PROMPT_TOKENS 2048 "longest prompt"
  param RESPONSE_TOKENS 8192 "longest response"
  param OVERLONG_TOKENS 4096 "of a response's end, where the reward falls by up to 1"
  param TEMPERATURE 1.0 "of sampling, and of the trainer's logprobs"
  param LR 1e-6 "learning rate, constant"
  param SEED 42 "of the data's order and of the engines; the n-th engine takes SEED + n"
  param GPU_MEMORY 0.5 "share of a GPU's memory for vLLM while it generates"
  param MAX_SEQS 32 "sequences an engine generates at once"
  param OFFLOAD True "the trainer's weights and optimizer leave the GPU while vLLM generates"
  param LOGGER "[console,file]" "verl's loggers; file writes OUT/metrics.jsonl"
  param FORWARD "NCCL_NVLS_ENABLE WANDB_MODE WANDB_ENTITY WANDB_BASE_URL" "variables that workers get too, those that are set"
  param PYTHON python3 "interpreter that has verl, vLLM and verl_mlite"
}

common_args() {
  local length=$((PROMPT_TOKENS + RESPONSE_TOKENS))
  ARGS+=(
    algorithm.adv_estimator=grpo
    algorithm.norm_adv_by_std_in_grpo=False
    algorithm.use_kl_in_reward=False
    algorithm.rollout_correction.bypass_mode=False
    data.train_files="$(files "$TRAIN_FILES")"
    data.val_files="$(files "$VAL_FILES")"
    data.train_batch_size="$TRAIN_BATCH"
    data.max_prompt_length="$PROMPT_TOKENS"
    data.max_response_length="$RESPONSE_TOKENS"
    data.seed="$SEED"
    actor_rollout_ref.model.path="$(quoted "$MODEL_PATH")"
    actor_rollout_ref.actor.optim.lr="$LR"
    actor_rollout_ref.actor.optim.lr_warmup_steps=0
    actor_rollout_ref.actor.optim.lr_decay_style=constant
    actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.actor.optim.betas=[0.9,0.95]
    actor_rollout_ref.actor.optim.clip_grad=1.0
    actor_rollout_ref.actor.ppo_mini_batch_size="$TRAIN_BATCH"
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$length"
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n="$SAMPLES"
    actor_rollout_ref.rollout.temperature="$TEMPERATURE"
    actor_rollout_ref.rollout.top_p=1.0
    actor_rollout_ref.rollout.top_k=-1
    actor_rollout_ref.rollout.calculate_log_probs=True
    actor_rollout_ref.rollout.full_determinism=False # True gives all samples of a prompt one seed
    actor_rollout_ref.rollout.seed="$SEED"
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.max_model_len="$length"
    actor_rollout_ref.rollout.max_num_seqs="$MAX_SEQS"
    actor_rollout_ref.rollout.gpu_memory_utilization="$GPU_MEMORY"
    actor_rollout_ref.rollout.free_cache_engine=True
    actor_rollout_ref.rollout.load_format=dummy # the first sync is complete
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1024
    reward.reward_manager.name=dapo
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True
    +reward.reward_kwargs.overlong_buffer_cfg.len="$OVERLONG_TOKENS"
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
    +reward.reward_kwargs.overlong_buffer_cfg.log=False
    +reward.reward_kwargs.max_resp_len="$RESPONSE_TOKENS"
    trainer.logger="$LOGGER"
    trainer.project_name=mlite
    trainer.experiment_name="$(quoted "$(basename "$OUT")")"
    trainer.n_gpus_per_node="$N_GPUS"
    trainer.nnodes=1
    trainer.total_training_steps="$STEPS"
    trainer.default_local_dir="$(quoted "$OUT/checkpoints")"
    trainer.val_before_train=False
    trainer.use_v1=False
    hydra.run.dir="$(quoted "$OUT/hydra")" # the configuration as composed; Hydra would make a folder wherever it is called
  )
}

exact_args() {
  local vllm=+actor_rollout_ref.rollout.engine_kwargs.vllm mode=processed_logprobs
  [[ "$TEMPERATURE" =~ ^1(\.0*)?$ ]] && mode=raw_logprobs # vLLM's logprobs before and after the temperature
  ARGS+=(
    "hydra.searchpath=[pkg://verl_mlite.config]"
    model_engine=mlite
    actor_rollout_ref.actor.engine.param_offload="$OFFLOAD"
    actor_rollout_ref.actor.engine.optimizer_offload="$OFFLOAD"
    actor_rollout_ref.actor.engine.attention_backend_override=FLASH_ATTN
    +actor_rollout_ref.actor.engine.impl_cfg.recompute=full
    actor_rollout_ref.rollout.logprobs_mode="$mode"
    actor_rollout_ref.rollout.enable_prefix_caching=False
    "$vllm.worker_extension_cls=verl_mlite.worker.ExactWorkerExtension"
    "$vllm.attention_backend=FLASH_ATTN"
    "$vllm.compilation_config={mode:0,cudagraph_mode:FULL_DECODE_ONLY,custom_ops:[all]}"
    "$vllm.async_scheduling=False"
    "$vllm.enable_flashinfer_autotune=False"
  )
}

baseline_args() {
  local megatron=actor_rollout_ref.actor.megatron
  ARGS+=(
    model_engine=megatron
    "$megatron.param_offload=$OFFLOAD"
    "$megatron.optimizer_offload=$OFFLOAD"
    "$megatron.override_transformer_config.recompute_granularity=full"
    "$megatron.override_transformer_config.recompute_method=uniform"
    "$megatron.override_transformer_config.recompute_num_layers=1"
  )
}

# Ray workers do not inherit this shell where Ray runs already, so what they read comes with the job.
worker_environment() {
  local name
  for name in VLLM_BATCH_INVARIANT MLITE_EXACT VERL_FILE_LOGGER_PATH $FORWARD; do
    [[ -v "$name" ]] || continue
    [[ "${!name}" != *[\\\$]* ]] || die "$name: '${!name}' has a backslash or a dollar sign, which Hydra reads; forward another value"
    ARGS+=("+ray_kwargs.ray_init.runtime_env.env_vars.$name=$(quoted "${!name}")")
  done
}

# launch EXACT_FUNCTION BASELINE_FUNCTION ARGUMENTS...: each adds what its arm of this model needs.
launch() {
  local exact="$1" baseline="$2"
  shift 2
  [[ "${1:-}" != -h && "${1:-}" != --help ]] || { usage; exit 0; }
  local name engine=megatron
  [[ "$EXACT" == 0 ]] || engine=mlite
  [[ "$OUT" == *[!/]* ]] || die "OUT: is '$OUT'; name a folder"
  OUT="$(absolute "${OUT%/}")"
  MODEL_PATH="$(absolute "$MODEL_PATH")"
  for name in MODEL_PATH TRAIN_FILES VAL_FILES OUT; do
    [[ "${!name}" != *[\\\$]* ]] || die "$name: '${!name}' has a backslash or a dollar sign, which Hydra reads; use another path"
  done
  for name in PROMPT_TOKENS RESPONSE_TOKENS; do
    [[ "${!name}" =~ ^[1-9][0-9]*$ ]] || die "$name: '${!name}' is no number of tokens; give one above 0"
  done
  for name in "$@"; do
    [[ "$name" != model_engine=* || "$name" == "model_engine=$engine" ]] || die "model_engine: this arm's is $engine; leave it out, VLLM_BATCH_INVARIANT chooses the arm"
  done
  [[ "$OFFLOAD" == True || "$OFFLOAD" == False ]] || die "OFFLOAD: is '$OFFLOAD'; set it to True or False"
  [[ "$TEMPERATURE" =~ ^[0-9]+\.?[0-9]*$ ]] || die "TEMPERATURE: '$TEMPERATURE' is no decimal number; write it like 1.0"
  command -v "$PYTHON" >/dev/null || die "PYTHON: there is no '$PYTHON'; name the interpreter that has verl, vLLM and verl_mlite"
  [[ "${DRY_RUN:-0}" == 1 ]] ||
    "$PYTHON" -c 'import sys, importlib.util as i; sys.exit(any(i.find_spec(n) is None for n in ("verl", "verl_mlite")))' || die "PYTHON: '$PYTHON' lacks verl or verl_mlite; pip install both (docs/recipes.md), or name another"
  [[ "$EXACT" == 1 ]] || OUT="$OUT-baseline"
  export VLLM_BATCH_INVARIANT="$EXACT" MLITE_EXACT="$EXACT" VERL_FILE_LOGGER_PATH="$OUT/metrics.jsonl"
  ARGS=()
  if [[ "$EXACT" == 1 ]]; then exact_args; "$exact"; else baseline_args; "$baseline"; fi
  common_args
  worker_environment
  ARGS+=("$@")
  local command=(
    env "VLLM_BATCH_INVARIANT=$EXACT" "MLITE_EXACT=$EXACT" "VERL_FILE_LOGGER_PATH=$VERL_FILE_LOGGER_PATH"
    "$PYTHON" -m verl.trainer.main_ppo "${ARGS[@]}"
  )
  if [[ "${DRY_RUN:-0}" == 1 ]]; then
    printed "${command[@]}"
  elif [[ "${COMPOSE_ONLY:-0}" == 1 ]]; then
    "$PYTHON" -m verl_mlite.preflight --compose "${ARGS[@]}"
  else
    "$PYTHON" -m verl_mlite.preflight "${ARGS[@]}"
    mkdir -p "$OUT" 2>/dev/null && [[ -w "$OUT" ]] || die "OUT: '$OUT' is no folder that can be written to; name another"
    exec {lock}>"$OUT/.lock"
    flock -n "$lock" || die "OUT: a run is going on in '$OUT'; name another"
    keep_earlier
    printed "${command[@]}" >"$OUT/command.sh"
    # the lock is this shell's alone: Ray's processes outlive it. pipefail hands on the trainer's exit status
    "${command[@]}" 2>&1 {lock}>&- | tee "$OUT/train.log" {lock}>&-
  fi
}

# A run that starts in the folder of another leaves its command, configuration, log and metrics together, not under those of its own.
keep_earlier() {
  local name earlier
  for name in command.sh hydra train.log metrics.jsonl; do
    [[ -e "$OUT/$name" ]] || continue
    earlier="${earlier:-$OUT/earlier-$(date -r "$OUT/$name" +%Y%m%dT%H%M%S)}"
    mkdir -p "$earlier"
    mv "$OUT/$name" "$earlier/"
  done
}

# One argument a line, as a shell reads it.
printed() {
  printf '%q' "$1"
  shift
  printf ' \\\n  %q' "$@"
  printf '\n'
}
