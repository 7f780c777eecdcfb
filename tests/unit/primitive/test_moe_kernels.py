"""The reference router and experts: values against fp64 formulas, and no influence of a token's company on its bytes.

Limits as in test_kernels_contract: fp32 2e-6 of the largest result; bf16 one step, and 99 of 100 elements equal. Weights are fp32 in
both dtypes; a softmax or sigmoid costs an exp and a division more, so they get 2e-6 too.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lite.primitive.compare import bits
from lite.primitive.kernels import reference
from lite.primitive.kernels.reference.gemm import ROWS
from tests import formulas
from tests.invariance import row_violations
from tests.unit.primitive.test_kernels_contract import complaint

DTYPES = [torch.float32, torch.bfloat16]
ACTIVATIONS = {"silu": 2, "relu2_no_mul": 1}
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
both_activations = pytest.mark.parametrize("activation", ACTIVATIONS)
renormalized = pytest.mark.parametrize("renormalize", [True, False])


def experts(activation: str, dtype: torch.dtype, E: int = 6, H: int = 48, F: int = 32) -> tuple[Tensor, Tensor]:
    w13, w2 = torch.randn(E, ACTIVATIONS[activation] * F, H) * H**-0.5, torch.randn(E, H, F) * F**-0.5
    return w13.to(dtype), w2.to(dtype)


def routed(T: int, E: int = 6, k: int = 3) -> tuple[Tensor, Tensor]:
    """Weights and different experts of T tokens; expert 0 is chosen by all, the last by none."""
    ids = torch.cat([torch.zeros(T, 1), 1 + torch.rand(T, E - 2).argsort(-1)[:, : k - 1]], dim=1)
    return torch.rand(T, k), ids.int()


@both_dtypes
@pytest.mark.parametrize("T", [1, 2, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 1])
@both_activations
def test_experts_are_their_formula_where_blocks_pad(activation: str, T: int, dtype: torch.dtype) -> None:
    """Expert 0 has T rows: a block not full, full, and one row over; an expert without tokens has no block."""
    w13, w2 = experts(activation, dtype)
    x, (weights, ids) = torch.randn(T, 48).to(dtype), routed(T)
    got = reference.routed_experts(x, w13, w2, weights, ids, activation)
    want = formulas.routed_experts(x.double(), w13.double(), w2.double(), weights.double(), ids, activation, dtype)
    assert got.dtype == dtype and got.shape == (T, 48)
    assert complaint(got, want, dtype) is None, complaint(got, want, dtype)


@pytest.mark.usefixtures("all_threads")
@both_dtypes
@both_activations
def test_a_row_of_the_experts_does_not_depend_on_its_company(activation: str, dtype: torch.dtype) -> None:
    """Companies change how many tokens an expert has, and a token's place in its blocks."""
    w13, w2 = experts(activation, dtype)
    run = lambda x, weights, ids: reference.routed_experts(x, w13, w2, weights, ids, activation)
    assert row_violations(run, torch.randn(70, 48).to(dtype), *routed(70)) == []


def test_no_uninitialised_row_reaches_the_result(poisoned_memory: None) -> None:
    w13, w2 = experts("silu", torch.float32)
    got = reference.routed_experts(torch.randn(5, 48), w13, w2, *routed(5), "silu")
    assert torch.empty(3).isnan().all(), "nothing is poisoned, so this test proves nothing"
    assert got.isfinite().all()


@pytest.mark.parametrize("k", [1, 4])
def test_every_number_of_experts_a_token_may_have(k: int) -> None:
    w13, w2 = experts("silu", torch.float32, E=4)
    x, weights = torch.randn(5, 48), torch.rand(5, k)
    ids = torch.rand(5, 4).argsort(-1)[:, :k].int()
    got = reference.routed_experts(x, w13, w2, weights, ids, "silu")
    want = formulas.routed_experts(x.double(), w13.double(), w2.double(), weights.double(), ids, "silu", torch.float32)
    assert complaint(got, want, torch.float32) is None


@pytest.mark.parametrize("E", [5, 128])
@both_dtypes
def test_router_logits_keep_fp32_or_are_the_linear_kernel(dtype: torch.dtype, E: int) -> None:
    x, weight = torch.randn(40, 64).to(dtype), (torch.randn(E, 64) / 8).to(dtype)
    wide = reference.router_logits(x, weight, torch.float32)
    want = formulas.linear(x.double(), weight.double(), None, torch.float32)
    assert wide.dtype == torch.float32 and complaint(wide, want, torch.float32) is None
    assert torch.equal(bits(reference.router_logits(x, weight, dtype)), bits(reference.linear(x, weight, None)))
    assert row_violations(lambda rows: reference.router_logits(rows, weight, torch.float32), x) == []


def assert_routed(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert [t.dtype for t in got] == [torch.float32, torch.int32]
    assert torch.equal(got[1].long(), want[1])
    assert complaint(got[0], want[0], torch.float32) is None, complaint(got[0], want[0], torch.float32)


@both_dtypes
@renormalized
@pytest.mark.parametrize("k", [1, 4, 8])
def test_the_k_largest_of_the_softmax(k: int, renormalize: bool, dtype: torch.dtype) -> None:
    """Logits are distinct multiples of 1/16 in any dtype: no ties, which the formula would order otherwise."""
    logits = torch.stack([torch.randperm(24) for _ in range(40)]).div(16).to(dtype)
    assert_routed(reference.topk_softmax(logits, k, renormalize), formulas.topk_softmax(logits.double(), k, renormalize))
    assert row_violations(lambda z: reference.topk_softmax(z, k, renormalize), torch.randn(40, 24).to(dtype)) == []


@renormalized
@pytest.mark.parametrize("groups, topk_groups, k", [(1, 1, 6), (4, 2, 6), (4, 1, 2), (8, 4, 8)])
def test_groups_first_then_experts_by_biased_scores(groups: int, topk_groups: int, k: int, renormalize: bool) -> None:
    logits, bias = torch.randn(40, 24), torch.randn(24) / 4
    args = (k, groups, topk_groups, renormalize)
    assert_routed(reference.grouped_topk(logits, bias, *args), formulas.grouped_topk(logits.double(), bias.double(), *args))
    assert row_violations(lambda z: reference.grouped_topk(z, bias, *args), logits) == []


def test_of_equal_scores_the_lower_expert_and_the_lower_group_come_first() -> None:
    """Bf16 logits tie often. ATen's topk promises no order among equals; two engines must not choose by chance."""
    flat = torch.zeros(3, 64)
    assert torch.equal(reference.topk_softmax(flat, 4, True)[1], torch.arange(4, dtype=torch.int32).expand(3, 4))
    assert torch.equal(reference.grouped_topk(flat, torch.zeros(64), 4, 8, 2, True)[1], torch.arange(4, dtype=torch.int32).expand(3, 4))
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 0.0]])
    assert reference.topk_softmax(logits, 4, False)[1].tolist() == [[1, 3, 2, 4]]


def test_a_bias_chooses_an_expert_without_entering_its_weight() -> None:
    logits, bias = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([0.0, 0.0, 0.0, 1.0])
    weights, ids = reference.grouped_topk(logits, bias, 2, 1, 1, False)
    assert ids.tolist() == [[3, 0]]
    assert torch.allclose(weights, torch.sigmoid(torch.tensor([[0.0, 3.0]])))


@both_dtypes
def test_relu2_is_its_formula_and_row_invariant(dtype: torch.dtype) -> None:
    x = torch.randn(40, 57).to(dtype)
    got = reference.relu2(x)
    assert got.dtype == dtype and complaint(got, formulas.relu2(x.double(), dtype), dtype) is None
    assert row_violations(reference.relu2, x) == []


def biased_weights(logits: Tensor, bias: Tensor, k: int, groups: int, topk_groups: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    ids = reference.grouped_topk(logits, bias, k, groups, topk_groups, renormalize)[1]
    chosen = (torch.sigmoid(logits) + bias).gather(1, ids.long())
    return chosen / chosen.sum(-1, keepdim=True), ids


def ungrouped(logits: Tensor, bias: Tensor, k: int, groups: int, topk_groups: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    return reference.grouped_topk(logits, bias, k, 1, 1, renormalize)


def not_renormalized(logits: Tensor, bias: Tensor, k: int, groups: int, topk_groups: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    return reference.grouped_topk(logits, bias, k, groups, topk_groups, False)


@pytest.mark.parametrize("planted", [biased_weights, ungrouped, not_renormalized])
def test_a_wrong_router_is_noticed(planted: Callable[..., tuple[Tensor, Tensor]]) -> None:
    logits, bias = torch.randn(40, 24), torch.randn(24) / 4
    want = formulas.grouped_topk(logits.double(), bias.double(), 6, 4, 2, True)
    with pytest.raises(AssertionError):
        assert_routed(planted(logits, bias, 6, 4, 2, True), want)


def one_rounding(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """All in fp32, rounded once at the end."""
    return reference.routed_experts(x.float(), w13.float(), w2.float(), weights, ids, "silu").to(x.dtype)


def weight_after_rounding(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    each = [reference.routed_experts(x, w13, w2, torch.ones_like(weights[:, :1]), ids[:, i : i + 1], "silu") for i in range(ids.shape[1])]
    return sum(w[:, None] * y.float() for w, y in zip(weights.unbind(1), each, strict=True)).to(x.dtype)


@pytest.mark.parametrize("planted", [one_rounding, weight_after_rounding])
def test_experts_rounded_elsewhere_are_noticed(planted: Callable[..., Tensor]) -> None:
    w13, w2 = experts("silu", torch.bfloat16)
    x, (weights, ids) = torch.randn(40, 48).bfloat16(), routed(40)
    want = formulas.routed_experts(x.double(), w13.double(), w2.double(), weights.double(), ids, "silu", torch.bfloat16)
    assert complaint(planted(x, w13, w2, weights, ids), want, torch.bfloat16)


def test_a_weight_given_to_another_choice_is_noticed() -> None:
    w13, w2 = experts("silu", torch.float32)
    x, (weights, ids) = torch.randn(40, 48), routed(40)
    want = formulas.routed_experts(x.double(), w13.double(), w2.double(), weights.double(), ids, "silu", torch.float32)
    assert complaint(reference.routed_experts(x, w13, w2, weights.flip(1), ids, "silu"), want, torch.float32)


def test_blocks_of_as_many_rows_as_there_are_tokens_are_caught() -> None:
    """The obvious loop over experts gives a BLAS another shape for every company."""
    w13, w2 = experts("silu", torch.float32, H=256, F=100)
    x, (weights, ids) = torch.randn(70, 256), routed(70)

    def loop(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(6):
            token, choice = (ids == e).nonzero(as_tuple=True)
            gate, up = (x[token] @ w13[e].T).chunk(2, -1)
            out.index_add_(0, token, weights[token, choice, None] * ((gate / (1 + torch.exp(-gate)) * up) @ w2[e].T))
        return out

    torch.testing.assert_close(loop(x, weights, ids), reference.routed_experts(x, w13, w2, weights, ids, "silu"), rtol=1e-4, atol=1e-5)
    if not row_violations(loop, x, weights, ids):
        pytest.skip("on this CPU the plain product happens to be row-invariant, so it is no planted error here")


@both_dtypes
def test_no_argument_is_changed(dtype: torch.dtype) -> None:
    w13, w2 = experts("silu", dtype)
    x, logits, (weights, ids) = torch.randn(9, 48).to(dtype), torch.randn(9, 24), routed(9)
    calls = [
        (reference.routed_experts, (x, w13, w2, weights, ids), ("silu",)),
        (reference.router_logits, (x, w13[0]), (torch.float32,)),
        (reference.topk_softmax, (logits,), (4, True)),
        (reference.grouped_topk, (logits, torch.randn(24)), (4, 4, 2, True)),
        (reference.relu2, (x,), ()),
    ]
    for kernel, tensors, rest in calls:
        before = [bits(t).clone() for t in tensors]
        kernel(*tensors, *rest)
        assert all(torch.equal(bits(t), b) for t, b in zip(tensors, before, strict=True)), kernel
