"""Arms, legs and pairs: how two programs are compared on one device.

An *arm* lives in a process of its own (batch-invariant mode changes a process for good) and answers one command at a time. A *leg* is one
measurement of one arm. A *pair* is a leg of each of two arms, one straight after the other; pairs alternate AB, BA, AB, so that a device
that warms up favours neither. Only ratios within a pair are formed, and their median is reported.
"""

import json
import os
import platform
import select
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "vllm", "transformers", "flashinfer-python", "flash-attn", "megatron-lite")
Leg = dict[str, Any]
Handler = Callable[[dict[str, Any]], dict[str, Any]]


class LegError(RuntimeError):
    """A worker could not do what it was asked; it lives on where `dead` is False."""

    def __init__(self, message: str, dead: bool):
        super().__init__(message)
        self.dead = dead


class Arm:
    """The parent's end of one worker process. Its stderr, and whatever libraries print, goes to the log.

    module: run as `python -m module`, it must call `serve`. spec: what it builds. environment: added to ours, None removes a name.
    """

    def __init__(self, name: str, module: str, spec: dict[str, Any], log: Path, environment: Mapping[str, str | None] | None = None):
        self.name, self.log = name, log
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])} | (environment or {})
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("wb"),
            cwd=ROOT,
            env={key: value for key, value in env.items() if value is not None},
            start_new_session=True,  # so that an engine's own processes end with it
        )
        self._send(spec)

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise LegError(f"{self.name} died: {self.last_words()}", dead=True) from None

    def reply(self, timeout: float) -> dict[str, Any]:
        """The next answer; the first one, after the worker has built what it measures, holds its facts."""
        stdout = self.process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], timeout)[0]:
            raise LegError(f"{self.name} did not answer within {timeout:.0f} s: {self.last_words()}", dead=True)
        line = stdout.readline()
        if not line:
            raise LegError(f"{self.name} died: {self.last_words()}", dead=True)
        answer = json.loads(line)
        if "error" in answer:
            raise LegError(f"{self.name}: {answer['error']}", dead=False)
        return answer["ok"]

    def ask(self, timeout: float = 300.0, **command: Any) -> dict[str, Any]:
        self._send(command)
        return self.reply(timeout)

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1][-300:] if lines else 'nothing was logged'} (log: {self.log})"

    def close(self) -> None:
        """Ends the worker and every process that it started."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self.process.stdin.close()
            self.process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()
        self.process.stdout.close()


def serve(build: Callable[[dict[str, Any]], tuple[dict[str, Any], Handler]]) -> None:
    """A worker's main: the first line of stdin is the spec, every further one a command; each is answered by one line.

    build(spec) -> (facts, handler of commands). What fails is answered with an error; a failed build ends the worker.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints, and those of child processes, must not end up among the answers

    def answered(work: Callable[[], dict[str, Any]]) -> bool:
        try:
            message: dict[str, Any] = {"ok": work()}
        except Exception as error:
            traceback.print_exc()
            message = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
        answers.write(json.dumps(message, default=str) + "\n")
        answers.flush()
        return "ok" in message

    handler: Handler | None = None

    def start() -> dict[str, Any]:
        nonlocal handler
        facts, handler = build(json.loads(sys.stdin.readline()))
        return facts

    if not answered(start):
        sys.exit(1)
    assert handler is not None
    for line in sys.stdin:
        answered(lambda line=line: handler(json.loads(line)))  # type: ignore[misc]


def pair_orders(a: str, b: str, pairs: int) -> list[tuple[str, str]]:
    """AB, BA, AB, ..."""
    return [(a, b) if index % 2 == 0 else (b, a) for index in range(pairs)]


def ratio(legs: Sequence[Leg], over: str, under: str, value: str) -> dict[str, Any]:
    """over / under within each pair, whichever came first, and their median. Pairs that lack a leg are left out; None where all do."""
    by_pair: dict[int, dict[str, float]] = {}
    for leg in legs:
        if value in leg:
            by_pair.setdefault(leg["pair"], {})[leg["arm"]] = leg[value]
    found = [pair[over] / pair[under] for _, pair in sorted(by_pair.items()) if over in pair and under in pair]
    return {"median": statistics.median(found) if found else None, "pairs": found}


def median(legs: Sequence[Leg], arm: str, value: str) -> float | None:
    found = [leg[value] for leg in legs if leg["arm"] == arm and value in leg]
    return statistics.median(found) if found else None


def environment(argv: Sequence[str]) -> dict[str, Any]:
    """What the parent knows without touching the device; the workers state the device."""
    from lite.acceptance.receipt import git_state  # here: a worker that imports this module need not load torch before its engine does

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {
        "command": ["python", "-m", f"benchmarks.{Path(argv[0]).stem}", *map(without_machine, argv[1:])],
        "git": git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {package: installed(package) for package in PACKAGES},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }


def without_machine(word: str) -> str:
    """An absolute path by its last part: a result names no folder of the machine that made it."""
    return Path(word).name if word.startswith("/") else word


def described(spec: dict[str, Any]) -> dict[str, Any]:
    """A worker's spec as the result keeps it: without a path of this machine."""
    return {key: value for key, value in spec.items() if key != "folder"}


def write_proxy_apart(family: str, folder: Path, *, geometry: str, layers: int, dtype: str, seed: int) -> None:
    """`write_proxy` in a process of its own, so that this one holds no memory of the device."""
    code = (
        "import sys, torch; from pathlib import Path; from lite.acceptance.proxy import write_proxy; a = sys.argv; "
        "write_proxy(a[1], Path(a[2]), geometry=a[3], layers=int(a[4]), dtype=getattr(torch, a[5]), seed=int(a[6]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, family, str(folder), geometry, str(layers), dtype, str(seed)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise LegError(f"the proxy could not be written: {done.stderr.strip()[-300:]}", dead=True)
