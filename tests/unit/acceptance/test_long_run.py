"""Long runs: resumed after a kill with nothing changed, looked at while they run, stopped at the first mismatch with its policy kept."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lite.acceptance import proof
from lite.acceptance.grpo import reward_trend
from lite.acceptance.plots import draw_plots
from tests.unit.acceptance.test_prove import mlite

ROOT = Path(__file__).parents[3]
RUN = ("prove", "--proxy", "llama", "--groups", "3", "--samples", "3", "--response-tokens", "6", "--prompt-tokens", "1:20", "--lr", "1e-3")


def policies(out: Path) -> list[dict]:
    return json.loads((out / "receipt.json").read_text())["policies"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five updates without a break."""
    out = tmp_path_factory.mktemp("straight") / "run"
    with pytest.MonkeyPatch.context() as patch:
        assert mlite(patch, *RUN, "--updates", 5, "--out", out) == 0
    return out


@pytest.mark.slow
def test_a_run_resumed_after_a_break_says_what_the_unbroken_one_says(straight, tmp_path, monkeypatch) -> None:
    out = tmp_path / "run"
    assert mlite(monkeypatch, *RUN, "--updates", 3, "--save-every", 2, "--out", out) == 0
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000002"]
    assert mlite(monkeypatch, *RUN, "--updates", 5, "--save-every", 2, "--out", out, "--resume") == 0
    receipt, whole = json.loads((out / "receipt.json").read_text()), json.loads((straight / "receipt.json").read_text())
    assert receipt["policies"] == whole["policies"], "rollouts, fingerprints, rewards, both paths"
    assert receipt["updates"] == whole["updates"] and receipt["reward"] == whole["reward"]
    assert receipt["lengths"]["prompt"] == whole["lengths"]["prompt"]
    assert mlite(monkeypatch, "compare", out, straight) == 0


@pytest.mark.slow
def test_a_killed_run_goes_on(straight, tmp_path, monkeypatch) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "lite.cli", *RUN, "--updates", "5", "--save-every", "1", "--out", str(out)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # this process has one thread, too, and goes on as the same run
    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
    while not list((out / "checkpoints").glob("step-00000002*")):
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    rolling = json.loads((out / "receipt.json").read_text())
    assert rolling["status"] == "inconclusive" and "of 6 policies so far" in rolling["reason"] and "closure" not in rolling
    assert mlite(monkeypatch, *RUN, "--updates", 5, "--save-every", 1, "--out", out, "--resume") == 0
    assert policies(out) == policies(straight)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two updates with a checkpoint after each."""
    out = tmp_path_factory.mktemp("begun") / "run"
    with pytest.MonkeyPatch.context() as patch:
        assert mlite(patch, *RUN, "--updates", 2, "--save-every", 1, "--out", out) == 0
    return out


def edited(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def other_source(facts: dict) -> None:
    facts["facts"]["closure"]["lite/acceptance/proof.py"] = "0" * 64


def other_machine(facts: dict) -> None:
    facts["facts"]["environment"]["torch"] = "2.0"


def nothing(facts: dict) -> None:
    """The checkpoint stays as it is."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "state", "message"),
    [
        (("--seed", 1), nothing, "--resume: the run had seed = 0, not 1"),
        (("--response-tokens", 7), nothing, "--resume: the run had response_tokens = 6, not 7"),
        (("--updates", 1), nothing, "holds 3 policies, more than --updates 1 asks for"),
        ((), lambda facts: facts.update(version="x"), "is no checkpoint of a proof"),
        ((), lambda facts: facts.pop("facts"), "is no checkpoint of a proof"),
        ((), lambda facts: facts["facts"].update(weights_sha256="0" * 64), "holds other weights than the run began with"),
        ((), other_source, "lite/acceptance/proof.py has changed since step-00000002"),
        ((), other_machine, "the run had torch = 2.0, not"),
        ((), lambda facts: facts["steps"].clear(), "no steps of the optimizer"),
        ((), lambda facts: facts.update(fingerprint="0" * 64), "the weights are not those that were saved"),
    ],
    ids=["seed", "response tokens", "fewer updates", "version", "no facts", "model", "sources", "torch", "steps", "weights"],
)
def test_a_refused_resumption_leaves_the_run_as_it_was(begun, tmp_path, monkeypatch, capsys, flags, state, message: str) -> None:
    out = Path(shutil.copytree(begun, tmp_path / "run"))
    edited(out / "checkpoints" / "step-00000002" / "state.json", state)
    before = {path: path.read_bytes() for path in out.rglob("*.json")}
    assert mlite(monkeypatch, *RUN, "--updates", 3, "--save-every", 1, *flags, "--out", out, "--resume") == 2
    assert message in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*.json")} == before and (out / "rollout" / "theta2.safetensors").exists()


def test_a_failed_run_is_not_taken_up_again(begun, tmp_path, monkeypatch, capsys) -> None:
    """A fault that comes once is what is looked for; the policies after it would pass."""
    out = Path(shutil.copytree(begun, tmp_path / "run"))
    edited(out / "receipt.json", lambda receipt: receipt.update(status="fail", reason="theta2 score: 1 of 54 tokens differ"))
    assert mlite(monkeypatch, *RUN, "--updates", 3, "--save-every", 1, "--out", out, "--resume") == 2
    assert "failed, and going on would hide it (theta2 score: 1 of 54 tokens differ)" in capsys.readouterr().err
    edited(out / "receipt.json", lambda receipt: receipt.update(status="inconclusive"))
    (out / "failing").mkdir()  # killed while it kept the policy
    assert mlite(monkeypatch, *RUN, "--updates", 3, "--save-every", 1, "--out", out, "--resume") == 2


def test_other_flags_are_refused_before_the_first_checkpoint_too(tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "run"
    assert mlite(monkeypatch, *RUN, "--updates", 0, "--out", out) == 0
    assert mlite(monkeypatch, *RUN, "--updates", 1, "--lr", "1e-4", "--out", out, "--resume") == 2
    assert "--resume: the run had lr = 0.001, not 0.0001" in capsys.readouterr().err


@pytest.mark.slow
def test_rollouts_past_the_checkpoint_are_cleared(begun, tmp_path, monkeypatch) -> None:
    """A killed run may have come further than the one that goes on is asked to."""
    out = Path(shutil.copytree(begun, tmp_path / "run"))
    shutil.copy(out / "rollout" / "theta2.safetensors", out / "rollout" / "theta7.safetensors")
    assert mlite(monkeypatch, *RUN, "--updates", 2, "--save-every", 1, "--out", out, "--resume") == 0
    assert sorted(path.stem for path in (out / "rollout").iterdir()) == ["theta0", "theta1", "theta2"]
    assert policies(out) == policies(begun)


@pytest.mark.slow
def test_a_run_whose_latest_checkpoint_is_damaged_goes_on_from_the_one_before(begun, tmp_path, monkeypatch, capsys) -> None:
    out = Path(shutil.copytree(begun, tmp_path / "run"))
    (out / "checkpoints" / "step-00000007").mkdir()  # somebody's: it holds no state
    latest = out / "checkpoints" / "step-00000002"
    shard = next(latest.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    go_on = (*RUN, "--updates", 2, "--save-every", 1, "--out", out, "--resume")
    assert mlite(monkeypatch, *go_on) == 2
    assert "move it away or delete it to go on from step-00000001" in capsys.readouterr().err
    shutil.rmtree(latest)
    assert mlite(monkeypatch, *go_on) == 0
    assert "resumed at theta1" in capsys.readouterr().err
    receipt, whole = json.loads((out / "receipt.json").read_text()), json.loads((begun / "receipt.json").read_text())
    assert receipt["policies"] == whole["policies"] and receipt["updates"] == whole["updates"]
    assert mlite(monkeypatch, "compare", out, begun) == 0
    assert sorted(path.name for path in latest.parent.iterdir()) == ["step-00000001", "step-00000002", "step-00000007"]


@pytest.mark.slow
@pytest.mark.parametrize("deleted", [(0,), (0, 1, 2)], ids=["theta0", "all before the checkpoint"])
def test_rollouts_that_were_deleted_to_save_space_are_named_and_the_rest_is_drawn(begun, tmp_path, monkeypatch, deleted) -> None:
    out = Path(shutil.copytree(begun, tmp_path / "run"))
    shutil.rmtree(out / "plots")
    for policy in deleted:
        (out / "rollout" / f"theta{policy}.safetensors").unlink()
    assert mlite(monkeypatch, *RUN, "--updates", 3, "--save-every", 1, "--out", out, "--resume") == 0
    assert [path.name for path in sorted((out / "plots").iterdir())] == ["logprobs.png", "training.png"]
    report = (out / "report.md").read_text()
    assert ("since their rollout or their scores are gone: theta0." if deleted == (0,) else "are gone: theta0, theta1.") in report


def test_where_no_rollout_is_left_training_is_drawn_alone(begun, tmp_path) -> None:
    out = Path(shutil.copytree(begun, tmp_path / "run"))
    receipt = json.loads((out / "receipt.json").read_text())
    receipt["policies"][0]["score"]["first_mismatch"] = {"uid": "r0-0", "sample": 0, "position": 0}
    assert draw_plots(out, receipt) == ["plots/logprobs.png", "plots/training.png", "plots/first_mismatch.png"]
    shutil.rmtree(out / "scores")
    assert draw_plots(out, receipt) == ["plots/training.png"]


@pytest.mark.parametrize(("name", "left"), [("run.json", 40), ("receipt.json", 40), ("receipt.json", None)])
def test_a_run_whose_own_files_are_damaged_is_not_to_be_downloaded_again(begun, tmp_path, monkeypatch, capsys, name: str, left) -> None:
    out = Path(shutil.copytree(begun, tmp_path / "run"))
    text = (out / name).read_text()
    (out / name).unlink()
    if left:
        (out / name).write_text(text[:left])
    assert mlite(monkeypatch, *RUN, "--updates", 3, "--save-every", 1, "--out", out, "--resume") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert str(out / name) in line and line.endswith("; start a run in another folder")


def test_there_must_be_a_run_to_resume(tmp_path, monkeypatch, capsys) -> None:
    assert mlite(monkeypatch, *RUN, "--out", tmp_path / "none", "--resume") == 2
    assert "holds no run" in capsys.readouterr().err and not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_run_broken_off_before_its_first_checkpoint_starts_again(straight, tmp_path, monkeypatch) -> None:
    out = tmp_path / "run"
    assert mlite(monkeypatch, *RUN, "--updates", 0, "--out", out) == 0
    assert mlite(monkeypatch, *RUN, "--updates", 5, "--out", out, "--resume") == 0
    assert policies(out) == policies(straight)


def test_the_first_mismatch_stops_the_run_and_can_be_replayed(tmp_path, monkeypatch, capsys) -> None:
    """The fault: from theta2 on the rollout's logprobs are an ulp off, as an engine that drifts would give them."""
    out, sound = tmp_path / "run", proof.save_bundle

    def drifting(path, trajectories, *rest):
        if path.stem == "theta2":
            trajectories[4].logprobs[3] = torch.nextafter(trajectories[4].logprobs[3], torch.tensor(0.0))
        return sound(path, trajectories, *rest)

    monkeypatch.setattr(proof, "save_bundle", drifting)
    assert mlite(monkeypatch, *RUN, "--updates", 5, "--out", out) == 1
    receipt = json.loads((out / "receipt.json").read_text())
    assert [p["score"]["mismatch"] for p in receipt["policies"]] == [0, 0, 1], "nothing after the first mismatch"
    assert receipt["status"] == "fail" and "theta2 score: 1 of" in receipt["reason"]
    capsys.readouterr()
    assert mlite(monkeypatch, "replay", out / "rollout" / "theta2.safetensors", "--model", out / "failing") == 1
    assert "1 tokens differ, the first is 3" in capsys.readouterr().out
    assert mlite(monkeypatch, "replay", out / "rollout" / "theta1.safetensors", "--model", out / "failing") == 2, "another policy's weights"


@pytest.mark.slow
def test_a_planted_run_goes_to_its_last_policy(tmp_path, monkeypatch) -> None:
    out = tmp_path / "run"
    assert mlite(monkeypatch, *RUN, "--updates", 2, "--plant", "one-ulp", "--out", out) == 1
    assert [p["score"]["mismatch"] for p in policies(out)] == [1, 1, 1] and not (out / "failing").exists()


def test_the_reward_trend_counts_in_standard_errors() -> None:
    assert reward_trend([0.1, 0.2, 0.3]) == {"policies": 0}
    assert reward_trend([1.0] * 10)["standard_errors"] is None
    rising = reward_trend([0.0, 0.2] * 40 + [0.5, 0.7] * 40)
    assert rising["policies"] == 40 and rising["first"] == pytest.approx(0.1) and rising["last"] == pytest.approx(0.6)
    # two samples' standard deviation is 0.1013, so the error of the difference is 0.1013 * sqrt(2 / 40) = 0.02265
    assert rising["standard_errors"] == pytest.approx(0.5 / 0.02265, rel=1e-3)
    assert reward_trend([0.5, 0.7] * 40 + [0.0, 0.2] * 40)["standard_errors"] < -2
