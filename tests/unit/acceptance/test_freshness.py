"""When a receipt shows what its gate claims, and when it no longer does: each way is planted."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lite.acceptance import gate_report, gate_runner  # noqa: F401  loaded, so that the closure could hold them
from lite.acceptance.freshness import evidence_lacks, lacks, orphans
from lite.acceptance.gates import GATES, Gate, choose
from lite.acceptance.plants import find_plant
from lite.acceptance.receipt import closure, write_json
from lite.acceptance.sides import check_choice
from lite.errors import InputError
from tests.unit.acceptance.test_prove import mlite

ROOT = Path(__file__).parents[3]
READS = {"one": ["lite/a.py"], "two": ["lite/b.py", "tests/gpu/test_b.py"], "both": ["lite/a.py", "lite/b.py"]}
SOURCES = sorted({path for paths in READS.values() for path in paths})


def receipt_of(gate: Gate, reads: list[str], checkout: Path, **changes: object) -> dict:
    sources = {path: hashlib.sha256((checkout / path).read_bytes()).hexdigest() for path in reads}
    good = {"schema": 1, "status": gate.expected, "reason": "as it should be", "command": list(gate.command), "plant": gate.plant}
    return good | {"closure": sources} | changes


def policies(*mismatches: int, valid: int = 100) -> list[dict]:
    paths = [{"mismatch": n, "nonfinite": 0, "valid_tokens": valid} for n in mismatches]
    return [{"policy": f"theta{k}", "score": path, "actor": path} for k, path in enumerate(paths)]


def one_path(**count: int) -> list[dict]:
    """theta1 differs on the actor's path alone."""
    found = policies(0, 0)
    found[1]["actor"] = found[1]["actor"] | count
    return found


@pytest.fixture
def checkout(tmp_path):
    """Three sources, and the fresh receipts of the gates ONE, TWO and BOTH, which read some of them."""
    for path in SOURCES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"# {path}\n")
    for gate in THREE:
        write_json(tmp_path / "evidence" / f"{gate.name}.json", receipt_of(gate, READS[gate.name], tmp_path))
    return tmp_path


THREE = [Gate(name, "", ("mlite", "prove", "--out", name)) for name in READS]


@pytest.mark.parametrize("change", ["byte", "gone"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_changed_source_makes_exactly_the_gates_stale_that_read_it(source, change, checkout):
    assert evidence_lacks(THREE, checkout) == dict.fromkeys(READS, "")
    if change == "byte":
        content = bytearray((checkout / source).read_bytes())
        content[0] ^= 1
        (checkout / source).write_bytes(content)
    else:
        (checkout / source).unlink()
    found = evidence_lacks(THREE, checkout)
    assert {name for name, why in found.items() if why} == {name for name, paths in READS.items() if source in paths}
    assert all(source in why for why in found.values() if why)


def test_a_missing_receipt_is_stale(checkout):
    (checkout / "evidence" / "two.json").unlink()
    assert evidence_lacks(THREE, checkout) == {"one": "", "two": "no receipt", "both": ""}


def test_a_receipt_that_is_cut_off_anywhere_is_not_accepted(checkout):
    path = checkout / "evidence" / "one.json"
    whole = path.read_text().rstrip()
    for length in range(len(whole)):
        path.write_text(whole[:length])
        assert lacks(THREE[0], path, checkout) == "the receipt is not whole", length
    path.write_text(whole)
    assert lacks(THREE[0], path, checkout) == ""


def test_a_folder_or_another_json_is_no_receipt(checkout):
    path = checkout / "evidence" / "one.json"
    for other in ("5", "[]", '{"closure": {"x": "1"}}'):
        path.write_text(other)
        assert lacks(THREE[0], path, checkout) == "the receipt is not whole"
    path.unlink()
    path.mkdir()
    assert lacks(THREE[0], path, checkout) == "the receipt is not whole"


def test_a_run_that_did_not_finish_is_not_accepted(checkout):
    """Its receipt is there from the start, and its closure comes last."""
    path = checkout / "evidence" / "one.json"
    for unfinished in ({}, {"closure": {}}):
        write_json(path, {"schema": 1, "status": "pass", "reason": "", "command": list(THREE[0].command)} | unfinished)
        assert lacks(THREE[0], path, checkout) == "the receipt is not whole"


PASSES = Gate("g", "", ("mlite", "prove"))
REFUSED = Gate("g", "", ("mlite", "prove"), "inconclusive", reason=r"broken at shape .9, 3.*row")
STALE = Gate("g", "", ("mlite", "prove", "--plant", "stale-weights"), "fail", differs_at=("theta1", "theta2"))
RISES = Gate("g", "", ("mlite", "prove"), rises=2.0)
OFF = Gate("g", "", ("mlite", "prove", "--plugin", "off"), "fail", differs_at=("theta0", "theta1", "theta2"))


@pytest.mark.parametrize(
    ("gate", "receipt", "why"),
    [
        (PASSES, {"policies": policies(0, 0, 0)}, ""),
        (PASSES, {"status": "fail"}, "fail, not pass"),
        (PASSES, {"status": "inconclusive"}, "inconclusive, not pass"),
        (PASSES, {"policies": policies(0, 0, valid=0)}, "no compared token"),
        (PASSES, {"policies": policies(0, 1)}, "differ at theta1"),
        (PASSES, {"policies": one_path(mismatch=3)}, "differ at theta1, not at none (actor)"),
        (PASSES, {"policies": one_path(nonfinite=3)}, "differ at theta1, not at none (actor)"),
        (PASSES, {"policies": [{}]}, "not whole"),
        (PASSES, {"policies": 5}, "not whole"),
        (PASSES, {"closure": 5}, "not whole"),
        (PASSES, {"plant": "one-ulp"}, "planted one-ulp, not None"),
        (PASSES, {"command": ["mlite", "prove", "--groups", "1"]}, "another command"),
        (REFUSED, {"reason": "attention: broken at shape (9, 3, 64): row 128"}, ""),
        (REFUSED, {"reason": "no CUDA device"}, "another reason: no CUDA device"),
        (REFUSED, {"status": "pass"}, "pass, not inconclusive"),
        (STALE, {"policies": policies(0, 7, 9)}, ""),
        (STALE, {"policies": policies(0, 7)}, "differ at theta1, not at theta1, theta2"),
        (STALE, {"policies": policies(5, 7, 9)}, "differ at theta0, theta1, theta2"),
        (STALE, {"policies": []}, "differ at no policy"),
        (STALE, {"policies": policies(0, 7, 9), "plant": "one-ulp"}, "planted one-ulp, not stale-weights"),
        (STALE, {"policies": policies(0, 7, 9), "plant": None}, "planted None"),
        (STALE, {"policies": policies(0, 0, 0), "status": "pass"}, "pass, not fail"),
        (OFF, {"policies": policies(5, 7, 9)}, ""),
        (OFF, {"policies": policies(5, 0, 9)}, "differ at theta0, theta2"),
        (RISES, {"reward": {"policies": 40, "standard_errors": 2.5}}, ""),
        (RISES, {"reward": {"policies": 40, "standard_errors": 1.9}}, "does not rise by 2.0 standard errors"),
        (RISES, {"reward": {"policies": 0}}, "does not rise"),
    ],
)
def test_a_receipt_must_have_ended_as_the_gate_says(gate, receipt, why, checkout):
    write_json(checkout / "r.json", receipt_of(gate, ["lite/a.py"], checkout, **receipt))
    found = lacks(gate, checkout / "r.json", checkout)
    assert (found == "") == (why == "") and why in found


def test_a_receipt_of_no_gate_is_an_orphan(checkout):
    write_json(checkout / "evidence" / "two-old.json", {})
    assert orphans(checkout, THREE) == ["two-old.json"]


@pytest.mark.slow
def test_the_listing_names_every_gate_and_never_fails_the_build(checkout):
    """Only the orphans are ours here: none of the project's gates is called one, two or both."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "lite.acceptance.freshness"], cwd=checkout, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("stale")] == [f"stale   {gate.name} (no receipt): {gate.shows}" for gate in GATES]
    assert len([line for line in lines if line.startswith("orphan")]) == 3
    assert lines[-1].startswith(f"evidence: {len(GATES)} of {len(GATES)} gates are stale")


@pytest.mark.parametrize("whole", [False, True])
def test_what_runs_gates_is_in_no_closure(whole):
    assert not [path for path in closure(whole) if "gate" in path or "freshness" in path]


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
def test_every_gate_is_a_command_that_is_accepted(gate, tmp_path, monkeypatch):
    assert not [word for word in gate.command if word.startswith("/")] and gate.shows.endswith(".")
    if gate.command[0] == "pytest":
        assert (ROOT / gate.command[1]).is_file()
        return
    taken = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lite.acceptance.prove.prove", lambda config, *_: taken.append(config) or {"status": "pass", "reason": ""})
    assert mlite(monkeypatch, *gate.command[1:]) == 0
    (config,) = taken
    assert config.engine == "vllm" and str(config.out) == gate.name and config.plant == gate.plant
    assert config.plant is None or find_plant(config.plant)
    assert len(gate.differs_at) <= config.updates + 1
    if config.proxy:
        monkeypatch.setattr("lite.acceptance.sides.require_verified_version", lambda: "installed where gates run")
        check_choice(config, find_plant(config.plant) if config.plant else None)


def test_gates_have_names_of_their_own_and_an_unknown_one_is_answered_by_the_nearest():
    assert len({gate.name for gate in GATES}) == len(GATES)
    assert [gate.name for gate in choose(["kernels", "smollm2-stale"])] == ["smollm2-stale", "kernels"]
    with pytest.raises(InputError, match="did you mean 'qwen3-flash-eager'"):
        choose(["qwen3-flash-eagr"])


def test_without_gpu_the_gates_are_listed_loudly_and_nothing_is_run(checkout, monkeypatch, capsys):
    monkeypatch.chdir(checkout)
    monkeypatch.setattr("lite.acceptance.gates.GATES", THREE)
    (checkout / "lite" / "a.py").write_text("changed")
    assert mlite(monkeypatch, "gates", "--json", "r.json") == 2
    out = capsys.readouterr().out
    assert "stale   one (1 of 1 sources changed, lite/a.py first)" in out and "fresh   two" in out
    assert out.splitlines()[-1].startswith("NOTHING WAS RUN")
    assert json.loads((checkout / "r.json").read_text())["evidence_lacks"]["two"] == ""
    assert mlite(monkeypatch, "gates", "--stale") == 2
    assert "fresh" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [(["--gpu"], "no CUDA device"), (["--gpu", "--only", "kernel"], "did you mean 'kernels'"), (["--jobs", "0"], "--jobs")],
)
def test_bad_input_is_one_line_and_exit_2(args, says, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert mlite(monkeypatch, "gates", *args) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line


def test_outside_a_checkout_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert mlite(monkeypatch, "gates") == 2
    assert "is no checkout" in capsys.readouterr().err
