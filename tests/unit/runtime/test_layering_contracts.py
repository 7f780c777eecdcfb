"""The package's structure, by machine; and each rule sees its own violation, planted in a copy."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import layering

ROOT = Path(__file__).parents[3]
LITE = ROOT / "lite"
FAMILY = layering.model_families(LITE)[0]
OTHER = layering.model_families(LITE)[1]

RULES = [
    layering.model_folders_are_alike, layering.no_primitives_in_models, layering.heavy_imports_stay_home,
    layering.families_are_named_in_models_only, layering.no_writes_through_data, layering.no_host_reads_in_the_model,
    layering.families_do_not_import_each_other,
]  # fmt: skip
Rule = Callable[[Path], list[str]]

# rule -> (file below lite, line added at its end, whether that breaks the rule)
PLANTED: dict[Rule, list[tuple[str, str, bool]]] = {
    layering.model_folders_are_alike: [
        (f"model/{FAMILY}/layers.py", "x = 1", True),
        ("model/brandnew/config.py", "x = 1", True),
        ("model/helpers.py", "x = 1", False),
    ],
    layering.no_primitives_in_models: [
        (f"model/{FAMILY}/primitive/norm.py", "x = 1", True),
        ("primitive/modules/other.py", "x = 1", False),
    ],
    layering.heavy_imports_stay_home: [
        ("primitive/kernels/fast.py", "import vllm", True),
        ("primitive/kernels/fast.py", "def f():\n    import vllm.model_executor", False),
        ("primitive/kernels/fast.py", "class A:\n    from triton import jit", True),
        ("primitive/kernels/fast.py", "try:\n    import flashinfer\nexcept ImportError:\n    flashinfer = None", True),
        ("runtime/rollout/vllm.py", "def f():\n    from vllm import LLM", False),
        ("vllm_plugin/register.py", "def f():\n    import vllm", False),
        ("runtime/runtime.py", "def f():\n    from vllm import LLM", True),
        ("primitive/modules/norm.py", "def f():\n    import transformer_engine.pytorch as te", True),
        ("primitive/ops/bridges.py", "import importlib\ndef f():\n    return importlib.import_module('mamba_ssm.ops')", True),
        ("cli.py", "from transformers import AutoTokenizer", True),
        ("cli.py", "def f():\n    from transformers import AutoTokenizer", False),
        ("cli.py", "import matplotlib.pyplot as plt", True),
        ("cli.py", "from .runtime.rollout import vllm", False),
    ],
    layering.families_are_named_in_models_only: [
        ("runtime/runtime.py", f"name = '{FAMILY}'", True),
        ("runtime/runtime.py", f"{FAMILY}_layers = 3", True),
        ("runtime/runtime.py", f"class {OTHER.title().replace('_', '')}Runtime: ...", True),
        ("runtime/runtime.py", f"def f(config): return config.is_{OTHER}", True),
        ("runtime/runtime.py", f"from lite.model.{FAMILY} import protocol", True),
        ("runtime/runtime.py", f"def f():\n    '''Found on {FAMILY}.'''", False),
        ("runtime/runtime.py", "rule = 'llama3'  # a rotary rule's name in checkpoints, whoever uses it", False),
        (f"model/{FAMILY}/model.py", f"name = '{FAMILY}'", False),
        ("acceptance/gates.py", f"PROXY = '--proxy {FAMILY}'", False),
        ("acceptance/gate_runner.py", f"PROXY = '--proxy {FAMILY}'", True),
    ],
    layering.no_writes_through_data: [
        ("runtime/weights.py", "def f(p, x): p.data = x", True),
        ("runtime/weights.py", "def f(p, x): p.data.copy_(x)", True),
        ("runtime/weights.py", "def f(p, x): p.data[3:5].view(-1).copy_(x)", True),
        ("runtime/weights.py", "def f(p, x): p.data[0] = x", True),
        ("runtime/weights.py", "def f(p, x): p.data += x", True),
        ("runtime/weights.py", "def f(p, x): a, p.weight.data = x", True),
        ("runtime/weights.py", "def f(p, x): torch.add(x, x, out=p.data)", True),
        ("runtime/weights.py", "def f(p, x): p.copy_(x.data)", False),
        ("runtime/weights.py", "def f(data, x): data.copy_(x)", False),
    ],
    layering.no_host_reads_in_the_model: [
        ("primitive/modules/mlp.py", "def f(x): return x.sum().item()", True),
        ("primitive/ops/bridges.py", "def f(x): return x.cpu()", True),
        ("primitive/ops/bridges.py", "def f(x): return [i for i in x.tolist()]", True),
        ("primitive/kernels/vjp/torch.py", "def f(x): return x.tolist()", False),
    ],
    layering.families_do_not_import_each_other: [
        (f"model/{FAMILY}/model.py", f"from lite.model.{OTHER}.config import read_config", True),
        (f"model/{FAMILY}/model.py", f"from lite.model import {OTHER}", True),
        (f"model/{FAMILY}/model.py", f"from ..{OTHER} import config", True),
        (f"model/{FAMILY}/model.py", f"def f():\n    import lite.model.{OTHER}.config", True),
        (f"model/{FAMILY}/model.py", "from .config import read_config", False),
        (f"model/{FAMILY}/model.py", "from ..protocol import ModelBundle", False),
    ],
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    assert rule(LITE) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "file", "line", "breaks"),
    [(rule, *case) for rule, cases in PLANTED.items() for case in cases],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_the_rule_sees_its_violation_and_no_more(rule: Rule, file: str, line: str, breaks: bool, tmp_path: Path) -> None:
    copy = tmp_path / "lite"
    shutil.copytree(LITE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + f"\n{line}\n")
    found = rule(copy)
    assert bool(found) == breaks, found
    assert all(part.startswith(str(Path(file).parent if rule in (RULES[0], RULES[1]) else file)) for part in found)


def test_every_rule_has_a_violation_that_it_sees_and_a_neighbour_that_it_leaves() -> None:
    assert PLANTED.keys() == set(RULES)
    assert all({breaks for _, _, breaks in cases} == {True, False} for cases in PLANTED.values())


def lint_imports(folder: Path) -> subprocess.CompletedProcess:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    env = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_the_import_contracts_are_kept() -> None:
    pytest.importorskip("importlinter")
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("primitive/compare.py", "from lite.runtime import batch", "cli -> acceptance"),
        ("model/registry.py", "def f():\n    import lite.runtime.runtime", "cli -> acceptance"),
        ("primitive/kernels/visible.py", "from lite.primitive.modules import norm", "inside primitive"),
        (f"model/{FAMILY}/model.py", f"from lite.model.{OTHER}.config import read_config", "a model family"),
    ],
)
def test_the_import_contracts_see_a_violation(file: str, line: str, contract: str, tmp_path: Path) -> None:
    pytest.importorskip("importlinter")
    shutil.copytree(LITE, tmp_path / "lite", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "lite" / file
    path.write_text(path.read_text() + f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [entry for entry in done.stdout.splitlines() if entry.startswith(contract) and "BROKEN" in entry], done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "torch_too"), [("import lite", False), ("from lite import *", True), ("import lite.runtime.rollout.embedded", True)]
)
def test_importing_the_package_loads_nothing_heavier_than_torch(line: str, torch_too: bool) -> None:
    """`mlite --help` waits for no torch, and nobody waits for a package that their command does not use."""
    code = f"import sys; before = set(sys.modules)\n{line}\nprint(*sorted({{m.split('.')[0] for m in set(sys.modules) - before}}))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "lite" in loaded and ("torch" in loaded) == torch_too
    assert not loaded & (layering.HEAVY | layering.NEVER_AT_MODULE_LEVEL | {"typer", "rich", "verl", "megatron", "accelerate", "pandas"})
