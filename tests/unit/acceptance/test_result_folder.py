"""--out is cleared only of an earlier run, never of anybody's files, never of the input, and by one run at a time."""

import json
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from lite.acceptance import tasks
from lite.acceptance.proxy import write_proxy
from lite.acceptance.result_folder import CHECKPOINTS, LOCK, claimed
from lite.acceptance.sides import ProveConfig, check_choice
from lite.errors import InputError
from lite.runtime.checkpoint import STATE
from tests.unit.acceptance.test_prove import SMALL, mlite

RUN = ("prove", "--proxy", "llama", *SMALL, "--updates", 0)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert mlite(monkeypatch, *RUN, "--out", folder) == 0
    return folder


@pytest.fixture
def earlier(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.mark.parametrize("change", [["--proxy", "lama"], ["--lr", "0"], ["--lr", "inf"], ["--temperature", "0"], ["--temperature", "1e9"],
                                    ["--seed", "99999999999"], ["--prompts", "/nowhere"], ["--samples", "1"]])  # fmt: skip
def test_a_typo_loses_no_earlier_run(change, earlier, monkeypatch):
    before = (earlier / "receipt.json").read_bytes()
    assert mlite(monkeypatch, *RUN, "--out", earlier, *change) == 2
    assert (earlier / "receipt.json").read_bytes() == before and (earlier / "rollout" / "theta0.safetensors").exists()


def test_the_checkpoint_of_an_earlier_run_is_not_cleared_under_the_next(earlier, monkeypatch, capsys):
    assert mlite(monkeypatch, "prove", "--model", earlier / "proxy", "--out", earlier) == 2
    assert "lies in --out" in capsys.readouterr().err
    assert (earlier / "proxy" / "model.safetensors").exists()


def test_a_folder_that_only_looks_like_a_run_is_left_alone(tmp_path, monkeypatch):
    precious = tmp_path / "mine" / "rollout" / "data"
    precious.parent.mkdir(parents=True)
    precious.write_text("precious")
    assert mlite(monkeypatch, *RUN, "--out", tmp_path / "mine") == 2
    assert precious.read_text() == "precious"


def test_somebody_elses_receipt_makes_no_run(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "receipt.json").write_text('{"mine": 1}')
    assert mlite(monkeypatch, *RUN, "--out", tmp_path / "mine") == 2
    assert (tmp_path / "mine" / "receipt.json").read_text() == '{"mine": 1}'


@pytest.mark.slow
def test_what_a_killed_run_left_does_not_block_the_next(earlier, monkeypatch):
    (earlier / "receipt.json.partial").write_text("{")
    (earlier / ".proxy.abc123").mkdir()
    assert mlite(monkeypatch, *RUN, "--out", earlier) == 0
    assert not (earlier / "receipt.json.partial").exists()


def test_two_runs_do_not_share_a_folder(tmp_path):
    with claimed(tmp_path / "run", False), pytest.raises(InputError, match="another run"), claimed(tmp_path / "run", False):
        pass
    with claimed(tmp_path / "run", False):
        assert (tmp_path / "run" / LOCK).exists()


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_a_receipt_that_says_so(tmp_path):
    code = "from lite.acceptance import proof, prove, sides\nimport os\nproof.build_sides = lambda *a: os._exit(9)\n"
    code += "from pathlib import Path\nfrom tests.unit.acceptance.test_rewards import Silent\n"
    code += f"prove.prove(sides.ProveConfig(out=Path({str(tmp_path / 'run')!r}), proxy='llama'), ['x'], Silent())\n"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert receipt["status"] == "inconclusive" and receipt["reason"] == "did not finish"


@pytest.mark.parametrize("where", ["out", "json"])
def test_a_place_that_cannot_be_written_is_named_before_the_work(where, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("x")
    flag = ["--out", tmp_path / "file" / "run"] if where == "out" else ["--json", tmp_path / "file" / "r.json", "--out", tmp_path / "run"]
    assert mlite(monkeypatch, *RUN, *flag) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_first_layers_of_a_checkpoint_prove_alone(tmp_path, monkeypatch):
    write_proxy("qwen3", tmp_path / "model", geometry="tiny", layers=3, dtype=torch.bfloat16, seed=0)
    assert mlite(monkeypatch, "prove", "--model", tmp_path / "model", "--layers", 2, *SMALL, "--updates", 1, "--out", tmp_path / "run") == 0
    subject = json.loads((tmp_path / "run" / "receipt.json").read_text())["subject"]
    assert subject["layers"] == subject["geometry"]["num_hidden_layers"] == 2
    assert len(subject["skipped"]) == 11 and all("overridden" in why for why in subject["skipped"].values())


@pytest.mark.parametrize("usage", [["prove", "--bogus"], ["prove", "--groups", "x"], ["compare", "one"], ["prove", "--layers", "0"]])
def test_a_usage_error_is_one_line_too(usage, monkeypatch, capsys):
    assert mlite(monkeypatch, *usage) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_an_unforeseen_error_is_one_line_and_never_exit_1(tmp_path, monkeypatch, capsys):
    """Exit 1 says that a token differs."""
    from lite.acceptance import proof

    monkeypatch.setattr(proof, "build_sides", lambda *args: 1 / 0)
    assert mlite(monkeypatch, *RUN, "--out", tmp_path / "run") == 2
    assert [line for line in capsys.readouterr().err.splitlines() if "unexpected ZeroDivisionError" in line]
    assert "ZeroDivisionError" in json.loads((tmp_path / "run" / "receipt.json").read_text())["reason"]


def test_a_long_runs_checkpoints_are_not_cleared_by_a_forgotten_resume(tmp_path):
    with claimed(tmp_path / "run", go_on=False):
        (tmp_path / "run" / CHECKPOINTS / "step-00000010").mkdir(parents=True)
        (tmp_path / "run" / CHECKPOINTS / "step-00000010" / STATE).write_text("{}")
    with pytest.raises(InputError, match=r"holds the checkpoints of a run; go on with --resume"), claimed(tmp_path / "run", go_on=False):
        pass
    with claimed(tmp_path / "run", go_on=True):
        assert (tmp_path / "run" / CHECKPOINTS / "step-00000010").is_dir()


def test_what_a_kill_left_of_the_first_checkpoint_does_not_block_the_next_run_and_anything_else_there_does(tmp_path):
    with claimed(tmp_path / "run", go_on=False):
        (tmp_path / "run" / CHECKPOINTS / "step-00000010.partial").mkdir(parents=True)
    with claimed(tmp_path / "run", go_on=False):
        assert not (tmp_path / "run" / CHECKPOINTS).exists()
        (tmp_path / "run" / CHECKPOINTS / "step-00000007").mkdir(parents=True)
    with pytest.raises(InputError, match=r"step-00000007 is no checkpoint of a run"), claimed(tmp_path / "run", go_on=False):
        pass
    assert (tmp_path / "run" / CHECKPOINTS / "step-00000007").is_dir()


@pytest.mark.parametrize("kind", ["", "one-upl"])
def test_a_plant_that_is_none_is_refused_before_anything_is_written(kind, tmp_path, monkeypatch, capsys):
    assert mlite(monkeypatch, *RUN, "--plant", kind, "--out", tmp_path / "run") == 2
    assert f"--plant: {kind!r} is not known" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_an_engine_that_is_not_installed_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    """The proxy alone may be gigabytes."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert mlite(monkeypatch, *RUN, "--engine", "vllm", "--out", tmp_path / "run") == 2
    assert "vllm: is not installed" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_sequences_beyond_the_context_are_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    assert mlite(monkeypatch, *RUN, "--prompt-tokens", "1:1013", "--out", tmp_path / "run") == 2
    said = "--prompt-tokens: prompts of up to 1013 tokens and --response-tokens 12, the model allows 1024 together; shorten one of them"
    assert said in capsys.readouterr().err and not (tmp_path / "run").exists()
    check_choice(ProveConfig(out=tmp_path / "run", proxy="llama", prompt_tokens=(1, 1012), response_tokens=12), None)


def test_a_prompt_files_longest_is_what_counts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "_tokenizer", lambda checkpoint: None)
    monkeypatch.setattr(tasks, "_dataset", lambda path, name: None)
    asked = {"reasoning_gym": {"dataset": "d", "entry": {"answer": "1"}}}
    lines = [json.dumps(asked | {"uid": str(n), "prompt_ids": [1] * n}) for n in (3, 1001)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    write_proxy("qwen3", tmp_path / "model", geometry="tiny", layers=1, dtype=torch.bfloat16, seed=0)
    flags = ("--model", tmp_path / "model", "--prompts", tmp_path / "prompts.jsonl", "--groups", 1)
    assert mlite(monkeypatch, "prove", *flags, "--out", tmp_path / "run") == 2
    assert "--prompts: prompts of up to 1001 tokens" in capsys.readouterr().err and not (tmp_path / "run").exists()
