"""VJPs of router and experts against ATen's autograd of fp64 formulas; limits and criterion of test_vjp."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lite.primitive.compare import bits
from lite.primitive.kernels.vjp import torch_moe
from lite.primitive.ops.bridges import Ops, reference_ops
from tests import formulas
from tests.gradients import assert_gradient, passes
from tests.unit.primitive.test_vjp import DTYPES, LIMITS, Case, backward, d_outputs, leaves


def cases(ops: Ops, dtype: torch.dtype) -> dict[str, Case]:
    T, E, k = 45, 6, 3
    ids = torch.rand(T, E - 1).argsort(-1)[:, :k].int()  # the last expert has no token
    bias = torch.randn(24) / 4

    def of_experts(activation: str, G: int) -> Case:
        return Case(
            lambda x, w, w13, w2: (ops.routed_experts(x, w13, w2, w.float(), ids, activation),),
            lambda x, w, w13, w2: (formulas.routed_experts(x, w13, w2, w, ids, activation, dtype),),
            {"x": (T, 48), "weights": (T, k)}, {"w13": (E, G, 48), "w2": (E, 48, 32)},
        )  # fmt: skip

    def of_softmax(renormalize: bool) -> Case:
        return Case(
            lambda z: ops.topk_softmax(z, 4, renormalize)[:1], lambda z: formulas.topk_softmax(z, 4, renormalize)[:1], {"logits": (T, 24)}
        )

    def of_groups(renormalize: bool) -> Case:
        return Case(
            lambda z: ops.grouped_topk(z.float(), bias, 6, 4, 2, renormalize)[:1],
            lambda z: formulas.grouped_topk(z, bias.double(), 6, 4, 2, renormalize)[:1],
            {"logits": (T, 24)},
        )

    return {
        "relu2": Case(lambda x: (ops.relu2(x),), lambda x: (formulas.relu2(x, dtype),), {"x": (19, 57)}),
        "router_logits": Case(
            lambda x, w: (ops.router_logits(x, w, torch.float32),),
            lambda x, w: (formulas.linear(x, w, None, torch.float32),),
            {"x": (23, 96)}, {"weight": (40, 96)},
        ),
        "topk_softmax": of_softmax(False), "topk_softmax renormalized": of_softmax(True),
        "grouped_topk": of_groups(False), "grouped_topk renormalized": of_groups(True),
        "experts with silu": of_experts("silu", 64), "experts with relu2": of_experts("relu2_no_mul", 32),
    }  # fmt: skip


NAMES = list(cases(reference_ops(), torch.float32))


def distinct(ours: dict[str, Tensor], wide: dict[str, Tensor]) -> None:
    """Logits without ties, which bf16 would have and the formula order otherwise."""
    if "logits" in ours:
        values = torch.stack([torch.randperm(24) for _ in range(45)]).sub(12).div(8)
        with torch.no_grad():
            ours["logits"].copy_(values)
            wide["logits"].copy_(values)


@pytest.mark.parametrize("kind", ["random", "sparse"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_vjp_is_the_gradient_of_the_formula(name: str, dtype: torch.dtype, kind: str) -> None:
    case = cases(reference_ops(), dtype)[name]
    ours, wide = leaves(case, dtype)
    distinct(ours, wide)
    outs, want_outs = case.ours(*ours.values()), case.formula(*wide.values())
    dys = d_outputs(outs, kind, {0})
    backward(outs, dys)
    backward(want_outs, dys)
    for leaf in ours:
        got, want = ours[leaf].grad, wide[leaf].grad
        assert got.dtype == (torch.float32 if leaf in case.weights else dtype), leaf
        assert_gradient(got, want, LIMITS[dtype], leaf)
        if leaf in ("w13", "w2"):
            assert got[-1].count_nonzero() == 0, "an expert without tokens"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_zero_gradient_stays_zero_and_a_second_backward_gives_the_same_bytes(name: str, dtype: torch.dtype) -> None:
    case = cases(reference_ops(), dtype)[name]
    ours, wide = leaves(case, dtype)
    distinct(ours, wide)
    outs = case.ours(*ours.values())
    found = []
    for dys in [d_outputs(outs, "zero", {0}), *[d_outputs(outs, "random", {0})] * 2]:
        backward(outs, dys, retain_graph=True)
        found.append({leaf: t.grad.clone() for leaf, t in ours.items()})
        for t in ours.values():
            t.grad = None
    for leaf in ours:
        assert found[0][leaf].count_nonzero() == 0 and found[1][leaf].count_nonzero(), leaf
        assert torch.equal(bits(found[1][leaf]), bits(found[2][leaf])), leaf


def test_ids_and_the_routers_bias_carry_no_gradient() -> None:
    logits, bias = torch.randn(5, 24, requires_grad=True), nn.Parameter(torch.randn(24))
    weights, ids = reference_ops().grouped_topk(logits, bias, 6, 4, 2, True)
    assert weights.requires_grad and not ids.requires_grad
    weights.square().sum().backward()
    assert bias.grad is None and logits.grad.count_nonzero()
    assert not reference_ops().topk_softmax(logits, 4, True)[1].requires_grad


def expert_values(dtype: torch.dtype) -> tuple[dict, dict[str, Tensor]]:
    T, E, k = 45, 6, 3
    values = {
        "x": torch.randn(T, 48).to(dtype), "w13": (torch.randn(E, 64, 48) / 7).to(dtype), "w2": (torch.randn(E, 48, 32) / 6).to(dtype),
        "weights": torch.rand(T, k), "ids": torch.rand(T, E - 1).argsort(-1)[:, :k].int(), "activation": "silu",
    }  # fmt: skip
    return values, {"y": torch.randn(T, 48).to(dtype)}


@pytest.mark.parametrize("missing", ["x", "w13", "w2", "weights"])
def test_an_argument_that_needs_no_gradient_costs_none(missing: str) -> None:
    values, d = expert_values(torch.float32)
    needs = frozenset({"x", "w13", "w2", "weights"} - {missing})
    assert torch_moe.routed_experts(values, needs, d).keys() == needs


def test_nothing_uninitialised_reaches_a_gradient(poisoned_memory: None) -> None:
    values, d = expert_values(torch.float32)
    assert all(g.isfinite().all() for g in torch_moe.routed_experts(values, frozenset({"x", "w13", "w2", "weights"}), d).values())


def test_the_gpus_backwards_are_there_for_every_operation() -> None:
    from lite.primitive.kernels import reference
    from lite.primitive.kernels.vjp import cuda, triton_moe

    Ops(reference, cuda)
    assert cuda.routed_experts is triton_moe.routed_experts


def unnormalized(values: dict, needs: frozenset, d: dict) -> dict[str, Tensor]:
    return torch_moe.topk_softmax(values | {"renormalize": False}, needs, d)


def by_one_expert_only(values: dict, needs: frozenset, d: dict) -> dict[str, Tensor]:
    """Forgets that the weights share a sum."""
    ids, z = values["ids"].long(), values["logits"]
    w = z.gather(1, ids).softmax(-1)
    return {"logits": torch.zeros_like(z).scatter(1, ids, w * (1 - w) * d["weights"])}


@pytest.mark.parametrize("planted", [unnormalized, by_one_expert_only])
def test_a_wrong_router_gradient_is_noticed(planted: Callable[..., dict[str, Tensor]]) -> None:
    z, dw = torch.randn(45, 24), torch.randn(45, 4)
    wide = z.double().requires_grad_()
    weights, ids = formulas.topk_softmax(wide, 4, True)
    weights.backward(dw.double())
    values = {"logits": z, "ids": ids.int(), "renormalize": True}
    assert_gradient(torch_moe.topk_softmax(values, frozenset({"logits"}), {"weights": dw})["logits"], wide.grad, 1e-5, "logits")
    assert not passes(planted(values, frozenset({"logits"}), {"weights": dw})["logits"], wide.grad, 1e-5)
