"""Runs gates as subprocesses, stale ones first, several at once where asked; what is done and still fresh is not run again."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lite.acceptance.freshness import evidence_lacks, lacks, read_receipt
from lite.acceptance.gates import CHECKPOINT, PROMPTS, Gate
from lite.acceptance.receipt import write_json
from lite.errors import InputError

LIMIT = 540.0  # seconds a gate
# -P: the installed package, not what lies in the working directory; vLLM finds its plugins by a wheel's metadata
PROGRAMS = {"mlite": ("-P", "-m", "lite.cli"), "pytest": ("-m", "pytest"), "python": ()}


@dataclass(frozen=True)
class Outcome:
    """found: the receipt's status, or "no receipt". why: what is wrong with it, "" for an end as expected. seconds: None where an earlier
    call had run it. before: what its receipt in evidence/ lacked, "" where that was fresh."""

    name: str
    expected: str
    found: str
    why: str
    seconds: float | None
    before: str


class Events(Protocol):
    """Told what goes on; the command line draws it."""

    def started(self, name: str) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...


def run_gates(gates: Sequence[Gate], out: Path, checkout: Path, events: Events, jobs: int = 1, limit: float = LIMIT) -> list[Outcome]:
    """-> an outcome a gate, and one of "prepare" where the checkpoint had to be made first.

    Writes out/NAME.json (the receipt), out/NAME.log and the folder out/NAME. limit: seconds after which a gate is killed. Whatever ends
    this call early (Ctrl-C) kills what it has started; the next call goes on where this one stopped.
    """
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    before = evidence_lacks(gates, checkout)
    stale_first = sorted(gates, key=lambda gate: not before[gate.name])
    todo = [gate for gate in stale_first if lacks(gate, out / f"{gate.name}.json", checkout)]
    outcomes = [Outcome(g.name, g.expected, g.expected, "", None, before[g.name]) for g in stale_first if g not in todo]
    for done in outcomes:
        events.ended(done)
    if any(gate.demo for gate in todo):
        outcomes += _prepare(out, checkout, events, limit)

    running: dict[str, tuple[Gate, _Process]] = {}
    try:
        while todo or running:
            while todo and len(running) < jobs:
                gate = todo.pop(0)
                running[gate.name] = gate, _start(gate, out, checkout)
                events.started(gate.name)
            time.sleep(0.05)
            for gate, process in list(running.values()):
                if process.running() and process.seconds() < limit:
                    continue
                outcomes.append(_finish(gate, process, out, checkout, before[gate.name], limit))
                del running[gate.name]
                events.ended(outcomes[-1])
    finally:
        for _, process in running.values():
            process.kill()
    return outcomes


def check_installed(checkout: Path) -> None:
    """InputError unless checkout is whole and the package that the commands will load is its own: their receipts would be stale from
    the start."""
    for folder in ("lite", "tests/gpu"):
        if not (checkout / folder).is_dir():
            raise InputError(checkout, f"has no {folder}/ and is no checkout", "run this in a checkout of the project")
    code = "import lite; print(lite.__file__)"
    asked = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    if asked.returncode:
        raise InputError(sys.executable, "has no megatron-lite installed", "install the checkout as a wheel")
    installed = Path(asked.stdout.strip()).parent
    for path in sorted((checkout / "lite").rglob("*.py")):
        other = installed / path.relative_to(checkout / "lite")
        if not other.is_file() or other.read_bytes() != path.read_bytes():
            raise InputError(installed, f"differs from this checkout in {path.relative_to(checkout)}", "install the checkout again")


def _prepare(out: Path, checkout: Path, events: Events, limit: float) -> list[Outcome]:
    """Puts checkpoint and prompts beside the gates' folders, by links: their receipts then name no path of this machine."""
    demo, outcomes = checkout / ".cache" / "demo", []
    files = [demo / name for name in (CHECKPOINT, PROMPTS)]
    if not all(file.exists() for file in files):
        words = (str(checkout / "examples" / "demo" / "prepare.py"), str(demo))
        process = _Process("prepare", words, checkout, {}, out)
        try:
            events.started("prepare")
            while process.running() and process.seconds() < limit:
                time.sleep(0.05)
        finally:
            seconds = process.kill()
        made = all(file.exists() for file in files)
        outcomes = [Outcome("prepare", "pass", "pass" if made else "fail", "" if made else process.last_line(), seconds, "")]
        events.ended(outcomes[0])
    for file in files:
        (out / file.name).unlink(missing_ok=True)
        (out / file.name).symlink_to(file)
    return outcomes


def _start(gate: Gate, out: Path, checkout: Path) -> "_Process":
    """In out, so that the receipt names its folder by a relative path. Tests belong to the checkout and run there."""
    receipt = out / gate.name / "receipt.json"
    (out / f"{gate.name}.json").unlink(missing_ok=True)
    shutil.rmtree(out / gate.name, ignore_errors=True)
    program, *arguments = gate.command
    cwd = checkout if program == "pytest" else out
    return _Process(gate.name, (*PROGRAMS[program], *arguments), cwd, {"MLITE_RECEIPT": str(receipt), **gate.env}, out)


def _finish(gate: Gate, process: "_Process", out: Path, checkout: Path, before: str, limit: float) -> Outcome:
    killed = process.running()
    seconds = process.kill()
    receipt = None if killed else read_receipt(out / gate.name / "receipt.json")
    if receipt is None:
        why = f"killed after {limit:.0f} s" if killed else "no whole receipt"
        return Outcome(gate.name, gate.expected, "no receipt", f"{why}: {process.last_line()}", seconds, before)
    write_json(out / f"{gate.name}.json", receipt)
    return Outcome(gate.name, gate.expected, receipt["status"], lacks(gate, out / f"{gate.name}.json", checkout), seconds, before)


class _Process:
    """A command of this interpreter in a process group of its own, its output in out/NAME.log."""

    def __init__(self, name: str, words: Sequence[str], cwd: Path, env: dict[str, str], out: Path):
        self.log = out / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words], cwd=cwd, env=os.environ | {"PYTHONUNBUFFERED": "1"} | env,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.start = time.monotonic()

    def running(self) -> bool:
        return self.process.poll() is None

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def kill(self) -> float:
        """-> seconds that it ran. With whatever it has started and not ended, which would keep its memory on the GPU; without a grace
        period, because every receipt is replaced in one piece."""
        seconds = self.seconds()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return seconds

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
