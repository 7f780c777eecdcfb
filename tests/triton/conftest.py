"""vLLM's own Triton kernels, out of the released wheel, under Triton's interpreter on a CPU: `make test-triton`.

They need vLLM, an older numpy and variables that are read at import, so they have an environment of their own. In `.venv-triton` a missing
vLLM or Triton is an error; in any other environment the tests skip and say what to run. Everything is fp32: the interpreter multiplies
bf16 operands as the integers that it stores them as.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

IN_TIER = Path(sys.prefix).name == ".venv-triton"
STOCK: dict[str, Any] = {}  # what `prepare` replaced
INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def pytest_configure(config: pytest.Config) -> None:
    # Triton's own use of numpy, thousands of times
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit:DeprecationWarning")
    # 0 / 0 in rows that pad an attention tile and are not stored
    config.addinivalue_line("filterwarnings", "ignore:invalid value encountered in divide:RuntimeWarning:triton.runtime.interpreter")


def pytest_runtest_setup() -> None:
    if not IN_TIER:  # from here, so that the summary has one line for all
        pytest.skip("vLLM's Triton kernels are tested in an environment of their own: run `make test-triton`")


def ordered_dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """a @ b + d with the products of each element added in order of k."""
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    if {a.data.dtype, b.data.dtype, d.data.dtype} != {np.dtype(np.float32)}:
        raise TypeError(f"the interpreted dot is only right in fp32, not for {a.dtype} and {b.dtype}")
    out = np.zeros_like(d.data)
    for k in range(a.data.shape[1]):
        out += a.data[:, k, None] * b.data[k]
    return TensorHandle(out + d.data, d.dtype.scalar)


def prepare() -> None:
    """Fails where the tier cannot be run. The three replacements are all that is changed in Triton and vLLM."""
    wrong = {name: os.environ.get(name) for name, value in INTERPRETED.items() if os.environ.get(name) != value}
    if wrong:
        raise pytest.UsageError(f"{wrong} must be {INTERPRETED} before Python starts: run `make test-triton`")
    os.environ.update(VLLM_BATCH_INVARIANT="1", VLLM_LOGGING_LEVEL="ERROR")
    from lite.primitive.kernels.vllm.version import require_verified_version

    require_verified_version()
    import triton.runtime.interpreter as interpreter
    import vllm.model_executor.layers.batch_invariant as batch_invariant

    # numpy's BLAS rounds a row by its place in the tile, which a tensor core does not: with it no product would be row-invariant.
    STOCK["dot"] = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = ordered_dot
    # A grid that is a function may write into what it is given (vLLM's convolution puts tensors there); here that would be the arguments
    # of the kernel, as the interpreter has converted them.
    call = interpreter.GridExecutor.__call__

    def with_a_copy_for_the_grid(executor: Any, *args: Any, **kwargs: Any) -> None:
        if callable(grid := executor.grid):
            executor.grid = lambda meta: grid(dict(meta))
        call(executor, *args, **kwargs)

    interpreter.GridExecutor.__call__ = with_a_copy_for_the_grid
    # The persistent matmul asks the GPU how many processors it has.
    batch_invariant.num_compute_units = lambda device: 4


if IN_TIER:
    prepare()


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many processors the persistent matmul finds."""
    import vllm.model_executor.layers.batch_invariant as batch_invariant

    return lambda count: monkeypatch.setattr(batch_invariant, "num_compute_units", lambda device: count)


@pytest.fixture
def blas_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: the interpreter's own product."""
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "create_dot", STOCK["dot"])


@pytest.fixture
def split_keys_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: the attention may split the keys of a decode step, which batch-invariant mode forbids."""
    import vllm.v1.attention.ops.triton_unified_attention as module

    monkeypatch.setattr(module, "is_batch_invariant", False)
