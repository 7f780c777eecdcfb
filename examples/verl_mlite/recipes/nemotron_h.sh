#!/usr/bin/env bash
# GRPO of Nemotron-H (Mamba-2, attention and experts) on one node, vLLM beside the trainer on every GPU; -h says how to
# call it.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

param MODEL_PATH "${HOME:-}/models/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16" "folder of the checkpoint"
param EXPERT_PARALLEL 8 "of the baseline's trainer; it must divide N_GPUS"
common_params

exact() {
  ARGS+=(+actor_rollout_ref.rollout.engine_kwargs.vllm.mamba_ssm_cache_dtype=float32) # the state at a chunk's boundary, as the scan makes it
}

# Routes are replayed (R3), the router's bias stays what inference has, and rows are padded: verl 0.9.1 packs them without the boundaries
# that Megatron's Mamba layers need.
baseline() {
  ARGS+=(
    actor_rollout_ref.actor.megatron.expert_model_parallel_size="$EXPERT_PARALLEL"
    actor_rollout_ref.actor.megatron.router_replay.mode=R3
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_bias_update_rate=0
    actor_rollout_ref.model.use_remove_padding=False
    actor_rollout_ref.actor.megatron.use_remove_padding=False
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True
  )
}

launch exact baseline "$@"
