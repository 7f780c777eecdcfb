"""Every test: the same random numbers and one thread."""

from collections.abc import Iterator

import pytest
import torch

from lite.model.registry import families

THREADS = max(2, torch.get_num_threads())
INNER_LOOP = {"qwen3", "nemotron_h"}  # between them they have every block; the other families run the same code


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of any other family is slow: it waits for `make test`."""
    others = set(families()) - INNER_LOOP
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and others & {str(v) for v in item.callspec.params.values()}:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _same_numbers_at_any_load() -> None:
    """A test's random numbers do not depend on which tests ran before it, and its time not on what else the machine does: threads that
    wait for each other on busy cores cost up to 20 times what they gain on tiny matrices."""
    torch.manual_seed(1234)
    torch.set_num_threads(1)


@pytest.fixture
def all_threads() -> None:
    """For tests whose subject is what threads do: how work is split among them is one way for a row to depend on its company."""
    torch.set_num_threads(THREADS)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN: a kernel that reads what nobody wrote shows it."""
    torch.use_deterministic_algorithms(True)  # which fills new memory, too
    yield
    torch.use_deterministic_algorithms(False)
