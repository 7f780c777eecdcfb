"""docs/recipes.md says what the recipes do: its table of differences against the composed configuration."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from verl_mlite.preflight_job import composed

from tests.recipe_commands import overrides

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
ROLLOUT, VLLM = "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.engine_kwargs.vllm"
# how the page names an item, and the keys of verl's configuration whose values its column `here` shows
ITEMS = {
    "`engine.impl`": ["actor_rollout_ref.actor.engine.impl"],
    "`rollout.full_determinism`": [f"{ROLLOUT}.full_determinism"],
    "`rollout.logprobs_mode`": [f"{ROLLOUT}.logprobs_mode"],
    "`rollout.enable_prefix_caching`": [f"{ROLLOUT}.enable_prefix_caching"],
    "`attention_backend`, and the trainer's": [f"{VLLM}.attention_backend", "actor_rollout_ref.actor.engine.attention_backend_override"],
    "`compilation_config`": [f"{VLLM}.compilation_config.mode", f"{VLLM}.compilation_config.custom_ops.0"],
    "`async_scheduling`, `enable_flashinfer_autotune`": [f"{VLLM}.async_scheduling", f"{VLLM}.enable_flashinfer_autotune"],
    "`mamba_ssm_cache_dtype` (hybrid)": [f"{VLLM}.mamba_ssm_cache_dtype"],
    "`model.use_fused_kernels`": ["actor_rollout_ref.model.use_fused_kernels"],
    "`data.seed`": ["data.seed"],
    "`max_num_batched_tokens`, `gpu_memory_utilization`": [f"{ROLLOUT}.max_num_batched_tokens", f"{ROLLOUT}.gpu_memory_utilization"],
}


@pytest.fixture(scope="module")
def here() -> dict[str, str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.count("|") == 5]
    return {row[0]: row[2] for row in rows}


def test_the_pages_table_shows_what_a_recipe_sets(here: dict[str, str]) -> None:
    config = composed(overrides("nemotron_h"))  # which has every item
    for item, keys in ITEMS.items():
        shown = here[item].replace("`", "").replace("[", "").replace("]", "")
        for key in keys:
            parent, _, last = key.rpartition(".")
            value = OmegaConf.select(config, parent)[int(last)] if last.isdigit() else OmegaConf.select(config, key)
            assert str(value) in shown.replace(",", " ").replace(":", " ").split(), (item, key, value)


def test_what_is_named_as_a_parameter_is_one() -> None:
    scripts = "".join(path.read_text() for path in (Path(__file__).parents[2] / "examples" / "verl_mlite" / "recipes").glob("*.sh"))
    for name in ("TRAIN_BATCH", "STEPS", "OFFLOAD", "FORWARD", "PYTHON", "OUT"):
        assert f"`{name}" in PAGE and f"param {name} " in scripts
