"""A kept rollout is scored again: the same bytes under any packing and budget, what differs by UID, and nothing from other weights."""

import json
from pathlib import Path

import pytest
import torch

from lite.acceptance.bundle import load_bundle, save_bundle
from lite.acceptance.proxy import write_proxy
from lite.primitive.compare import bits
from lite.runtime.batch import PackedBatch
from lite.runtime.config import MegatronLiteConfig, OptimizerConfig, RuntimeConfig
from lite.runtime.rollout.embedded import EmbeddedEngine
from lite.runtime.rollout.engine import Prompt, Sampling
from lite.runtime.runtime import Runtime
from tests.unit.acceptance.test_prove import mlite


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, a bundle of its policy 0, one of its policy 1, and a trainer's checkpoint of policy 1."""
    root = tmp_path_factory.mktemp("replay")
    model = root / "model"
    write_proxy("qwen3", model, geometry="tiny", layers=2, dtype=torch.bfloat16, seed=0)
    backend = MegatronLiteConfig(device="cpu", optimizer=OptimizerConfig(lr=1e-3))
    runtime = Runtime(RuntimeConfig(hf_path=str(model), backend_cfg=backend))
    trainer = runtime.build_model()
    engine = EmbeddedEngine(Runtime(RuntimeConfig(hf_path=str(model), backend_cfg=backend)).bundle(), model, max_step_tokens=40)
    prompts = [Prompt(f"p{n}", tuple(range(3, 3 + n))) for n in (1, 5, 20, 33)]
    for policy in (0, 1):
        if policy:
            batch = PackedBatch.from_samples([([1, 2, 3], [4, 5, 6, 7])])
            runtime.forward_backward(trainer, batch, lambda scores, batch, step: (-scores.logprob[batch.loss_mask].mean(), {}))
            runtime.optimizer_step(trainer)
            engine.update_weights(runtime.export_weights(trainer), 1)
            runtime.save_checkpoint(trainer, root / "checkpoints")
        trajectories = engine.generate(prompts, Sampling(temperature=0.8, max_tokens=12, n=2, seed=4))
        save_bundle(root / f"theta{policy}.safetensors", trajectories, [0.0] * 8, engine.fingerprint(), 0.8)
    return {"model": model} | {name: root / f"{name}.safetensors" for name in ("theta0", "theta1")} | {"checkpoints": root / "checkpoints"}


@pytest.mark.parametrize(("budget", "seed"), [(1, 0), (64, 3), (100_000, 1)])
def test_any_packing_and_budget_give_the_bundles_bytes(run, monkeypatch, tmp_path, budget: int, seed: int) -> None:
    """verl#6280: one batch under other micro-batch budgets."""
    out = tmp_path / "result.json"
    choice = ("--token-budget", budget, "--seed", seed, "--json", out)
    assert mlite(monkeypatch, "replay", run["theta0"], "--model", run["model"], *choice) == 0
    result = json.loads(out.read_text())
    assert result["status"] == "pass" and result["differing"] == []
    assert result["score"]["valid_tokens"] == result["actor"]["valid_tokens"] == 8 * 12
    assert result["score"]["requires_grad"] is False and result["actor"]["requires_grad"] is True
    assert (result["packed_rows"] == 1) == (budget == 100_000)


def test_a_run_of_fewer_layers_is_replayed_with_as_many(run, monkeypatch, tmp_path, capsys) -> None:
    out, model = tmp_path / "run", ("--model", run["model"])
    small = ("--groups", 2, "--samples", 2, "--response-tokens", 4, "--updates", 0)
    assert mlite(monkeypatch, "prove", *model, "--layers", 1, *small, "--out", out) == 0
    assert mlite(monkeypatch, "replay", out / "rollout" / "theta0.safetensors", *model, "--layers", 1) == 0
    capsys.readouterr()
    assert mlite(monkeypatch, "replay", run["theta0"], *model, "--layers", 0) == 2 and "--layers" in capsys.readouterr().err
    assert mlite(monkeypatch, "replay", out / "rollout" / "theta0.safetensors", *model) == 2
    assert "(policy 0, bf16) holds other weights than policy 0 had: give its checkpoint and --dtype" in capsys.readouterr().out


def test_a_differing_bit_is_named_by_uid(run, monkeypatch, tmp_path, capsys) -> None:
    trajectories, _ = load_bundle(run["theta0"])
    bits(trajectories[5].logprobs)[7] ^= 1
    altered = tmp_path / "altered.safetensors"
    fingerprint = Runtime(RuntimeConfig(hf_path=str(run["model"]))).build_model().weights.fingerprint()
    save_bundle(altered, trajectories, [0.0] * 8, fingerprint, 0.8)
    assert mlite(monkeypatch, "replay", altered, "--model", run["model"]) == 1
    assert f"uid {trajectories[5].uid}, sample {trajectories[5].sample}: 1 tokens differ, the first is 7" in capsys.readouterr().out


def test_a_later_policy_needs_its_trainers_checkpoint(run, monkeypatch, capsys) -> None:
    assert mlite(monkeypatch, "replay", run["theta1"], "--model", run["model"]) == 2
    assert "holds other weights than policy 1 had" in capsys.readouterr().out
    assert mlite(monkeypatch, "replay", run["theta1"], "--model", run["model"], "--checkpoint", run["checkpoints"]) == 0
    assert mlite(monkeypatch, "replay", run["theta0"], "--model", run["model"], "--checkpoint", run["checkpoints"]) == 2


def test_another_temperature_would_be_seen(run, monkeypatch, tmp_path) -> None:
    trajectories, _ = load_bundle(run["theta0"])
    fingerprint = Runtime(RuntimeConfig(hf_path=str(run["model"]))).build_model().weights.fingerprint()
    save_bundle(tmp_path / "warm.safetensors", trajectories, [0.0] * 8, fingerprint, 1.0)
    assert mlite(monkeypatch, "replay", tmp_path / "warm.safetensors", "--model", run["model"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kernels", "triton"), "--kernels: 'triton' is not supported"),
        (("--token-budget", 0), "--token-budget: 0 is not positive"),
        (("--checkpoint", "nowhere"), "--checkpoint: nowhere holds no checkpoint"),
    ],
)
def test_bad_choices_are_refused_in_one_line(run, monkeypatch, capsys, arguments, message: str) -> None:
    assert mlite(monkeypatch, "replay", run["theta0"], "--model", run["model"], *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_runs_folder_is_no_bundle(run, monkeypatch, capsys) -> None:
    assert mlite(monkeypatch, "replay", run["theta0"].parent, "--model", run["model"]) == 2
    assert "is a folder; name one of its bundles" in capsys.readouterr().err
