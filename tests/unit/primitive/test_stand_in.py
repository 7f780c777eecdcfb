"""When cuBLASLt may stand in for vLLM's Triton matmul: where no number of rows gives other bits, and where it takes less time."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lite.primitive.kernels.vllm import gemm
from lite.primitive.kernels.vllm.gemm import FEW, differing_rows

CPU = torch.device("cpu")


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Tensor], Tensor]], None]:
    """Plays the Triton matmul: the plain product, changed by the given function. What was found of another one is forgotten."""
    plain = F.linear

    def plays(change: Callable[[Tensor], Tensor]) -> None:
        differing_rows.cache_clear()
        monkeypatch.setattr(gemm, "triton_linear", lambda x, weight, bias: change(plain(x, weight)))

    yield plays
    differing_rows.cache_clear()


def test_equal_bits_stand_in(triton) -> None:
    triton(lambda y: y)
    assert differing_rows(24, 16, torch.bfloat16, CPU, 4096) is None


@pytest.mark.parametrize("wrong", [1, 17, 65, 129, 513, 1024, 2047, 3073, 4096])
def test_one_number_of_rows_with_other_bits_is_found(triton, wrong: int) -> None:
    def change(y: Tensor) -> Tensor:
        if len(y) == wrong:
            y[-1, -1] += 2 ** -7 * y[-1, -1].abs() + 1e-6
        return y

    triton(change)
    assert differing_rows(24, 16, torch.bfloat16, CPU, 4096) == wrong
    assert (differing_rows(24, 16, torch.bfloat16, CPU, max(FEW)) == wrong) == (wrong <= max(FEW))


def test_every_tier_below_is_known_after_one_question(triton) -> None:
    """A graph's capture may ask for fewer rows than the run before it, and cannot measure then."""
    triton(lambda y: y)
    differing_rows(24, 16, torch.bfloat16, CPU, 8192)
    known = differing_rows.cache_info().misses
    for up_to in (1024, 2048, 4096, 8192):
        differing_rows(24, 16, torch.bfloat16, CPU, up_to)
    assert differing_rows.cache_info().misses == known == 4


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "pays"),
    [
        (1, 4096, 4096, False), (1024, 4096, 4096, True), (1, 151936, 4096, True), (64, 4096, 12288, True),
        (8192, 960, 576, False), (2048, 576, 1536, False), (1024, 49152, 576, True),
    ],
)  # fmt: skip
def test_it_pays_where_the_triton_kernel_takes_longer_than_the_choice(
    monkeypatch: pytest.MonkeyPatch, rows: int, outputs: int, inputs: int, pays: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert gemm._pays(rows, outputs, inputs) == pays
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert gemm._pays(rows, outputs, inputs), "in a graph it always does"


def test_on_a_cpu_nothing_stands_in(triton) -> None:
    triton(lambda y: y + 1)
    x, weight = torch.randn(3, 16), torch.randn(8, 16)
    assert torch.equal(gemm.linear(x, weight, None), F.linear(x, weight) + 1)
