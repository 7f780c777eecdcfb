"""Under MLITE_RECEIPT=FILE a session of GPU tests leaves a receipt, like a proof: what ran, how it ended, on what, and of which sources."""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

CHECKOUT = Path(__file__).resolve().parents[2]

ended: dict[str, str] = {}  # test -> passed, failed or skipped; also a file that was not collected
measurements: dict[str, Any] = {}


@pytest.fixture(scope="session")
def record() -> dict[str, Any]:
    """For facts that belong into the receipt: name -> anything JSON can hold."""
    return measurements


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        ended[report.nodeid] = report.outcome


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if not report.passed:
        ended[report.nodeid] = report.outcome


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if "MLITE_RECEIPT" not in os.environ:
        return
    from lite.acceptance.receipt import SCHEMA, closure, environment, git_state, write_json

    status, reason = verdict(exitstatus)
    outcomes = list(ended.values())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    write_json(Path(os.environ["MLITE_RECEIPT"]), {
        "schema": SCHEMA,
        "status": status,
        "reason": reason,
        "command": ["pytest", *session.config.invocation_params.args],
        "tests": {kind: outcomes.count(kind) for kind in ("passed", "failed", "skipped")}
                 | {"failures": [name for name, outcome in ended.items() if outcome == "failed"]},
        "measurements": measurements,
        "environment": environment(device, {}),
        "git": git_state(),
        "closure": closure(whole=True) | loaded_tests(),  # in some of these tests trainers and engines are processes of their own
    })  # fmt: skip


def verdict(exitstatus: int) -> tuple[str, str]:
    """-> (status, reason). A failure stays one however the session ended; a session that ran no test to its end shows nothing."""
    outcomes = list(ended.values())
    counts = f"{outcomes.count('passed')} passed, {outcomes.count('failed')} failed, {outcomes.count('skipped')} skipped"
    if "failed" in outcomes:
        return "fail", counts
    if "passed" not in outcomes:
        return "inconclusive", f"no test ran: {counts}"
    if exitstatus != pytest.ExitCode.OK:
        return "inconclusive", f"the session was cut short ({pytest.ExitCode(exitstatus).name}): {counts}"
    return "pass", counts


def loaded_tests() -> dict[str, str]:
    """sha256 of every file below tests/ that this process has loaded, by path relative to the checkout; where verl was tested, of what
    its workers load from verl_mlite, too."""
    loaded = {Path(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
    below = {file for file in loaded if file.is_relative_to(CHECKOUT / "tests")}
    if CHECKOUT / "tests" / "gpu" / "test_verl.py" in below:
        adapter = CHECKOUT / "examples" / "verl_mlite"
        below |= {file for suffix in ("py", "yaml", "sh") for file in adapter.rglob(f"*.{suffix}") if "build" not in file.parts}
    return {file.relative_to(CHECKOUT).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(below)}
