"""Every op's VJP against ATen's autograd of an fp64 formula that was written apart from it (tests/formulas.py).

Limits on the relative L2 error of each gradient, set before any result was seen:

* fp32: 1e-5. eps is 6e-8; a sum of a few hundred terms and an exp in the chain cost a factor of up to a hundred.
* bf16: 1e-2. A bf16 number has 8 bits, so one rounding is worth up to eps = 2^-8 = 3.9e-3; an activation's gradient is rounded
  once, and where the backward reads a rounded output (attention's) it enters a second time.

`assert_gradient` also checks that the same gradient, 1.05 and 1.25 times as large, misses the limit.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from lite.primitive.compare import bits
from lite.primitive.ops.bridges import Ops, reference_ops
from lite.primitive.parallel.packing import Seqlens
from tests import formulas
from tests.gradients import assert_gradient, passes

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = list(LIMITS)
SEQLENS = Seqlens.of([1, 9, 1, 74], [1, 9, 1, 74])

Leaves = dict[str, Tensor]


@dataclass
class Case:
    """shapes of activations and values of weights, by name; ours and formula take them in that order and give what may get a gradient."""

    ours: Callable[..., tuple[Tensor, ...]]
    formula: Callable[..., tuple[Tensor, ...]]
    activations: dict[str, tuple[int, ...]] = field(default_factory=dict)
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)


def cases(ops: Ops, dtype: torch.dtype) -> dict[str, Case]:
    ids = torch.randint(0, 30, (37,))
    positions, angles = torch.randint(0, 64, (21,)), torch.rand(64, 8) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
    labels, temperature = torch.randint(0, 300, (17,)), 0.6 + torch.rand(17)
    scores = {"hidden": (17, 64)}, {"head.weight": (320, 64)}  # 300 words, 20 rows of padding
    norm = {"norm.weight": (96,)}
    qkv = {"q": (85, 4, 16), "k": (85, 2, 16), "v": (85, 2, 16)}
    one_group = {"q": (85, 2, 16), "k": (85, 2, 16), "v": (85, 2, 16)}
    wide = temperature.double()
    return {
        "linear": Case(
            lambda x, w: (ops.linear(x, w),),
            lambda x, w: (formulas.linear(x, w, None, dtype),),
            {"x": (23, 96)}, {"weight": (40, 96)},
        ),
        "linear with bias": Case(
            lambda x, w, b: (ops.linear(x, w, b),),
            lambda x, w, b: (formulas.linear(x, w, b, dtype),),
            {"x": (23, 96)}, {"weight": (40, 96), "bias": (40,)},
        ),
        "embedding": Case(lambda w: (ops.embedding(ids, w),), lambda w: (formulas.embedding(ids, w),), {}, {"weight": (50, 24)}),
        "rms_norm": Case(
            lambda x, w: (ops.rms_norm(x, w, 1e-5),), lambda x, w: (formulas.rms_norm(x, w, 1e-5, dtype),), {"x": (19, 96)}, norm
        ),
        "add_rms_norm": Case(
            lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-5),
            lambda x, r, w: formulas.add_rms_norm(x, r, w, 1e-5, dtype),
            {"x": (19, 96), "residual": (19, 96)}, norm,
        ),
        "rotary": Case(
            lambda q, k: ops.rotary(q, k, positions, cos_sin),
            lambda q, k: tuple(formulas.turned(t, positions, cos_sin.double(), dtype) for t in (q, k)),
            {"q": (21, 4, 16), "k": (21, 2, 16)},
        ),
        "attention": Case(
            lambda q, k, v: (ops.attention(q, k, v, SEQLENS, 0.25),),
            lambda q, k, v: (formulas.attention(q, k, v, SEQLENS, 0.25, dtype)[0],),
            qkv,
        ),
        "attention without groups": Case(
            lambda q, k, v: (ops.attention(q, k, v, SEQLENS, 0.25),),
            lambda q, k, v: (formulas.attention(q, k, v, SEQLENS, 0.25, dtype)[0],),
            one_group,
        ),
        "swiglu": Case(lambda x: (ops.swiglu(x),), lambda x: (formulas.swiglu(x, dtype),), {"gate_up": (19, 114)}),
        "token_logprobs": Case(
            lambda x, w: ops.token_logprobs(x, w, labels, temperature, 300, True),
            lambda x, w: formulas.token_logprobs(x, w, labels, wide, 300, dtype),
            *scores,
        ),
        "token_logprobs without entropy": Case(
            lambda x, w: ops.token_logprobs(x, w, labels, temperature, 300, False)[:1],
            lambda x, w: formulas.token_logprobs(x, w, labels, wide, 300, dtype)[:1],
            *scores,
        ),
    }  # fmt: skip


NAMES = list(cases(reference_ops(), torch.float32))
OUTPUTS = {"add_rms_norm": 2, "rotary": 2, "token_logprobs": 2}


def leaves(case: Case, dtype: torch.dtype) -> tuple[Leaves, Leaves]:
    """Activations and parameters as the model has them, and the same numbers in fp64."""
    ours: Leaves = {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in case.activations.items()}
    for name, shape in case.weights.items():
        value = 1 + 0.1 * torch.randn(shape) if "norm" in name else torch.randn(shape) * shape[-1] ** -0.5
        ours[name] = nn.Parameter(value.to(dtype))
        ours[name].grad_dtype = torch.float32  # as MasterAdamW sets it
    return ours, {name: t.detach().double().requires_grad_() for name, t in ours.items()}


def d_outputs(outs: tuple[Tensor, ...], kind: str, into: set[int]) -> list[Tensor | None]:
    """dY in each output's dtype, None for outputs that nothing flows back into. sparse: one row in five, as a loss mask makes it."""
    made: list[Tensor | None] = []
    for i, out in enumerate(outs):
        dy = torch.randn(out.shape).to(out.dtype)
        if kind == "sparse":
            dy[torch.arange(len(dy)) % 5 != 2] = 0
        made.append((dy * 0 if kind == "zero" else dy) if i in into else None)
    return made


def backward(outs: tuple[Tensor, ...], dys: list[Tensor | None], **options: bool) -> None:
    pairs = [(out, dy.to(out.dtype)) for out, dy in zip(outs, dys, strict=True) if dy is not None]
    torch.autograd.backward([out for out, _ in pairs], [dy for _, dy in pairs], **options)


def into_choices() -> list[tuple[str, set[int]]]:
    """Every op with every choice of the outputs that gradients flow back into."""
    return [(n, into) for n in NAMES for into in ([{0}, {1}, {0, 1}] if OUTPUTS.get(n) == 2 else [{0}])]


@pytest.mark.parametrize("kind", ["random", "sparse"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name, into", into_choices(), ids=str)
def test_a_vjp_is_the_gradient_of_the_formula(name: str, into: set[int], dtype: torch.dtype, kind: str) -> None:
    case = cases(reference_ops(), dtype)[name]
    ours, wide = leaves(case, dtype)
    outs, want_outs = case.ours(*ours.values()), case.formula(*wide.values())
    dys = d_outputs(outs, kind, into)
    backward(outs, dys)
    backward(want_outs, dys)
    for leaf in ours:
        got, want = ours[leaf].grad, wide[leaf].grad
        if want is None or not want.count_nonzero():  # a gradient that flows past this leaf
            assert got is None or not got.count_nonzero(), leaf
            continue
        assert got is not None, leaf
        assert got.dtype == (torch.float32 if leaf in case.weights else dtype), leaf
        assert_gradient(got, want, LIMITS[dtype], leaf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_zero_gradient_stays_exactly_zero(name: str, dtype: torch.dtype) -> None:
    case = cases(reference_ops(), dtype)[name]
    ours, _ = leaves(case, dtype)
    outs = case.ours(*ours.values())
    backward(outs, d_outputs(outs, "zero", set(range(len(outs)))))
    for leaf, t in ours.items():
        assert t.grad is not None and t.grad.count_nonzero() == 0, leaf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_second_backward_gives_the_same_bytes(name: str, dtype: torch.dtype) -> None:
    case = cases(reference_ops(), dtype)[name]
    ours, _ = leaves(case, dtype)
    outs = case.ours(*ours.values())
    dys = d_outputs(outs, "random", set(range(len(outs))))
    backward(outs, dys, retain_graph=True)
    first = {leaf: t.grad.clone() for leaf, t in ours.items()}
    for t in ours.values():
        t.grad = None
    backward(outs, dys)
    for leaf, t in ours.items():
        assert first[leaf].count_nonzero() and torch.equal(bits(t.grad), bits(first[leaf])), leaf


def test_attention_over_cached_keys_has_a_gradient_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries that are the last tokens of longer sequences, and blocks of queries smaller than a sequence."""
    from lite.primitive.kernels.vjp import torch as torch_vjp

    monkeypatch.setattr(torch_vjp, "QUERY_BLOCK", 4)
    seqlens = Seqlens.of([1, 9], [30, 15])
    q, k, v = (torch.randn(n, heads, 16, requires_grad=True) for n, heads in ((10, 4), (45, 2), (45, 2)))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, d_out = reference_ops().attention(q, k, v, seqlens, 0.25), torch.randn(10, 4, 16)
    out.backward(d_out)
    formulas.attention(*wide, seqlens, 0.25, torch.float32)[0].backward(d_out.double())
    for name, got, want in zip("qkv", (q, k, v), wide, strict=True):
        assert_gradient(got.grad, want.grad, LIMITS[torch.float32], name)


def test_an_argument_that_needs_no_gradient_gets_none() -> None:
    """A frozen weight costs nothing and stays without a gradient, while the activation's is unchanged."""
    ops, x, weight = reference_ops(), torch.randn(5, 8, requires_grad=True), nn.Parameter(torch.randn(3, 8), requires_grad=False)
    ops.linear(x, weight).sum().backward()
    assert weight.grad is None
    assert passes(x.grad, weight.sum(0).expand(5, 8), 1e-6)
