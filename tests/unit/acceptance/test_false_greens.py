"""Runs in which wrong code would pass as well are not passed."""

import json

import pytest
import torch

from lite.acceptance.proxy import write_proxy
from lite.acceptance.scoring import pack_rollout
from lite.primitive.ckpt.safetensors_files import read_json, read_tensors, write_checkpoint
from lite.runtime.rollout.engine import Trajectory
from tests.unit.acceptance.test_prove import SMALL, mlite


def damped(folder, suffix: str) -> None:
    """A checkpoint whose matrices of that name are scaled until they move nothing."""
    write_proxy("llama", folder, geometry="tiny", layers=2, dtype=torch.bfloat16, seed=0)
    tensors = {name: t * 1e-7 if name.endswith(suffix) else t for name, t in read_tensors(folder)}
    write_checkpoint(folder, read_json(folder / "config.json"), tensors.items())


def receipt_of(out):
    return json.loads((out / "receipt.json").read_text())


@pytest.mark.slow
def test_attention_that_moves_nothing_proves_nothing_also_for_a_given_checkpoint(tmp_path, monkeypatch):
    damped(tmp_path / "model", "o_proj.weight")
    args = ["--model", tmp_path / "model", *SMALL, "--updates", 0, "--out", tmp_path / "run"]
    assert mlite(monkeypatch, "prove", *args) == 2
    receipt = receipt_of(tmp_path / "run")
    assert receipt["control"]["mismatch"] == 0 and "vacuous" in receipt["reason"]
    assert receipt["policies"][0]["score"]["mismatch"] == 0, "the comparison itself passed, and proved nothing"


def test_an_mlp_that_moves_nothing_is_measured_in_a_proxy(tmp_path, monkeypatch):
    from lite.acceptance import sides

    monkeypatch.setattr(sides, "write_proxy", lambda name, folder, **_: damped(folder, "down_proj.weight"))
    assert mlite(monkeypatch, "prove", "--proxy", "llama", *SMALL, "--updates", 0, "--out", tmp_path / "run") == 2
    assert max(receipt_of(tmp_path / "run")["subject"]["mlp_to_residual_rms"]) < 0.02


def test_the_control_sees_wrong_positions_in_a_healthy_run(tmp_path, monkeypatch):
    assert mlite(monkeypatch, "prove", "--proxy", "llama", *SMALL, "--updates", 0, "--out", tmp_path / "run") == 0
    receipt = receipt_of(tmp_path / "run")
    assert receipt["control"]["mismatch"] > receipt["policies"][0]["score"]["valid_tokens"] // 2


@pytest.mark.slow
def test_a_mismatch_that_was_found_is_not_lost_in_a_later_error(tmp_path, monkeypatch):
    """A sync that fails after theta0 must not turn "fail" into "inconclusive"."""
    from lite.errors import InputError
    from lite.runtime.rollout.embedded import EmbeddedEngine

    def broken(self, tensors, version):
        raise InputError("weight sync", "broke", "mend it")

    monkeypatch.setattr(EmbeddedEngine, "update_weights", broken)
    assert mlite(monkeypatch, "prove", "--proxy", "llama", *SMALL, "--out", tmp_path / "a") == 2
    assert "weight sync" in receipt_of(tmp_path / "a")["reason"] and len(receipt_of(tmp_path / "a")["policies"]) == 1
    assert mlite(monkeypatch, "prove", "--proxy", "llama", *SMALL, "--plant", "one-ulp", "--out", tmp_path / "b") == 1


def test_groups_that_collapse_at_the_last_policy_are_no_pass(tmp_path, monkeypatch):
    args = ["--proxy", "llama", *SMALL, "--updates", 0, "--temperature", "0.0001", "--out", tmp_path / "run"]
    assert mlite(monkeypatch, "prove", *args) == 2
    assert "distinct" in receipt_of(tmp_path / "run")["reason"]


@pytest.mark.parametrize("lengths", [[5000, 3, 4, 2500, 2500, 6], [1000] * 5 + [1200] * 5, [2100, 2101]])
def test_rows_hold_unequal_lengths_whatever_the_lengths(lengths):
    rows = [Trajectory(f"u{i}", 0, tuple(range(n - 1)), (1,), torch.zeros(1), 0) for i, n in enumerate(lengths)]
    packed = pack_rollout(rows, 1.0, 0, None)
    assert sorted(i for members in packed.members for i in members) == list(range(len(lengths)))
    assert any(len(set(batch.seq_lens)) > 1 for batch in packed.batches)


def test_compare_refuses_a_bundle_that_holds_a_response_twice(tmp_path, monkeypatch, capsys):
    from dataclasses import replace

    from tests.unit.acceptance.test_compare import trajectories, write

    path = write(tmp_path / "a.safetensors", [replace(t, sample=0) for t in trajectories()])
    assert mlite(monkeypatch, "compare", path, path) == 2
    assert "twice" in capsys.readouterr().err


def test_compare_tells_temperatures_apart(tmp_path, monkeypatch):
    from lite.acceptance.bundle import save_bundle
    from tests.unit.acceptance.test_compare import trajectories

    for name, heat in (("a", 0.6), ("b", 1.0)):
        save_bundle(tmp_path / name, trajectories(), [0.5] * 6, "fingerprint", heat)
    assert mlite(monkeypatch, "compare", tmp_path / "a", tmp_path / "b") == 1
