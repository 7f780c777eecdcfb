"""VJPs of Mamba-2's kernels against ATen's autograd of fp64 formulas; limits and criterion of test_vjp."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lite.primitive.compare import bits
from lite.primitive.kernels.vjp import torch_mamba
from lite.primitive.ops.bridges import Ops, reference_ops
from lite.primitive.parallel.packing import Seqlens
from tests import formulas
from tests.gradients import assert_gradient, passes
from tests.mamba import SMALL
from tests.unit.primitive.test_vjp import DTYPES, LIMITS, Case, backward, d_outputs, leaves

LENGTHS = [1, 2, 3, 16, 17, 40]
SEQLENS, T = Seqlens.of(LENGTHS, LENGTHS), sum(LENGTHS)
CHANNELS = SMALL.heads * SMALL.head_dim + 2 * SMALL.groups * SMALL.state


def cases(ops: Ops, dtype: torch.dtype) -> dict[str, Case]:
    boundary = torch.randn(len(LENGTHS), SMALL.heads, SMALL.head_dim, SMALL.state)
    history = torch.randn(len(LENGTHS), 3, 23).to(dtype)

    def of_scan(boundary: Tensor | None) -> Case:
        state = None if boundary is None else boundary.double()
        return Case(
            lambda xbc, dt, A_log, D, dt_bias: ops.ssd_scan(xbc, dt, ops.ssm_decay(A_log), D, dt_bias, boundary, SEQLENS, SMALL)[:1],
            lambda xbc, dt, A_log, D, dt_bias: formulas.ssd_scan(xbc, dt, -A_log.exp(), D, dt_bias, state, LENGTHS, SMALL, dtype)[:1],
            {"xbc": (T, CHANNELS), "dt": (T, SMALL.heads)},
            {"A_log": (SMALL.heads,), "D": (SMALL.heads,), "dt_bias": (SMALL.heads,)},
        )

    return {
        "conv": Case(
            lambda x, w, b: (ops.causal_conv1d(x, w, b, None, SEQLENS),),
            lambda x, w, b: (formulas.causal_conv1d(x, w, b, None, LENGTHS, dtype),),
            {"x": (T, 23)},
            {"weight": (23, 4), "bias": (23,)},
        ),
        "conv without bias": Case(
            lambda x, w: (ops.causal_conv1d(x, w, None, None, SEQLENS),),
            lambda x, w: (formulas.causal_conv1d(x, w, None, None, LENGTHS, dtype),),
            {"x": (T, 23)},
            {"weight": (23, 2)},
        ),
        "conv after a history": Case(
            lambda x, w, b: (ops.causal_conv1d(x, w, b, history, SEQLENS),),
            lambda x, w, b: (formulas.causal_conv1d(x, w, b, history.double(), LENGTHS, dtype),),
            {"x": (T, 23)},
            {"weight": (23, 4), "bias": (23,)},
        ),
        "scan": of_scan(None),
        "scan from a boundary": of_scan(boundary),
        "gated norm": Case(
            lambda x, gate, w: (ops.gated_rms_norm(x, gate, w, 3, 1e-5),),
            lambda x, gate, w: (formulas.gated_rms_norm(x, gate, w, 3, 1e-5, dtype),),
            {"x": (19, 96), "gate": (19, 96)},
            {"norm.weight": (96,)},
        ),
        "decay": Case(lambda a: (ops.ssm_decay(a),), lambda a: (-a.exp(),), {}, {"A_log": (12,)}),
    }


NAMES = list(cases(reference_ops(), torch.float32))


def as_trained(ours: dict[str, Tensor], wide: dict[str, Tensor]) -> None:
    """A of -1 to -16, steps of about 0.02 to 0.5."""
    for name, (low, high) in {"A_log": (0.0, 2.8), "dt_bias": (-3.0, -1.0)}.items():
        if name in ours:
            with torch.no_grad():
                wide[name].copy_(ours[name].uniform_(low, high))


def made(name: str, dtype: torch.dtype) -> tuple[Case, dict[str, Tensor], dict[str, Tensor]]:
    case = cases(reference_ops(), dtype)[name]
    ours, wide = leaves(case, dtype)
    as_trained(ours, wide)
    return case, ours, wide


@pytest.mark.parametrize("kind", ["random", "sparse"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_vjp_is_the_gradient_of_the_formula(name: str, dtype: torch.dtype, kind: str) -> None:
    case, ours, wide = made(name, dtype)
    outs, want_outs = case.ours(*ours.values()), case.formula(*wide.values())
    dys = d_outputs(outs, kind, {0})
    backward(outs, dys)
    backward(want_outs, dys)
    for leaf in ours:
        assert ours[leaf].grad.dtype == (torch.float32 if leaf in case.weights else dtype), leaf
        assert_gradient(ours[leaf].grad, wide[leaf].grad, LIMITS[dtype], leaf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_zero_gradient_stays_zero_and_a_second_backward_gives_the_same_bytes(name: str, dtype: torch.dtype) -> None:
    case, ours, _ = made(name, dtype)
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


def test_boundaries_and_histories_are_constants() -> None:
    _, ours, _ = made("scan", torch.float32)
    boundary = torch.randn(len(LENGTHS), SMALL.heads, SMALL.head_dim, SMALL.state, requires_grad=True)
    A, ops = reference_ops().ssm_decay(ours["A_log"]), reference_ops()
    y, after = ops.ssd_scan(ours["xbc"], ours["dt"], A, ours["D"], ours["dt_bias"], boundary, SEQLENS, SMALL)
    assert y.requires_grad and not after.requires_grad
    y.sum().backward()
    assert boundary.grad is None
    x, history = torch.randn(T, 23, requires_grad=True), torch.randn(len(LENGTHS), 3, 23, requires_grad=True)
    ops.causal_conv1d(x, nn.Parameter(torch.randn(23, 4)), None, history, SEQLENS).sum().backward()
    assert history.grad is None and x.grad.count_nonzero()


def test_rows_that_were_only_replayed_get_their_gradient_too() -> None:
    """y of each sequence's last rows depends on all rows from the boundary on."""
    _, ours, wide = made("scan", torch.float32)
    asked = [1, 1, 2, 5, 17, 20]
    last = torch.cat([torch.arange(sum(LENGTHS[: i + 1]) - n, sum(LENGTHS[: i + 1])) for i, n in enumerate(asked)])
    ops, dy = reference_ops(), torch.randn(sum(asked), SMALL.heads * SMALL.head_dim)
    args = ours["xbc"], ours["dt"], ops.ssm_decay(ours["A_log"]), ours["D"], ours["dt_bias"], None, Seqlens.of(asked, LENGTHS), SMALL
    ops.ssd_scan(*args)[0].backward(dy)
    y = formulas.ssd_scan(wide["xbc"], wide["dt"], -wide["A_log"].exp(), wide["D"], wide["dt_bias"], None, LENGTHS, SMALL, torch.float32)[0]
    y[last].backward(dy.double())
    for leaf in ours:
        assert_gradient(ours[leaf].grad, wide[leaf].grad, LIMITS[torch.float32], leaf)


def test_nothing_uninitialised_reaches_a_gradient(poisoned_memory: None) -> None:
    for name in NAMES:
        case, ours, _ = made(name, torch.float32)
        outs = case.ours(*ours.values())
        backward(outs, d_outputs(outs, "random", {0}))
        assert all(t.grad.isfinite().all() for t in ours.values()), name


def across_documents(values: dict, needs: frozenset, d: dict) -> dict[str, Tensor]:
    return torch_mamba.causal_conv1d(values | {"seqlens": Seqlens.of([T], [T])}, needs, d)


def taps_reversed(values: dict, needs: frozenset, d: dict) -> dict[str, Tensor]:
    grads = torch_mamba.causal_conv1d(values, needs, d)
    return grads | {"weight": grads["weight"].flip(1)}


@pytest.mark.parametrize("planted, wrong", [(across_documents, "x"), (across_documents, "weight"), (taps_reversed, "weight")])
def test_a_wrong_gradient_of_the_convolution_is_noticed(planted: Callable[..., dict[str, Tensor]], wrong: str) -> None:
    x, weight, dy = torch.randn(T, 23), torch.randn(23, 4) / 2, torch.randn(T, 23)
    wide = {"x": x.double().requires_grad_(), "weight": weight.double().requires_grad_()}
    formulas.causal_conv1d(wide["x"], wide["weight"], None, None, LENGTHS, torch.float32).backward(dy.double())
    values = {"x": x, "weight": weight, "bias": None, "history": None, "seqlens": SEQLENS}
    assert not passes(planted(values, frozenset(wide), {"y": dy})[wrong], wide[wrong].grad, LIMITS[torch.bfloat16])


@pytest.mark.parametrize("wrong", ["xbc", "dt", "A", "dt_bias"])
def test_a_gradient_of_the_scan_that_stops_at_its_chunk_is_noticed(wrong: str) -> None:
    """Planted: nothing flows through the state; each chunk as a sequence of its own."""
    _, ours, wide = made("scan", torch.float32)
    dy = torch.randn(T, SMALL.heads * SMALL.head_dim)
    wide["A"] = -wide["A_log"].detach().exp().requires_grad_()
    wide["A"].retain_grad()
    args = wide["xbc"], wide["dt"], wide["A"], wide["D"], wide["dt_bias"]
    formulas.ssd_scan(*args, None, LENGTHS, SMALL, torch.float32)[0].backward(dy.double())
    cut = [n for length in LENGTHS for n in [SMALL.chunk] * (length // SMALL.chunk) + [length % SMALL.chunk] if n]
    values = {name: t.detach() for name, t in ours.items()} | {"A": wide["A"].detach().float(), "boundary": None, "shape": SMALL}
    needs = frozenset({"xbc", "dt", "A", "D", "dt_bias"})
    right = torch_mamba.ssd_scan(values | {"seqlens": SEQLENS}, needs, {"y": dy})[wrong]
    planted = torch_mamba.ssd_scan(values | {"seqlens": Seqlens.of(cut, cut)}, needs, {"y": dy})[wrong]
    assert passes(right, wide[wrong].grad, LIMITS[torch.float32])
    assert not passes(planted, wide[wrong].grad, LIMITS[torch.bfloat16])
