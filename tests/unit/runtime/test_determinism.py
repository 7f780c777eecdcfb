"""The bytes belong to tokens and weights: the number of threads and the process do not show in them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import DTYPES, checkpoint
from tests.training import digests

ROOT = Path(__file__).parents[3]
SCRIPT = "import sys; from pathlib import Path; from tests.training import digests; print(*digests(Path(sys.argv[1]), sys.argv[2], 2))"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_thread_and_two_give_the_same_logprobs(dtype: str) -> None:
    """All but the last digest, the trained weights: a VJP is deterministic, yet may add in another order on other threads."""
    one, two = (digests(checkpoint("qwen3", dtype), dtype, threads) for threads in (1, 2))
    assert one[:-1] == two[:-1] and len(one) == 6 + 2 + 2
    assert len(set(one)) == len(one)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_another_process_gives_the_same_logprobs_tokens_and_trained_weights(dtype: str) -> None:
    """Another hash seed and another heap: an order taken from a set, or a read of memory nobody wrote, would show."""
    folder = checkpoint("qwen3", dtype)
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-c", SCRIPT, str(folder), dtype]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == digests(folder, dtype, 2)


def test_another_checkpoint_gives_other_bytes() -> None:
    """The digests see the weights: equal ones above are no accident of an empty output."""
    assert not set(digests(checkpoint("qwen3", seed=1), "bf16", 1)) & set(digests(checkpoint("qwen3"), "bf16", 1))
