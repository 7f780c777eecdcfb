"""What a session of GPU tests says of itself in its receipt: tests/gpu/conftest.py over small test files."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[3]


@pytest.fixture
def gpu_tests(pytester, monkeypatch):
    """A checkout with tests/gpu/ and nothing else. -> run(source): the session's receipt."""
    folder = pytester.path / "tests" / "gpu"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "gpu" / "conftest.py", folder)
    receipt = pytester.path / "out" / "receipt.json"
    monkeypatch.setenv("MLITE_RECEIPT", str(receipt))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take a second a session

    def run(source: str) -> dict:
        (folder / "test_it.py").write_text(source)
        pytester.runpytest_inprocess("tests/gpu/test_it.py", no_reraise_ctrlc=True)
        return json.loads(receipt.read_text())

    return run


GOOD = "def test_good(): pass\n"
SKIPPED = "import pytest\n@pytest.mark.skip(reason='no GPU')\ndef test_gpu(): pass\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "status", "counts", "failures"),
    [
        (GOOD, "pass", (1, 0, 0), []),
        (GOOD + SKIPPED, "pass", (1, 0, 1), []),
        (GOOD + "def test_bad(): assert False\n", "fail", (1, 1, 0), ["test_bad"]),
        ("import pytest\n@pytest.fixture\ndef f():\n    yield\n    assert False\ndef test_end(f): pass\n", "fail", (0, 1, 0), ["test_end"]),
        ("import pytest\n@pytest.fixture\ndef f(): 1 / 0\ndef test_start(f): pass\n", "fail", (0, 1, 0), ["test_start"]),
        ("import nothing_of_this_name\n", "fail", (0, 1, 0), ["test_it.py"]),
        (SKIPPED, "inconclusive", (0, 0, 1), []),
        ("import pytest\npytest.skip('no GPU', allow_module_level=True)\n", "inconclusive", (0, 0, 1), []),
        ("", "inconclusive", (0, 0, 0), []),
        (GOOD + "import pytest\ndef test_stop(): raise KeyboardInterrupt\n", "inconclusive", (1, 0, 0), []),
    ],
)
def test_the_status_is_of_what_ran(source, status, counts, failures, gpu_tests):
    receipt = gpu_tests(source)
    tests = receipt["tests"]
    assert (receipt["status"], (tests["passed"], tests["failed"], tests["skipped"])) == (status, counts), receipt["reason"]
    assert [name.replace("::", "/").split("/")[-1] for name in tests["failures"]] == failures


@pytest.mark.slow
def test_the_receipt_holds_facts_the_command_the_tests_that_were_loaded_and_the_whole_package(tmp_path):
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "gpu" / "conftest.py", folder)
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "helper.py").write_text("ANSWER = 42\n")
    (tmp_path / "tests" / "other.py").write_text("nobody loads it\n")
    (folder / "test_it.py").write_text("from tests.helper import ANSWER\ndef test_good(record): record['answer'] = {'is': ANSWER}\n")
    env = os.environ | {"PYTHONPATH": str(ROOT), "MLITE_RECEIPT": str(tmp_path / "receipt.json")}
    command = [sys.executable, "-m", "pytest", "-q", "tests/gpu/test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["command"] == ["pytest", "-q", "tests/gpu/test_it.py"]
    assert receipt["measurements"] == {"answer": {"is": 42}}
    assert receipt["environment"]["torch"]
    closure = receipt["closure"]
    assert closure["tests/helper.py"] == hashlib.sha256(b"ANSWER = 42\n").hexdigest()
    assert closure.keys() >= {"tests/gpu/test_it.py", "tests/gpu/conftest.py", "lite/acceptance/receipt.py"}
    assert "lite/runtime/runtime.py" in closure, "processes that a test starts load what it does not"
    assert "tests/other.py" not in closure and not [path for path in closure if path.startswith("/")]


def test_without_the_switch_nothing_is_written(gpu_tests, pytester, monkeypatch):
    monkeypatch.delenv("MLITE_RECEIPT")
    with pytest.raises(FileNotFoundError):
        gpu_tests(GOOD)
