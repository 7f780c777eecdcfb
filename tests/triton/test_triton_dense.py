"""vLLM's persistent matmul and RMSNorm agree with the reference, and a row's bits do not depend on its company."""

import pytest
import torch
from torch import Tensor

from lite.primitive.compare import bits
from lite.primitive.kernels import reference
from lite.primitive.kernels.vllm import triton_set
from tests.closeness import agrees
from tests.invariance import row_violations

# past one tile of 128 rows, of 128 columns and of 32 terms, none a multiple
M, N, K = 131, 150, 75


def operands() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(M, K), torch.randn(N, K) * K**-0.5, torch.randn(N)


@pytest.mark.parametrize("biased", [False, True])
def test_linear_agrees_with_the_reference(biased: bool) -> None:
    x, weight, bias = operands()
    got = triton_set.linear(x, weight, bias if biased else None)
    assert agrees(got, reference.linear(x, weight, bias if biased else None))
    assert not agrees(got, reference.linear(x, weight, None if biased else bias))


def test_a_linear_that_reads_one_column_or_one_term_wrong_is_noticed() -> None:
    x, weight, _ = operands()
    want = reference.linear(x, weight, None)
    assert not agrees(triton_set.linear(x, weight.roll(1, 0), None), want)
    assert not agrees(triton_set.linear(torch.cat([x[:, :-1], torch.zeros(M, 1)], 1), weight, None), want)


def test_a_row_of_linear_has_the_same_bits_in_any_company() -> None:
    x, weight, bias = operands()
    assert row_violations(lambda rows: triton_set.linear(rows, weight[:40], bias[:40]), x[:13]) == []


def test_a_row_of_linear_has_the_same_bits_in_another_tile_of_rows() -> None:
    x, weight, bias = operands()
    whole = bits(triton_set.linear(x, weight, bias))
    assert torch.equal(bits(triton_set.linear(x[126:], weight, bias)), whole[126:])
    assert torch.equal(bits(triton_set.linear(x.roll(64, 0), weight, bias)), whole.roll(64, 0))


def test_linear_has_the_same_bits_on_any_number_of_processors(processors) -> None:
    x, weight, _ = operands()
    results = []
    for count in (1, 3, 132):
        processors(count)
        results.append(bits(triton_set.linear(x, weight, None)))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.usefixtures("blas_dot")
def test_a_product_that_rounds_by_a_rows_place_is_caught() -> None:
    x, weight, _ = operands()
    if not (found := row_violations(lambda rows: triton_set.linear(rows, weight[:40], None), x[:13])):
        pytest.skip("on this CPU numpy's product happens to be row-invariant, so it is no planted error here")
    assert "reversed" in found


@pytest.mark.parametrize("H", [64, 1024, 2500])
def test_norms_agree_with_the_reference(H: int) -> None:
    x, residual, weight = torch.randn(9, H), torch.randn(9, H), 1 + 0.1 * torch.randn(H)
    normed, total = triton_set.add_rms_norm(x, residual, weight, 1e-5)
    want, want_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert agrees(triton_set.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert agrees(normed, want) and torch.equal(total, want_total)
    assert not agrees(normed, reference.rms_norm(x, weight, 1e-5)), "a forgotten residual must be noticed"
    assert not agrees(triton_set.rms_norm(x, weight, 1e-3), reference.rms_norm(x, weight, 1e-5)), "and another epsilon"


def test_a_row_of_a_norm_has_the_same_bits_in_any_company() -> None:
    """Long rows, and several: another order of the sum moves the reciprocal root of only one in four of them."""
    x, residual, weight = torch.randn(12, 3000), torch.randn(12, 3000), 1 + 0.1 * torch.randn(3000)
    assert row_violations(lambda a, b: triton_set.add_rms_norm(a, b, weight, 1e-5), x, residual) == []


def test_a_norm_that_reads_its_neighbours_is_caught() -> None:
    x, weight = torch.randn(9, 64), torch.ones(64)
    assert row_violations(lambda rows: triton_set.rms_norm(rows - 1e-6 * rows.mean(0), weight, 1e-5), x)
