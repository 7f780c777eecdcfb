"""Mamba-2's reference kernels against fp64 formulas: the recurrence token by token, the direct convolution, the norm by parts.

Limits as in test_kernels_contract (fp32: 2e-6 of the largest result; bf16: one step, and 99 of 100 elements equal), except for the scan
in fp32: 1e-5. What is left of a state after s tokens is exp of a sum that reaches about -100 in a chunk; its rounding, 100 * 6e-8, is the
relative error of everything it multiplies.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lite.primitive.compare import bits
from lite.primitive.kernels import reference
from lite.primitive.kernels.visible import SSDShape
from lite.primitive.parallel.packing import Seqlens
from tests import formulas
from tests.invariance import batch_violations, row_violations
from tests.mamba import SMALL, ScanInputs
from tests.unit.primitive.test_kernels_contract import complaint

SCAN_LIMIT = 1e-5
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
LENGTHS = [1, 2, 3, 16, 17, 40]


def conv_inputs(lengths: list[int], dtype: torch.dtype, C: int = 23, W: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and a history for each sequence."""
    tensors = torch.randn(sum(lengths), C), torch.randn(C, W) / 2, torch.randn(C) / 2, torch.randn(len(lengths), W - 1, C)
    return tuple(t.to(dtype) for t in tensors)  # type: ignore[return-value]


@both_dtypes
@pytest.mark.parametrize("with_history", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("W", [2, 4])
def test_the_convolution_is_its_formula(W: int, with_bias: bool, with_history: bool, dtype: torch.dtype) -> None:
    x, weight, bias, history = conv_inputs(LENGTHS, dtype, W=W)
    b, h = bias if with_bias else None, history if with_history else None
    got = reference.causal_conv1d(x, weight, b, h, Seqlens.of(LENGTHS, LENGTHS))
    want = formulas.causal_conv1d(
        x.double(), weight.double(), b.double() if with_bias else None, h.double() if with_history else None, LENGTHS, dtype
    )
    assert got.dtype == dtype and complaint(got, want, dtype) is None, complaint(got, want, dtype)


def one_token(rows: Tensor, weight: Tensor, bias: Tensor, taps: list[int]) -> Tensor:
    acc = bias.float()
    for w in taps:
        acc = acc + weight[:, w].float() * rows[w].float()
    return (acc / (1 + torch.exp(-acc))).to(rows.dtype)


def test_the_convolution_adds_its_taps_to_the_bias_in_order() -> None:
    """In bits: the sum from the other end is another number."""
    x, weight, bias, _ = conv_inputs([50], torch.float32)
    got = reference.causal_conv1d(x, weight, bias, None, Seqlens.of([50], [50]))
    forwards, backwards = (
        torch.stack([one_token(x[t - 3 : t + 1], weight, bias, taps) for t in range(3, 50)]) for taps in ([0, 1, 2, 3], [3, 2, 1, 0])
    )
    assert torch.equal(bits(got[3:]), bits(forwards))
    assert not torch.equal(bits(got[3:]), bits(backwards))


@pytest.mark.usefixtures("all_threads")
@both_dtypes
def test_documents_shorter_than_the_convolution_are_each_as_alone(dtype: torch.dtype) -> None:
    lengths = [1, 2, 3, 1, 1, 3, 2, 40]
    x, weight, bias, _ = conv_inputs(lengths, dtype)
    conv = lambda x, _, __, seqlens, ___: reference.causal_conv1d(x, weight, bias, None, seqlens)
    assert batch_violations(conv, x, x, x, lengths, 1.0) == []
    leaky = lambda x, _, __, seqlens, ___: reference.causal_conv1d(x, weight, bias, None, Seqlens.of([len(x)], [len(x)]))
    assert batch_violations(leaky, x, x, x, lengths, 1.0)


@both_dtypes
def test_a_convolution_cut_anywhere_goes_on_from_its_history(dtype: torch.dtype) -> None:
    x, weight, bias, _ = conv_inputs([12], dtype)
    whole = reference.causal_conv1d(x, weight, bias, None, Seqlens.of([12], [12]))
    padded = torch.cat([x.new_zeros(3, x.shape[1]), x])
    for cut in range(1, 12):
        for stop in {cut + 1, 12}:
            n = stop - cut
            rest = reference.causal_conv1d(x[cut:stop], weight, bias, padded[None, cut : cut + 3], Seqlens.of([n], [n]))
            assert torch.equal(bits(rest), bits(whole[cut:stop])), (cut, stop)
    wrong = reference.causal_conv1d(x[5:], weight, bias, padded[None, 4:7], Seqlens.of([7], [7]))
    assert not torch.equal(bits(wrong), bits(whole[5:])), "a history one row off goes unnoticed"


@both_dtypes
def test_a_row_of_the_convolution_does_not_depend_on_its_company(dtype: torch.dtype) -> None:
    x, weight, bias, history = conv_inputs([1] * 40, dtype)
    run = lambda x, history: reference.causal_conv1d(x, weight, bias, history, Seqlens.of([1] * len(x), [1] * len(x)))
    assert row_violations(run, x, history) == []


@both_dtypes
@pytest.mark.parametrize(
    "shape",
    [SMALL, SSDShape(4, 8, 1, 16, 16), SSDShape(3, 8, 3, 16, 12), SSDShape(2, 16, 1, 32, 64)],
    ids=["two groups", "one", "each", "64"],
)
@pytest.mark.parametrize("given", [False, True])
def test_the_scan_is_the_recurrence(given: bool, shape: SSDShape, dtype: torch.dtype) -> None:
    inputs = ScanInputs.random(sum(LENGTHS) + 90, shape, dtype)
    lengths = [*LENGTHS, 90]
    boundary = torch.randn(len(lengths), shape.heads, shape.head_dim, shape.state) if given else None
    y, end = inputs.scan(lengths, boundary)
    parameters = (t.double() for t in (inputs.xbc, inputs.dt, inputs.A, inputs.D, inputs.dt_bias))
    want, want_end = formulas.ssd_scan(*parameters, boundary.double() if given else None, lengths, shape, dtype)
    assert y.dtype == dtype and end.dtype == torch.float32
    assert complaint(y, want, dtype, SCAN_LIMIT) is None, complaint(y, want, dtype, SCAN_LIMIT)
    assert complaint(end, want_end, torch.float32, SCAN_LIMIT) is None, complaint(end, want_end, torch.float32, SCAN_LIMIT)


def test_the_scan_gives_the_last_rows_only_where_fewer_are_asked_for() -> None:
    inputs = ScanInputs.random(60, SMALL, torch.float32)
    whole, boundary = inputs.scan([20, 40])
    y, end = reference.ssd_scan(inputs.xbc, inputs.dt, inputs.A, inputs.D, inputs.dt_bias, None, Seqlens.of([1, 25], [20, 40]), SMALL)
    assert torch.equal(bits(y), bits(torch.cat([whole[19:20], whole[35:]]))) and torch.equal(bits(end), bits(boundary))


WRONG_SCANS: dict[str, Callable[[ScanInputs], ScanInputs]] = {
    "no skip": lambda i: ScanInputs(i.xbc, i.dt, i.A, 0 * i.D, i.dt_bias, i.shape),
    "no bias of the step": lambda i: ScanInputs(i.xbc, i.dt, i.A, i.D, 0 * i.dt_bias, i.shape),
    "B and C exchanged": lambda i: ScanInputs(
        torch.cat([i.xbc[:, :32], i.xbc[:, 64:], i.xbc[:, 32:64]], 1), i.dt, i.A, i.D, i.dt_bias, i.shape
    ),
    "heads of the other group": lambda i: ScanInputs(
        torch.cat([i.xbc[:, :32], i.xbc[:, 32:].unflatten(1, (2, 2, 16)).flip(2).flatten(1)], 1), i.dt, i.A, i.D, i.dt_bias, i.shape
    ),
    "A rounded to bf16": lambda i: ScanInputs(i.xbc, i.dt, i.A.bfloat16().float(), i.D, i.dt_bias, i.shape),
}


@pytest.mark.parametrize("name", WRONG_SCANS)
def test_a_wrong_scan_is_noticed(name: str) -> None:
    inputs = ScanInputs.random(40, SMALL, torch.float32)
    parameters = (t.double() for t in (inputs.xbc, inputs.dt, inputs.A, inputs.D, inputs.dt_bias))
    want = formulas.ssd_scan(*parameters, None, [40], SMALL, torch.float32)[0]
    assert complaint(WRONG_SCANS[name](inputs).scan([40])[0], want, torch.float32, SCAN_LIMIT)


@pytest.mark.usefixtures("all_threads")
@both_dtypes
@pytest.mark.parametrize("M, groups", [(48, 1), (48, 3), (99, 3)])
def test_the_gated_norm_is_its_formula_and_row_invariant(M: int, groups: int, dtype: torch.dtype) -> None:
    x, gate, weight = torch.randn(40, M).to(dtype), (2 * torch.randn(40, M)).to(dtype), (1 + 0.1 * torch.randn(M)).to(dtype)
    got = reference.gated_rms_norm(x, gate, weight, groups, 1e-5)
    want = formulas.gated_rms_norm(x.double(), gate.double(), weight.double(), groups, 1e-5, dtype)
    assert got.dtype == dtype and complaint(got, want, dtype) is None, complaint(got, want, dtype)
    assert row_violations(lambda a, b: reference.gated_rms_norm(a, b, weight, groups, 1e-5), x, gate) == []


def norm_before_gate(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    x32 = x.float().unflatten(-1, (groups, -1))
    normed = (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    return (normed * torch.nn.functional.silu(gate.float())).to(x.dtype) * weight


def rounded_once(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    return reference.gated_rms_norm(x.float(), gate.float(), weight.float(), groups, eps).to(x.dtype)


def over_all_groups(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    return reference.gated_rms_norm(x, gate, weight, 1, eps)


@pytest.mark.parametrize("planted", [norm_before_gate, rounded_once, over_all_groups])
def test_a_wrong_gated_norm_is_noticed(planted: Callable[..., Tensor]) -> None:
    x, gate, weight = torch.randn(40, 48).bfloat16(), torch.randn(40, 48).bfloat16(), (1 + 0.1 * torch.randn(48)).bfloat16()
    want = formulas.gated_rms_norm(x.double(), gate.double(), weight.double(), 3, 1e-5, torch.bfloat16)
    assert complaint(planted(x, gate, weight, 3, 1e-5), want, torch.bfloat16)


@both_dtypes
def test_no_argument_is_changed(dtype: torch.dtype) -> None:
    seqlens = Seqlens.of([40], [40])
    i = ScanInputs.random(40, SMALL, dtype)
    calls = [
        (reference.causal_conv1d, conv_inputs([40], dtype), (seqlens,)),
        (reference.ssd_scan, (i.xbc, i.dt, i.A, i.D, i.dt_bias, torch.randn(1, 4, 8, 16)), (seqlens, SMALL)),
        (reference.gated_rms_norm, (i.xbc, i.xbc.flip(0), i.xbc[0].clone()), (2, 1e-5)),
    ]
    for kernel, tensors, rest in calls:
        before = [bits(t).clone() for t in tensors]
        kernel(*tensors, *rest)
        assert all(torch.equal(bits(t), b) for t, b in zip(tensors, before, strict=True)), kernel
