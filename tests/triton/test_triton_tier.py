"""The tier runs vLLM's released kernels, interpreted, or fails; what it puts in place of numpy's product is right; its checks can fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lite.primitive.compare import bits
from tests.closeness import FP32_LIMIT, agrees, row_error

ROOT = Path(__file__).parents[2]


def test_the_kernels_are_those_of_the_released_wheel_and_are_interpreted() -> None:
    import vllm
    from triton.runtime.interpreter import InterpretedFunction
    from vllm.model_executor.layers import batch_invariant
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.v1.attention.ops import triton_unified_attention
    from vllm.v1.worker.gpu.sample import logprob

    assert vllm.__version__ == "0.26.0" and Path(sys.prefix) in Path(vllm.__file__).parents
    kernels = [
        batch_invariant.matmul_kernel_persistent,
        batch_invariant._rms_norm_kernel,
        batch_invariant._log_softmax_kernel,
        logprob._topk_log_softmax_kernel,
        fused_moe.fused_moe_kernel,
        triton_unified_attention.kernel_unified_attention,
    ]
    assert all(isinstance(kernel, InterpretedFunction) for kernel in kernels)


def pytest_run(folder: Path, **environment: str) -> str:
    """The output of another pytest over this file that finds the modules of folder first. It must fail and must not skip."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "one_ulp"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(folder)} | environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode not in (0, 5) and "skipped" not in done.stdout, done.stdout
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ["vllm", "triton"])
def test_the_tier_fails_where_vllm_or_triton_cannot_be_imported(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("raise ImportError('planted')\n")
    assert "ImportError: planted" in pytest_run(tmp_path)


def test_the_tier_fails_with_another_vllm(tmp_path: Path) -> None:
    (tmp_path / "vllm-0.25.1.dist-info").mkdir()
    (tmp_path / "vllm-0.25.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.25.1\n")
    assert "version 0.25.1 was not verified" in pytest_run(tmp_path)


def test_the_tier_fails_without_the_interpreter(tmp_path: Path) -> None:
    assert "run `make test-triton`" in pytest_run(tmp_path, TRITON_INTERPRET="0")


def interpreted_dot(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dtype = {torch.float32: tl.float32, torch.float16: tl.float16}[a.dtype]
    handles = [TensorHandle(t.numpy(), dtype) for t in (a, b, d)]
    return torch.from_numpy(InterpreterBuilder().create_dot(*handles, None, 0).data)


def test_the_interpreted_product_is_right_and_a_rows_bits_do_not_depend_on_its_place() -> None:
    a, b, d = torch.randn(64, 32), torch.randn(32, 128), torch.randn(64, 128)
    got = interpreted_dot(a, b, d)
    assert agrees(got, (a.double() @ b.double() + d.double()).float())
    assert torch.equal(bits(interpreted_dot(a.roll(5, 0), b, d.roll(5, 0))), bits(got.roll(5, 0)))
    assert not agrees(got, a @ b)


def test_the_interpreted_product_refuses_a_dtype_that_it_gets_wrong() -> None:
    with pytest.raises(TypeError, match="only right in fp32"):
        interpreted_dot(*(torch.ones(16, 16, dtype=torch.float16) for _ in range(3)))


def test_the_limit_notices_one_wrong_row_among_many_and_a_nan() -> None:
    want = torch.randn(1000, 64)
    want[0] *= 1e6
    wrong, missing = want.clone(), want.clone()
    wrong[500, 3] += 2 * FP32_LIMIT * want[500].abs().max()
    missing[500, 3] = torch.nan
    assert agrees(want.clone(), want) and not agrees(wrong, want) and not agrees(missing, want)
    assert row_error(torch.zeros(2, 2), torch.ones(2, 2)) == 1.0


def test_one_ulp_is_too_little_for_the_limit_and_enough_for_bits() -> None:
    want = torch.randn(8, 64)
    got = torch.nextafter(want, torch.tensor(torch.inf))
    assert agrees(got, want) and (bits(got) != bits(want)).all()
