"""verl's own trainers, SFT and PPO, on the CPU with `model_engine=mlite`: `make test-verl`.

verl pins what the rest of the project does not, so these tests have an environment of their own, `.venv-verl`, and verl_mlite is in it as a
wheel. In any other environment they are not collected, and one line says what to run.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.verl_runs import ON_CPU, write_data, write_policy

IN_TIER = Path(sys.prefix).name == ".venv-verl"

if IN_TIER:  # before anything imports verl
    os.environ.update(ON_CPU)
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:.* engine is not available:UserWarning")  # verl's other engines
    config.addinivalue_line("filterwarnings", "ignore:Ray state API:DeprecationWarning")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not IN_TIER:
        terminalreporter.write_line("tests/verl: not collected, verl has an environment of its own: run `make test-verl`")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", f"file://{tmp_path_factory.mktemp('store')}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a dense model; see `tests.verl_machine`, which imports verl_mlite."""
    from tests.verl_machine import Machine

    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from tests.verl_machine import Machine

    return Machine(tmp_path, monkeypatch, "nemotron_h")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `write_data`."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(family, dtype) -> a checkpoint."""
    made: dict[tuple[str, str], Path] = {}

    def get(family: str, dtype: str) -> Path:
        if (family, dtype) not in made:
            made[family, dtype] = write_policy(tmp_path_factory.mktemp(f"{family}-{dtype}"), family, getattr(torch, dtype))
        return made[family, dtype]

    return get
