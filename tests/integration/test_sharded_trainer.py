"""Two ranks that hold a half of the weights each agree with an engine that holds all of them, before and after updates."""

from pathlib import Path
from typing import Any

import pytest

from lite.acceptance.bundle import save_bundle
from lite.runtime.rollout.engine import Sampling
from tests.against_engine import assert_exact, follow_engine
from tests.checkpoints import engine, make_prompts
from tests.ranks import on_ranks
from tests.sharded import opened


def generate(folder: Path, bundle: Path) -> None:
    e = engine(folder)
    trajectories = e.generate(make_prompts([1, 5, 17, 40, 9, 30]), Sampling(max_tokens=8, n=2))
    save_bundle(bundle, trajectories, [0.0] * len(trajectories), e.fingerprint(), 1.0)


def ranked(scratch: Path, family: str, fsdp: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    return follow_engine(*opened("bf16", family, **fsdp), scratch, generate, updates=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "nemotron_h"])
def test_both_ranks_agree_with_the_engine_at_every_policy(family: str, tmp_path: Path) -> None:
    assert assert_exact(on_ranks(2, ranked, tmp_path, family, {"recompute": True})) > 200
