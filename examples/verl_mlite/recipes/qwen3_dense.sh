#!/usr/bin/env bash
# GRPO of a dense Qwen3 on one node, vLLM beside the trainer on every GPU. -h says how to call it.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

param MODEL_PATH "${HOME:-}/models/Qwen3-8B" "folder of the checkpoint"
common_params

exact() { :; }
baseline() { :; }

launch exact baseline "$@"
