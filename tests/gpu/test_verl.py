"""On a Hopper GPU: verl's own main_ppo, its own vLLM rollout, and this trainer agree at every update, through sleep, wake and sync.

    python -m pytest tests/gpu/test_verl.py -m gpu        # with verl 0.9.1, vLLM 0.26 and the wheels of this package and of verl_mlite

tests/verl is the same on a CPU with the embedded engine. `make demo` (or examples/demo/prepare.py) makes the checkpoint.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or any(importlib.util.find_spec(name) is None for name in ("vllm", "verl", "verl_mlite")),
        reason="needs a Hopper GPU, vLLM 0.26, verl 0.9.1 and verl_mlite: run `python -m pytest tests/gpu/test_verl.py -m gpu` there",
    ),
]
ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / ".cache" / "demo"
RECIPES = ROOT / "examples" / "verl_mlite" / "recipes"
STEPS, TIMEOUT = 3, 500  # seconds: most of them go into the imports of verl's processes, one after the other
PHASES = {"rollout": "gen", "old logprobs": "old_log_prob", "update": "update_actor", "sync": "update_weights", "step": "step"}
REWARD = '''"""The share of vowels in an answer: it varies within a group, also where a random model strings words together."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(c in "aeiou" for c in solution_str) / max(len(solution_str), 1)
'''
CHOICES = {"TRITON_ATTN": ["actor_rollout_ref.actor.engine.attention_backend_override=TRITON_ATTN",
                           "++actor_rollout_ref.rollout.engine_kwargs.vllm.attention_backend=TRITON_ATTN"], "FLASH_ATTN": []}  # fmt: skip


def write_prompts(path: Path) -> None:
    import pandas

    rows = []
    for i, line in enumerate((DEMO / "prompts.jsonl").read_text().splitlines()):
        entry = json.loads(line)["reasoning_gym"]["entry"]
        rows.append({
            "data_source": "chain_sum", "prompt": [{"role": "user", "content": entry["question"]}], "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])}, "extra_info": {"index": i, "split": "train"},
        })  # fmt: skip
    pandas.DataFrame(rows).to_parquet(path)


def launch(folder: Path, model: Path, recipe: str, attention: str, offload: bool) -> list[dict[str, Any]]:
    """-> the metrics of each step."""
    write_prompts(folder / "prompts.parquet")
    (folder / "reward.py").write_text(REWARD)
    settings = {
        "MODEL_PATH": model, "TRAIN_FILES": folder / "prompts.parquet", "VAL_FILES": folder / "prompts.parquet", "OUT": folder / "out",
        "N_GPUS": 1, "STEPS": STEPS, "TRAIN_BATCH": 8, "SAMPLES": 4, "PROMPT_TOKENS": 256, "RESPONSE_TOKENS": 96, "OVERLONG_TOKENS": 16,
        "LR": "1e-5", "GPU_MEMORY": 0.35, "OFFLOAD": offload, "PYTHON": sys.executable, "LOGGER": "[console,file]",
        "FORWARD": "PYTHONPATH HF_HUB_OFFLINE VLLM_NO_USAGE_STATS",
    }  # fmt: skip
    env = os.environ | {name: str(value) for name, value in settings.items()} | {"VLLM_BATCH_INVARIANT": "1"}
    subprocess.run(["bash", str(RECIPES / recipe), *always(folder), *CHOICES[attention]], env=env, check=True, timeout=TIMEOUT, cwd=folder)
    assert (folder / "out" / "hydra" / ".hydra" / "config.yaml").exists()
    return [json.loads(line)["data"] for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def launch_baseline(folder: Path, model: Path) -> list[dict[str, Any]]:
    """The same steps with vLLM as installed and verl's own FSDP2 engine (Megatron-Bridge is not there), its differing bytes counted."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    overrides = [
        "algorithm.adv_estimator=grpo", f"data.train_files={folder / 'prompts.parquet'}", f"data.val_files={folder / 'prompts.parquet'}",
        "data.train_batch_size=8", "data.max_prompt_length=256", "data.max_response_length=96",
        f"actor_rollout_ref.model.path={model}", "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.use_remove_padding=False", f"{actor}.strategy=fsdp2", f"{actor}.optim.lr=1e-5",
        f"{actor}.ppo_mini_batch_size=8", f"{actor}.use_dynamic_bsz=True", f"{actor}.ppo_max_token_len_per_gpu=4096",
        f"{actor}.fsdp_config.use_torch_compile=False", f"{rollout}.name=vllm", f"{rollout}.n=4", f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization=0.35", f"{rollout}.calculate_log_probs=True",
        "trainer.use_v1=False", "trainer.logger=[console,file]", "trainer.n_gpus_per_node=1", "trainer.nnodes=1",
        f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=False", f"trainer.default_local_dir={folder / 'baseline'}",
        *always(folder),
    ]  # fmt: skip
    forwarded = {
        "VERL_FILE_LOGGER_PATH": str(folder / "baseline.jsonl"), "VERL_USE_EXTERNAL_MODULES": "verl_mlite.counted_fsdp2",
        "VLLM_BATCH_INVARIANT": "0",
    }  # fmt: skip
    overrides += [f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}='{value}'" for name, value in forwarded.items()]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    subprocess.run(command, env=os.environ | forwarded, check=True, timeout=TIMEOUT, cwd=folder)
    return [json.loads(line)["data"] for line in (folder / "baseline.jsonl").read_text().splitlines()]


def always(folder: Path) -> list[str]:
    """Overrides of both: the reward, few processes, nothing saved."""
    return [
        f"reward.custom_reward_function.path={folder / 'reward.py'}", "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=1", "actor_rollout_ref.rollout.agent.num_workers=1", "data.dataloader_num_workers=0",
        "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.resume_mode=disable",
    ]  # fmt: skip


def smollm2(_: Path) -> Path:
    return DEMO / "SmolLM2-135M-Instruct"


def qwen3(folder: Path) -> Path:
    """Qwen3-8B's layer geometry, 4 layers."""
    return proxy(folder / "model", "qwen3", 4)


def nemotron_h(folder: Path) -> Path:
    """Nemotron-3-Nano's first 6 layers: three of Mamba-2, two of experts, attention last."""
    return proxy(folder / "model", "nemotron_h", 6)


def proxy(folder: Path, family: str, layers: int) -> Path:
    """Random weights at real geometry, with a tokenizer that knows fewer words than the model has."""
    import shutil

    from lite.acceptance.proxy import write_proxy

    write_proxy(family, folder, geometry="real", layers=layers, dtype=torch.bfloat16, seed=0)
    for file in smollm2(folder).iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (smollm2, ("qwen3_dense.sh", "TRITON_ATTN", True)),
        (qwen3, ("qwen3_dense.sh", "FLASH_ATTN", False)),
        (nemotron_h, ("nemotron_h.sh", "FLASH_ATTN", False)),
    ],
    ids=["smollm2", "qwen3", "nemotron_h"],
)
def test_both_counters_are_zero_after_every_update(model, settings, tmp_path: Path, record: dict[str, Any]) -> None:
    steps = [step for step in launch(tmp_path, model(tmp_path), *settings) if "actor/grad_norm" in step]
    assert len(steps) == STEPS
    for step in steps:
        assert step["training/rollout_probs_diff_valid"] == 1 and step["training/rollout_probs_diff_max"] == 0.0
        for path in ("old", "actor"):
            assert step[f"actor/mlite/{path}_mismatch"] == 0 < step[f"actor/mlite/{path}_tokens"]
        assert step["actor/mlite/groups"] == 8 and step["actor/mlite/collapsed_groups"] == 0 and step["actor/grad_norm"] > 0
        assert step["actor/mlite/rollout_fingerprint"] == step["actor/mlite/synced_fingerprint"] and step["actor/mlite/handshake"] == 1
        assert step["actor/mlite/deployed_bytes_changed"] > 0
    assert len({step["actor/mlite/rollout_fingerprint"] for step in steps}) == STEPS  # each batch was sampled from another policy
    said = (tmp_path / "out" / "train.log").read_text().count("vLLM holds policy version")
    record[f"{model.__name__}: syncs in train.log"] = said
    record["transformers"] = importlib.metadata.version("transformers")  # verl takes no newer one than 5.10
    record[f"{model.__name__}: tokens"] = [step["actor/mlite/old_tokens"] for step in steps]
    record[f"{model.__name__}: seconds"] = {
        name: [round(step[f"timing_s/{key}"], 2) for step in steps if f"timing_s/{key}" in step] for name, key in PHASES.items()
    }


def test_the_regular_baseline_differs_at_every_update(tmp_path: Path, record: dict[str, Any]) -> None:
    """The counts can count: verl's own trainer beside vLLM as installed."""
    write_prompts(tmp_path / "prompts.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    steps = [step for step in launch_baseline(tmp_path, smollm2(tmp_path)) if "actor/grad_norm" in step]
    assert len(steps) == STEPS and all(step["actor/mlite/old_mismatch"] > 0 for step in steps)
    record["baseline (verl's fsdp2 engine, smollm2): mismatch of tokens"] = [
        [step["actor/mlite/old_mismatch"], step["actor/mlite/old_tokens"]] for step in steps
    ]
    record["baseline: seconds of a step"] = [round(step["timing_s/step"], 2) for step in steps]
