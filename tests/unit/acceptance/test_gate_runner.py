"""Running gates: small scripts in their place, which write the receipt that they are told to."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lite.acceptance.freshness import EVIDENCE
from lite.acceptance.gate_runner import Outcome, check_installed, run_gates
from lite.acceptance.gates import CHECKPOINT, GATES, PROMPTS, Gate
from lite.errors import InputError
from tests.unit.acceptance.test_prove import SMALL, mlite

ROOT = Path(__file__).parents[3]

# Notes that it ran, does what it is told, and writes a receipt of lite/NAME.py, in this order.
SCRIPT = """
import hashlib, json, os, pathlib, sys, time
name, checkout, todo, status = sys.argv[1:5]
receipt, checkout = pathlib.Path(os.environ["MLITE_RECEIPT"]), pathlib.Path(checkout)
with open("runs", "a") as runs:
    print(name, file=runs)
print("the last line", flush=True)
exec(todo)
closure = {f"lite/{name}.py": hashlib.sha256((checkout / "lite" / f"{name}.py").read_bytes()).hexdigest()}
content = {"status": status, "reason": "told to", "command": ["python", *sys.argv], "plant": None, "closure": closure}
receipt.parent.mkdir(exist_ok=True)
receipt.write_text(json.dumps(content)[: len(json.dumps(content)) // (2 if "half" in todo else 1)])
"""


class Told:
    """Events, kept."""

    def __init__(self):
        self.starts: list[str] = []
        self.ends: list[Outcome] = []

    def started(self, name: str) -> None:
        self.starts.append(name)

    def ended(self, outcome: Outcome) -> None:
        self.ends.append(outcome)


class Place:
    """A checkout of scripts and the folder of their runs."""

    def __init__(self, tmp_path: Path):
        self.checkout, self.out = tmp_path / "checkout", tmp_path / "out"
        (self.checkout / "lite").mkdir(parents=True)
        (self.checkout / EVIDENCE).mkdir()
        (self.checkout / "script.py").write_text(SCRIPT)

    def gate(self, name: str, todo: str = "", status: str = "pass", expected: str = "pass") -> Gate:
        (self.checkout / "lite" / f"{name}.py").write_text(f"# {name}\n")
        return Gate(name, "", ("python", str(self.checkout / "script.py"), name, str(self.checkout), todo, status), expected)

    def run(self, *gates: Gate, **options) -> tuple[dict[str, Outcome], list[str]]:
        """-> the outcomes by name, and the scripts that ran, in the order of their starts."""
        (self.out / "runs").unlink(missing_ok=True)
        told = Told()
        outcomes = run_gates(gates, self.out, self.checkout, told, **options)
        assert sorted(o.name for o in told.ends) == sorted(o.name for o in outcomes), "every end is told"
        ran = (self.out / "runs").read_text().split() if (self.out / "runs").exists() else []
        assert ran == [name for name in told.starts if name != "prepare"] or options
        return {o.name: o for o in outcomes}, ran

    def touch(self, name: str) -> None:
        (self.checkout / "lite" / f"{name}.py").write_text("# edited\n")


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_a_gate_that_ends_as_expected_leaves_its_receipt_and_its_log(place):
    outcomes, _ = place.run(place.gate("good"), place.gate("planted", status="fail", expected="fail"))
    assert [(o.found, o.why) for o in outcomes.values()] == [("pass", ""), ("fail", "")]
    assert sorted(path.name for path in place.out.glob("*.*")) == ["good.json", "good.log", "planted.json", "planted.log"]
    assert json.loads((place.out / "good.json").read_text()) == json.loads((place.out / "good" / "receipt.json").read_text())


@pytest.mark.parametrize(("status", "expected"), [("fail", "pass"), ("inconclusive", "pass"), ("pass", "fail"), ("pass", "inconclusive")])
def test_a_gate_that_ends_otherwise_is_wrong(status, expected, place):
    outcomes, _ = place.run(place.gate("odd", status=status, expected=expected))
    assert outcomes["odd"].found == status and f"{status}, not {expected}" in outcomes["odd"].why


@pytest.mark.parametrize("todo", ["sys.exit(1)", "'half'", "os.kill(os.getpid(), 9)"])
def test_a_gate_without_a_whole_receipt_is_wrong_by_its_last_line(todo, place):
    """Also where an earlier run had left a good one."""
    good = place.gate("odd")
    place.run(good)
    place.touch("odd")
    outcomes, ran = place.run(place.gate("odd", todo))
    assert ran == ["odd"] and outcomes["odd"].found == "no receipt" and outcomes["odd"].why == "no whole receipt: the last line"
    assert not (place.out / "odd.json").exists()


def alive(pid: int) -> bool:
    """Running, and not only waiting to be buried."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


WITH_A_CHILD = (
    "import subprocess; child = subprocess.Popen(['sleep', '60']); "
    "open('pids.part', 'w').write(f'{os.getpid()} {child.pid}'); os.rename('pids.part', 'pids'); time.sleep(60)"
)


def assert_nothing_is_left(place: Place) -> None:
    pids = [int(pid) for pid in (place.out / "pids").read_text().split()]
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids) == 2 and not any(map(alive, pids))
    assert not list(place.out.glob("slow*.json")) and not list(place.out.rglob("*.partial"))


@pytest.mark.slow
def test_a_gate_that_takes_too_long_is_killed_with_its_children_and_the_next_one_runs(place):
    outcomes, ran = place.run(place.gate("slow", WITH_A_CHILD), place.gate("next"), limit=1.5)
    assert outcomes["slow"].found == "no receipt" and outcomes["slow"].why == "killed after 2 s: the last line"
    assert outcomes["next"].why == "" and ran == ["slow", "next"]
    assert_nothing_is_left(place)


def test_an_interruption_kills_what_runs_keeps_what_is_done_and_the_next_call_goes_on(place):
    class Interrupted(Told):
        def started(self, name: str) -> None:
            if name == "slow":
                while not (place.out / "pids").exists():
                    time.sleep(0.02)
                raise KeyboardInterrupt

    good = place.gate("good")
    with pytest.raises(KeyboardInterrupt):
        run_gates([good, place.gate("slow", WITH_A_CHILD)], place.out, place.checkout, Interrupted())
    assert_nothing_is_left(place)
    outcomes, ran = place.run(good, place.gate("slow"))
    assert ran == ["slow"] and not outcomes["slow"].why and outcomes["good"].seconds is None


def test_what_is_done_and_fresh_is_not_run_again(place):
    gates = [place.gate("one"), place.gate("two"), place.gate("cut"), place.gate("odd", status="fail")]
    assert place.run(*gates)[1] == ["one", "two", "cut", "odd"]
    place.touch("two")
    (place.out / "cut.json").write_text((place.out / "cut.json").read_text()[:-9])
    outcomes, ran = place.run(*gates)
    assert ran == ["two", "cut", "odd"] and outcomes["one"] == Outcome("one", "pass", "pass", "", None, "no receipt")
    assert place.run(*gates)[1] == ["odd"]
    assert place.run(place.gate("one", todo="1 + 1"))[1] == ["one"], "another command is another gate"


def test_stale_ones_run_first(place):
    gates = [place.gate("fresh"), place.gate("changed"), place.gate("new")]
    place.run(*gates[:2])
    for name in ("fresh", "changed"):
        os.rename(place.out / f"{name}.json", place.checkout / EVIDENCE / f"{name}.json")
    place.touch("changed")
    outcomes, ran = place.run(*gates)
    assert ran == ["changed", "new", "fresh"]
    assert [bool(outcomes[name].before) for name in ("fresh", "changed", "new")] == [False, True, True]


def test_jobs_run_at_once_and_no_more(place):
    """Two wait for each other; a third starts when one of them has ended."""
    meet = "pathlib.Path(name + '.here').touch()\nwhile len(list(pathlib.Path().glob('*.here'))) < 2: time.sleep(0.02)\n"
    last = place.gate("third", "assert list(pathlib.Path().glob('[ab].json'))")
    outcomes, _ = place.run(place.gate("a", meet), place.gate("b", meet), last, jobs=2, limit=10)
    assert not [o.why for o in outcomes.values() if o.why]


@pytest.mark.parametrize("cut_short", [False, True], ids=["nothing is there", "the prompts are missing"])
def test_the_checkpoint_is_made_first_and_named_by_a_relative_path(place, cut_short):
    prepare = place.checkout / "examples" / "demo" / "prepare.py"
    prepare.parent.mkdir(parents=True)
    made = "import pathlib, sys\ndemo = pathlib.Path(sys.argv[1])\n"
    made += f"(demo / {CHECKPOINT!r}).mkdir(parents=True, exist_ok=True)\n(demo / {PROMPTS!r}).touch()\n"
    prepare.write_text(made)
    needs = place.gate("needs", f"assert pathlib.Path({CHECKPOINT!r}).is_dir()")
    needs = Gate(needs.name, "", needs.command, demo=True)
    if cut_short:
        (place.checkout / ".cache" / "demo" / CHECKPOINT).mkdir(parents=True)
    outcomes, _ = place.run(needs)
    assert list(outcomes) == ["prepare", "needs"] and not [o.why for o in outcomes.values() if o.why]
    for name in (CHECKPOINT, PROMPTS):
        assert (place.out / name).resolve() == (place.checkout / ".cache" / "demo" / name).resolve()
    (place.out / "needs.json").unlink()
    assert list(place.run(needs)[0]) == ["needs"], "it is made once"


def test_a_checkpoint_that_cannot_be_made_is_named_and_gates_without_it_run(place):
    needs = place.gate("needs", f"assert pathlib.Path({CHECKPOINT!r}).is_dir(), 'no model'")
    outcomes, _ = place.run(Gate(needs.name, "", needs.command, demo=True), place.gate("free"))
    assert "prepare.py" in outcomes["prepare"].why and "no model" in outcomes["needs"].why and not outcomes["free"].why


def test_a_gate_that_reads_the_demo_says_so():
    for gate in GATES:
        text = (ROOT / gate.command[1]).read_text() if gate.command[0] == "pytest" else " ".join(gate.command)
        assert gate.demo == any(word in text for word in (CHECKPOINT, PROMPTS, '".cache" / "demo"')), gate.name


def test_a_package_that_is_not_this_checkout_is_refused_by_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    check_installed(ROOT)
    (tmp_path / "lite").mkdir()
    with pytest.raises(InputError, match="has no tests/gpu/"):
        check_installed(tmp_path)
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "lite" / "errors.py").write_bytes((ROOT / "lite" / "errors.py").read_bytes() + b"\n")
    with pytest.raises(InputError, match=r"differs from this checkout in lite/errors\.py"):
        check_installed(tmp_path)


@pytest.fixture
def on_a_gpu(place, monkeypatch):
    """`mlite gates --gpu` in the checkout of scripts. -> run(gates, flags): exit code."""
    monkeypatch.chdir(place.checkout)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("lite.acceptance.gate_runner.check_installed", lambda checkout: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def run(gates: list[Gate], *flags: str) -> int:
        monkeypatch.setattr("lite.acceptance.gates.GATES", gates)
        return mlite(monkeypatch, "gates", "--gpu", "--out", place.out, "--json", place.out / "all", *flags)

    return run


def test_the_command_exits_by_what_ended_otherwise_and_names_it(place, on_a_gpu, capsys):
    good, odd = place.gate("good"), place.gate("odd", status="pass", expected="fail")
    assert on_a_gpu([good, odd]) == 1
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == "fail: not as expected: odd" and "pass, not fail: told to" in shown.out
    assert "odd: starts" in shown.err and "good: " in shown.err
    result = json.loads((place.out / "all").read_text())
    assert result["status"] == "fail" and [bool(gate["why"]) for gate in result["gates"]] == [False, True]
    assert on_a_gpu([good, odd], "--only", "good") == 0
    assert "not run again" in capsys.readouterr().err
    os.rename(place.out / "good.json", place.checkout / EVIDENCE / "good.json")
    assert on_a_gpu([good], "--stale") == 2
    assert "NOTHING WAS RUN: no gate is stale" in capsys.readouterr().out


@pytest.mark.slow
def test_a_proof_runs_as_a_gate_and_its_receipt_names_no_path_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "lite").mkdir()
    (tmp_path / "lite" / "__init__.py").write_text("raise ImportError('what lies in --out is no package')")
    gate = Gate("tiny", "", ("mlite", "prove", "--proxy", "llama", *SMALL, "--updates", "0", "--out", "tiny"))
    (outcome,) = run_gates([gate], tmp_path, ROOT, Told())
    assert not outcome.why
    assert str(tmp_path) not in (tmp_path / "tiny.json").read_text()
