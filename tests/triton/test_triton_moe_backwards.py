"""The fused VJPs of routed experts and relu2, interpreted, against torch_moe.py's and torch.py's formulas at shapes that fit no tile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lite.primitive.compare import bits
from lite.primitive.kernels.vjp import torch as formulas
from lite.primitive.kernels.vjp import torch_moe
from lite.primitive.kernels.vjp import triton_moe as fused
from tests.gradients import assert_gradient, passes
from tests.triton.hopper import errors_of
from tests.triton.test_triton_backwards import close, normal

BF16, BF16_LIMIT = torch.bfloat16, 1e-2  # that of tests/unit/primitive/test_vjp.py
KINDS = ["silu", "relu2_no_mul"]
NEEDS = frozenset({"x", "w13", "w2", "weights"})


def same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


@pytest.fixture
def nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cuts off what does not fit into bf16; here it rounds to nearest, as a GPU does."""
    import triton.language as tl
    from triton.runtime import interpreter

    stock = interpreter._convert_float

    def convert(data: Any, of: Any, to: Any, mode: Any) -> Any:
        if to != tl.bfloat16:
            return stock(data, of, to, mode)
        return torch.tensor(data, dtype=torch.float32).to(BF16).view(torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture
def fp32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "grouped_rows", torch_moe.grouped_rows)
    monkeypatch.setattr(fused, "grouped_outer", torch_moe.grouped_outer)


@pytest.mark.parametrize(("T", "H", "M"), [(1, 1, 1), (5, 40, 12), (3, 2500, 7)])
def test_rows_of_tokens_and_the_same_times_their_weights(T: int, H: int, M: int) -> None:
    d_out, token, weight = normal(T, H), torch.arange(M) * 2 % T, normal(M, seed=1)
    rows, weighted = fused.gather(d_out, token, weight)
    want = d_out[token] * weight[:, None]
    assert torch.equal(rows, d_out[token]) and torch.equal(weighted, want)
    assert same_bits(fused.gather(d_out, token, weight), (rows, weighted))
    if M > 1:
        assert not torch.equal(fused.gather(d_out, token.roll(1), weight)[0], rows), "another token must be noticed"
        assert not close(fused.gather(d_out, token, weight.roll(1))[1], want), "another row's weight must be noticed"


def want_activation(kind: str, up: Tensor, d_mixed: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    active, back = torch_moe.ACTIVATIONS[kind](up)
    return active, (d_mixed.float() * active.float()).sum(-1), back(d_mixed.float() * weight[:, None])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (9, 40), (3, 2500)])
def test_an_activation_made_again_and_its_gradient_follow_the_formula(rows: int, size: int, kind: str) -> None:
    up, d_mixed, weight = normal(rows, (1 + fused.GATED[kind]) * size), normal(rows, size, seed=1), normal(rows, seed=2, mean=2.0)
    got, want = fused.activation(kind, up, d_mixed, weight), want_activation(kind, up, d_mixed, weight)
    assert [g.shape for g in got] == [w.shape for w in want] and all(map(close, got, want))
    assert same_bits(fused.activation(kind, up, d_mixed, weight), got)
    other = fused.activation(kind, up.roll(size, 1) if kind == "silu" else -up, d_mixed, weight)
    assert not any(map(close, other, want)), "gate taken for up, or another sign, must be noticed in all three"
    scaled = fused.activation(kind, up, d_mixed, 2 * weight)
    assert [close(g, w) for g, w in zip(scaled, want, strict=True)] == [True, True, False], "only what flows back has the weight"
    assert all(g.isnan().all() for g in fused.activation(kind, torch.full_like(up, torch.nan), d_mixed, weight)), "a NaN must stay one"


@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_is_rounded_as_the_forward_rounds_it(kind: str, nearest: None) -> None:
    """numpy's exp is not torch's in the last bit of fp32, which in some ten thousand values decides how one is rounded to bf16. Planted:
    silu is not rounded before its product."""
    up, d_mixed, weight = (2 * normal(40, (1 + fused.GATED[kind]) * 500)).to(BF16), normal(40, 500, seed=1).to(BF16), normal(40, seed=2)
    got, want = fused.activation(kind, up, d_mixed, weight), want_activation(kind, up, d_mixed, weight)
    assert [g.dtype for g in got] == [BF16, torch.float32, BF16]
    differ = lambda a: (bits(a) != bits(want[0])).float().mean().item()
    assert differ(got[0]) <= (1e-3 if kind == "silu" else 0.0)
    assert passes(got[1], want[1], 1e-3) and passes(got[2], want[2], BF16_LIMIT)
    if kind == "silu":
        gate, second = up.float().chunk(2, dim=-1)
        assert differ((torch.nn.functional.silu(gate) * second).to(BF16)) > 0.1


@pytest.mark.parametrize(("T", "k", "H"), [(1, 3, 1), (5, 1, 40), (7, 6, 2500)])
def test_a_tokens_rows_are_added_in_the_order_of_k(T: int, k: int, H: int) -> None:
    rows, position = normal(T * k, H), torch.randperm(T * k, generator=torch.Generator().manual_seed(0)).view(T, k)
    want = torch.zeros(T, H)
    for j in range(k):
        want += rows[position[:, j]]
    got = fused.combine(rows, position)
    assert torch.equal(got, want) and same_bits((fused.combine(rows, position),), (got,))
    if k > 2:
        assert not torch.equal(fused.combine(rows, position.roll(1, 1)), want), "another order must be noticed"
    if T > 1:
        assert not close(fused.combine(rows, position.roll(1, 0)), want), "another token's rows must be noticed"


@pytest.mark.parametrize("shape", [(1,), (9, 40), (3, 2500), (2, 3, 700)], ids=str)
def test_relu2s_gradient_follows_the_formula(shape: tuple[int, ...]) -> None:
    x, dy = normal(*shape, mean=0.5), normal(*shape, seed=1)
    want = formulas.relu2({"x": x}, NEEDS, {"y": dy})["x"]
    got = fused.relu2(x, dy)
    assert close(got, want) and same_bits((fused.relu2(x, dy),), (got,))
    assert not close(fused.relu2(-x, dy), want), "another sign must be noticed"
    assert fused.relu2(torch.full(shape, torch.nan), dy).isnan().all(), "a NaN must stay one"


def case(kind: str, k: int, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """Seven experts, of which the second and the last have no token."""
    T, H, F, E = 13, 48, 32, 7
    chosen = torch.tensor([0, 2, 3, 4, 5])
    ids = chosen[torch.rand(T, 5, generator=torch.Generator().manual_seed(k)).argsort(-1)[:, :k]].int()
    values = {
        "x": normal(T, H).to(dtype), "w13": (normal(E, (1 + fused.GATED[kind]) * F, H) / 7).to(dtype),
        "w2": (normal(E, H, F) / 6).to(dtype), "weights": normal(T, k, seed=1, mean=1.0), "ids": ids, "activation": kind,
    }  # fmt: skip
    return values, {"y": normal(T, H, seed=2).to(dtype)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 4])
def test_routed_experts_gradients_follow_the_formula(kind: str, k: int, fp32_products: None, poisoned_memory: None) -> None:
    values, d = case(kind, k, torch.float32)
    got, want = fused.routed_experts(values, NEEDS, d), torch_moe.routed_experts(values, NEEDS, d)
    again = fused.routed_experts(values, NEEDS, d)
    others = fused.routed_experts(values | {"ids": values["ids"].roll(1, 0)}, NEEDS, d)
    assert got.keys() == NEEDS
    for name in NEEDS:
        assert got[name].dtype == want[name].dtype and close(got[name], want[name]), name
        assert same_bits((again[name],), (got[name],)), name
        assert not close(others[name], want[name]), f"another token's experts must be noticed in {name}"


@pytest.mark.parametrize("missing", sorted(NEEDS))
def test_an_argument_that_needs_no_gradient_gets_none(missing: str, fp32_products: None) -> None:
    values, d = case("silu", 2, torch.float32)
    assert fused.routed_experts(values, NEEDS - {missing}, d).keys() == NEEDS - {missing}


@pytest.mark.parametrize("kind", KINDS)
def test_products_on_tensor_cores_give_the_same_gradients(kind: str, nearest: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a GPU computes, on a CPU. It rounds W2^T dout, du and the gradients of weights to bf16 once more than the formula does,
    hence bf16's limit. Planted: the rows of another expert."""
    values, d = case(kind, 3, BF16)
    want, got = torch_moe.routed_experts(values, NEEDS, d), fused.routed_experts(values, NEEDS, d)
    stock = fused.grouped_rows
    monkeypatch.setattr(fused, "grouped_rows", lambda a, w, ends: stock(a, w.roll(1, 0), ends))
    wrong = fused.routed_experts(values, NEEDS, d)
    for name in NEEDS:
        assert got[name].dtype == want[name].dtype and got[name].shape == want[name].shape, name
        assert_gradient(got[name], want[name], BF16_LIMIT, name)
        assert not passes(wrong[name], want[name], BF16_LIMIT), name


COMPILED = """
from lite.primitive.kernels.vjp import triton_moe
k, BLOCK = triton_moe._kernels(), {"BLOCK": triton_moe.BLOCK}
sizes = lambda *names: dict.fromkeys(names, "i32")

def combine(choices):
    compiled(k.combine, {"rows": "bf16", "position": "i64", "dx": "bf16"}, sizes("H"), {"K": choices} | BLOCK, 4)
"""
OURS = """
compiled(k.gather, {"d_out": "bf16", "token": "i64", "weight": "fp32", "d_rows": "bf16", "weighted": "bf16"}, sizes("H"), BLOCK, 4)
compiled(k.relu2, {"x": "bf16", "dy": "bf16", "dx": "bf16"}, sizes("size"), BLOCK, 4)
for gated in (True, False):
    pointers = dict.fromkeys(("up", "d_mixed", "active", "d_up"), "bf16") | {"weight": "fp32", "d_weight": "fp32"}
    compiled(k.activation, pointers, sizes("F"), {"GATED": gated} | BLOCK, 4)
for choices in (1, 6, 8):
    combine(choices)
"""


def test_the_kernels_compile_for_a_hopper_gpu(tmp_path: Path) -> None:
    assert errors_of(COMPILED + OURS, tmp_path) == ""
    assert "TypeError" in errors_of(COMPILED + "combine(6.5)", tmp_path), "a number of choices that is none"
