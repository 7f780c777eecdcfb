"""What is installed: the wheel and not the checkout, found by verl itself, and its part for tests out of everyone's way."""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import verl
import verl_mlite
from verl_mlite.testing import platform_cpu

from lite.errors import InputError
from tests import layering
from tests.verl_runs import ON_CPU

ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "examples" / "verl_mlite"


def test_these_tests_run_the_installed_wheel() -> None:
    """With the checkout on the path they would not see what the wheel lacks."""
    assert Path(verl_mlite.__file__).is_relative_to(sysconfig.get_path("purelib"))


def test_import_verl_is_all_that_registers_the_engine(tmp_path: Path) -> None:
    """In every Ray worker; verl keeps a plugin that fails to load to itself."""
    code = (
        "import verl; from verl.workers.engine.base import EngineRegistry as known\n"
        "print(known.get_engine_cls('language_model', 'mlite'), known.get_engine_cls('value_model', 'mlite'))"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ON_CPU}
    # -I: no PYTHONPATH and no current folder, what is installed is all there is
    command = [sys.executable, "-I", "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "<class 'verl_mlite.engine.MliteEngine'> <class 'verl_mlite.engine.NoCritic'>"


def test_the_platform_for_tests_is_not_even_imported_beside_another_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl, "__version__", "0.9.2")
    with pytest.raises(InputError, match=r"0\.9\.2.*verl==0\.9\.1"):
        runpy.run_path(platform_cpu.__file__)


def users_of_testing(package: Path) -> list[str]:
    """file:line of each import of `testing` by another part of the package."""
    return [
        f"{found.file}:{found.line}"
        for file, tree in layering.sources(package)
        if not file.startswith("testing/")
        for found in layering.imports(package, file, tree)
        if f"{found.module}.".startswith("verl_mlite.testing.")
    ]


def test_nothing_but_tests_loads_what_is_for_tests(tmp_path: Path) -> None:
    assert users_of_testing(ADAPTER / "verl_mlite") == users_of_testing(ROOT / "lite") == []
    shipped = [p for p in ADAPTER.rglob("*") if p.suffix in (".yaml", ".sh", ".toml")]
    assert len(shipped) > 5 and not [p for p in shipped if "verl_mlite.testing" in p.read_text()]
    for line in ("from verl_mlite.testing import rollout", "from . import testing", "def f():\n    import verl_mlite.testing.platform_cpu"):
        copy = shutil.copytree(ADAPTER / "verl_mlite", tmp_path / "verl_mlite", dirs_exist_ok=True)
        (copy / "worker.py").write_text(line)
        assert users_of_testing(copy) == [f"worker.py:{line.count(chr(10)) + 1}"]
