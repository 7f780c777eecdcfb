"""`--layers N` of a checkpoint is a model of its first N layers, however config.json counts them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lite.acceptance.bundle import save_bundle
from lite.acceptance.first_layers import first_layers
from lite.model.nemotron_h.config import TINY_PATTERN
from lite.runtime.config import MegatronLiteConfig, RuntimeConfig
from lite.runtime.rollout.engine import Trajectory
from lite.runtime.runtime import Runtime
from tests.tiny import tiny_checkpoint
from tests.unit.acceptance.test_prove import SMALL, mlite

SPELLED = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
# as transformers 5 writes it: no number of layers, and a name for each
NAMED = {"hybrid_override_pattern": None, "num_hidden_layers": None, "layers_block_type": [SPELLED[letter] for letter in TINY_PATTERN]}


def edited(folder: Path, **changes: Any) -> Path:
    """Its config.json with other keys; None removes one."""
    held = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in held.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    ("family", "whole", "changes"),
    [("nemotron_h", 5, {}), ("nemotron_h", 5, NAMED), ("qwen3", 4, {"layer_types": ["full_attention"] * 4})],
    ids=["pattern", "names", "layer types"],
)
def test_whatever_lists_the_layers_is_cut_with_them(tmp_path, family: str, whole: int, changes: dict[str, Any]) -> None:
    folder = edited(tiny_checkpoint(family, tmp_path / "model", layers=whole), **changes)
    backend = MegatronLiteConfig(dtype="fp32", device="cpu", optimizer=None, override=first_layers(folder, 3))
    handle = Runtime(RuntimeConfig(hf_path=folder, backend_cfg=backend)).build_model()
    all_layers = Runtime(RuntimeConfig(hf_path=folder)).bundle().config
    assert all_layers.layers == whole and handle.bundle.config.mixers == all_layers.mixers[:3]
    assert handle.load_report.skipped and all("overridden" in why for why in handle.load_report.skipped.values())


def test_a_hybrids_first_layers_are_proved_and_replayed(tmp_path, monkeypatch) -> None:
    model = ("--model", tiny_checkpoint("nemotron_h", tmp_path / "model", torch.bfloat16, layers=None), "--layers", 3)
    out = tmp_path / "run"
    assert mlite(monkeypatch, "prove", *model, *SMALL, "--updates", 0, "--out", out) == 0
    assert json.loads((out / "receipt.json").read_text())["subject"]["geometry"]["hybrid_override_pattern"] == TINY_PATTERN[:3]
    assert mlite(monkeypatch, "replay", out / "rollout" / "theta0.safetensors", *model) == 0


@pytest.mark.parametrize(
    ("layers", "said"),
    [(6, "--layers: 6 of a model that has 5; give 1 to 5"), (0, "--layers"), (-1, "--layers")],
)
@pytest.mark.parametrize("command", ["prove", "replay"])
def test_more_layers_than_there_are_or_none_is_one_line(tmp_path, monkeypatch, capsys, command: str, layers: int, said: str) -> None:
    model = tiny_checkpoint("nemotron_h", tmp_path / "model", layers=None)
    save_bundle(tmp_path / "bundle", [Trajectory("p", 0, (1,), (2,), torch.zeros(1), 0)], [0.0], "fingerprint", 1.0)
    rest = ("--out", tmp_path / "run") if command == "prove" else (tmp_path / "bundle",)
    assert mlite(monkeypatch, command, "--model", model, "--layers", layers, *rest) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line and not (tmp_path / "run").exists()
