"""Puts this folder on the import path, so that tests share `tiny`, `formulas`, `gradients` and `invariance`."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """A test's numbers do not depend on which tests ran before it."""
    torch.manual_seed(1234)
