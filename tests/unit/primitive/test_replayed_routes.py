"""Weights of given experts: the live router's at those ids, with a gradient at each, against fp64 autograd of the formula.

Tolerance, set beforehand: where the given ids are the live choice, weights agree within a few roundings of fp32 (1e-6).
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lite.primitive.modules import moe
from lite.primitive.modules.moe import MoEConfig, SigmoidRouter, SoftmaxRouter
from lite.primitive.ops.bridges import reference_ops
from tests import formulas
from tests.gradients import assert_gradient, passes
from tests.unit.primitive.test_vjp import LIMITS

T, H, E, K = 45, 48, 24, 4
KINDS = [(kind, renormalize) for kind in ("softmax", "sigmoid") for renormalize in (True, False)]


def router(kind: str, renormalize: bool, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    config = MoEConfig(experts=E, k=K, intermediate=8, router=kind, activation="silu", renormalize=renormalize, groups=1, scale=2.5)  # type: ignore[arg-type]
    made = {"softmax": SoftmaxRouter, "sigmoid": SigmoidRouter}[kind](H, config, reference_ops(), dtype)
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.copy_(torch.randn(p.shape) * (1.0 if name == "bias" else 2 * H**-0.5))
    return made


def formula(kind: str, renormalize: bool, x: Tensor, weight: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    logits = formulas.linear(x, weight, None, dtype if kind == "softmax" else torch.float32)
    chosen = (logits.softmax(-1) if kind == "softmax" else torch.sigmoid(logits)).gather(1, ids.long())
    return chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen


def any_routes() -> Tensor:
    return torch.rand(T, E).argsort(-1)[:, :K].short()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "renormalize"), KINDS)
def test_values_and_gradients_at_any_ids_are_the_formulas(kind: str, renormalize: bool, dtype: torch.dtype) -> None:
    made, routes = router(kind, renormalize, dtype), any_routes()
    x = torch.randn(T, H).to(dtype).requires_grad_()
    wide_x, wide_weight = x.detach().double().requires_grad_(), made.weight.detach().double().requires_grad_()
    weights, ids = made(x, routes)
    want = formula(kind, renormalize, wide_x, wide_weight, routes, dtype)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32 and torch.equal(ids, routes.int())
    torch.testing.assert_close(weights.double(), want, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-7)
    dw = torch.randn(T, K)
    weights.backward(dw)
    want.backward(dw.double())
    assert_gradient(x.grad, wide_x.grad, LIMITS[dtype], "x")
    assert_gradient(made.weight.grad, wide_weight.grad, LIMITS[dtype], "weight")


@pytest.mark.parametrize(("kind", "renormalize"), KINDS)
def test_at_the_live_choice_it_is_the_ordinary_path_within_roundings(kind: str, renormalize: bool) -> None:
    made, found = router(kind, renormalize), []
    x, dw = torch.randn(T, H), torch.randn(T, K)
    live = made(x)[1]
    for routes in (None, live):
        made.zero_grad()
        leaf = x.clone().requires_grad_()
        weights, ids = made(leaf, routes)
        weights.backward(dw)
        assert torch.equal(ids, live)
        found.append((weights.detach(), leaf.grad, made.weight.grad.clone()))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=1e-7)
    for got, want in zip(found[1][1:], found[0][1:], strict=True):
        assert_gradient(got, want, 1e-5, kind)


def live_only(made: torch.nn.Module, x: Tensor, routes: Tensor) -> Tensor:
    """Weights, but no gradient, outside the live choice."""
    live, weights = made(x)[1], made(x, routes)[0]
    inside = (routes[..., None].int() == live[:, None]).any(-1)
    return torch.where(inside, weights, weights.detach())


def biased(made: torch.nn.Module, x: Tensor, routes: Tensor) -> Tensor:
    """The bias, which only chooses, in the weights."""
    logits = made.ops.router_logits(x, made.weight, torch.float32) + made.bias
    chosen = torch.sigmoid(logits.gather(1, routes.long()))
    return chosen / chosen.sum(-1, keepdim=True)


def over_all(made: torch.nn.Module, x: Tensor, routes: Tensor) -> Tensor:
    """The softmax without its second division."""
    return torch.nn.functional.linear(x, made.weight).softmax(-1).gather(1, routes.long())


@pytest.mark.parametrize(("kind", "planted"), [("softmax", live_only), ("sigmoid", live_only), ("sigmoid", biased), ("softmax", over_all)])
def test_a_wrong_weight_or_gradient_is_noticed(kind: str, planted: Callable[..., Tensor]) -> None:
    made, routes, dw = router(kind, True), any_routes(), torch.randn(T, K)
    x = torch.randn(T, H, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    formula(kind, True, wide, made.weight.detach().double(), routes, torch.float32).backward(dw.double())
    planted(made, x, routes).backward(dw)
    assert not passes(x.grad, wide.grad, LIMITS[torch.float32])


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_minus_one_takes_the_live_choice_of_its_row_and_never_expert_0(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x, routes = router(kind, True), torch.randn(T, H), any_routes()
    routes[::3] = -1

    def honoured() -> bool:
        weights, ids = made(x, routes)
        rest = torch.arange(T) % 3 != 0
        own = torch.equal(ids[::3], made(x)[1][::3]) and torch.equal(ids[rest], routes[rest].int())
        return own and torch.allclose(weights[::3], made(x)[0][::3], rtol=1e-6)

    assert honoured()
    monkeypatch.setattr(moe, "replayed", lambda routes, live: routes.clamp(min=0).int())
    assert not honoured()


def test_experts_that_became_improbable_divide_no_zero_by_zero() -> None:
    made = router("softmax", True)
    with torch.no_grad():
        made.weight.mul_(400)
    x = torch.randn(T, H, requires_grad=True)
    last = made(x)[0].new_tensor(torch.nn.functional.linear(x, made.weight).argsort(-1)[:, :K].tolist()).short()
    weights, _ = made(x, last)
    weights.square().sum().backward()
    assert torch.nn.functional.linear(x, made.weight).softmax(-1).gather(1, last.long()).sum(-1).min() == 0
    assert torch.allclose(weights.sum(-1), torch.ones(T)) and x.grad.isfinite().all()
