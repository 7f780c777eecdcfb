"""Each reference kernel against an fp64 formula that rounds where the contract says, and nowhere else.

fp32: |error| <= 2e-6 of the largest result (sums of at most a few hundred terms, eps 6e-8 each).
bf16: within one bf16 step of the formula, and bit-equal to it in 99 of 100 elements. The first alone would not notice a missing or
an additional rounding, which moves a third of the elements by one step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lite.primitive.compare import bits
from lite.primitive.kernels import reference
from lite.primitive.parallel.packing import Seqlens
from tests import formulas

FP32_LIMIT, BF16_EQUAL_SHARE = 2e-6, 0.99
DTYPES = [torch.float32, torch.bfloat16]
SEQLENS = Seqlens.of([1, 7, 9], [1, 74, 9])


@dataclass
class Case:
    """A kernel, its fp64 formula, and arguments in the model dtype."""

    kernel: Callable[..., Any]
    formula: Callable[..., Any]
    args: tuple[Any, ...]


def widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def cases(dtype: torch.dtype) -> dict[str, Case]:
    def n(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    angles = torch.rand(64, 16) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
    ids, positions = torch.randint(0, 50, (19,)), torch.randint(0, 64, (19,))
    x, weight, norm = n(19, 96), (torch.randn(80, 96) * 96**-0.5).to(dtype), (1 + 0.1 * torch.randn(96)).to(dtype)
    with_dtype = lambda formula: lambda *args: formula(*args, dtype)
    return {
        "rms_norm": Case(reference.rms_norm, with_dtype(formulas.rms_norm), (x, norm, 1e-5)),
        "add_rms_norm": Case(reference.add_rms_norm, with_dtype(formulas.add_rms_norm), (x, n(19, 96), norm, 1e-5)),
        "linear": Case(reference.linear, with_dtype(formulas.linear), (x, weight, None)),
        "linear with bias": Case(reference.linear, with_dtype(formulas.linear), (x, weight, n(80))),
        "embedding": Case(reference.embedding, formulas.embedding, (ids, n(50, 24))),
        "rotary": Case(
            reference.rotary,
            lambda q, k, p, c: (formulas.turned(q, p, c, dtype), formulas.turned(k, p, c, dtype)),
            (n(19, 4, 32), n(19, 2, 32), positions, cos_sin),
        ),
        "attention": Case(
            reference.attention, with_dtype(formulas.attention), (n(17, 4, 32), n(84, 2, 32), n(84, 2, 32), SEQLENS, 32**-0.5)
        ),
        "attention without groups": Case(
            reference.attention, with_dtype(formulas.attention), (n(17, 3, 16), n(84, 3, 16), n(84, 3, 16), SEQLENS, 0.25)
        ),
        "attention with one key head": Case(
            reference.attention, with_dtype(formulas.attention), (n(17, 3, 16), n(84, 1, 16), n(84, 1, 16), SEQLENS, 0.25)
        ),
        "swiglu": Case(reference.swiglu, with_dtype(formulas.swiglu), (2 * n(19, 2 * 57),)),
    }


NAMES = list(cases(torch.float32))


def outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def complaint(got: Tensor, want: Tensor, dtype: torch.dtype, limit: float = FP32_LIMIT) -> str | None:
    """Why got (in dtype, or fp32 for statistics) is not want (fp64), None where it is. limit: fp32's."""
    largest = want.abs().max()
    error = (got.double() - want).abs()
    if got.dtype == torch.float32:
        return None if error.max() <= limit * largest else f"error {error.max():.3g} of {largest:.3g}"
    step = 2.0 ** (torch.floor(torch.log2(want.abs().clamp(min=1e-30))) - 7)  # bf16 holds 8 bits
    over = error > step + limit * largest  # what cancels leaves fp32's error of its terms
    equal = (bits(got) == bits(want.to(dtype))).double().mean()
    if over.any():
        return f"{int(over.sum())} elements are more than one step away"
    return None if equal >= BF16_EQUAL_SHARE else f"only {equal:.1%} of the elements are equal"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_its_formula_rounded_where_the_contract_says(name: str, dtype: torch.dtype) -> None:
    case = cases(dtype)[name]
    got, want = outputs(case.kernel(*case.args)), outputs(case.formula(*map(widened, case.args)))
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert complaint(g, w, dtype) is None, complaint(g, w, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_gives_the_model_dtype_and_changes_no_argument(name: str, dtype: torch.dtype) -> None:
    case = cases(dtype)[name]
    before = [bits(a).clone() if isinstance(a, Tensor) else a for a in case.args]
    got = outputs(case.kernel(*case.args))
    assert [g.dtype for g in got] == ([dtype, torch.float32] if name.startswith("attention") else [dtype] * len(got))
    for argument, copy in zip(case.args, before, strict=True):
        assert torch.equal(bits(argument), copy) if isinstance(argument, Tensor) else argument == copy


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rounds once more, before the weight, as several public implementations do."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def unrounded_sum(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x.float() + residual.float()
    return reference.rms_norm(total, weight, eps).to(x.dtype), total.to(x.dtype)


def unrounded_silu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


WRONGLY_ROUNDED = {
    "rms_norm": plain_rms_norm,
    "add_rms_norm": unrounded_sum,
    "linear with bias": lambda x, w, b: (x.float() @ w.float().T + b.float()).to(x.dtype),
    "rotary": lambda q, k, p, c: tuple(
        torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        for a, b, cos, sin in ((*t.chunk(2, dim=-1), *c[p][:, None].chunk(2, dim=-1)) for t in (q, k))
    ),
    "swiglu": unrounded_silu,
}


@pytest.mark.parametrize("name", WRONGLY_ROUNDED)
def test_a_rounding_too_many_or_too_few_is_noticed(name: str) -> None:
    """The planted error of the test above: right to bf16's precision, but rounded elsewhere."""
    case = cases(torch.bfloat16)[name]
    got, want = outputs(WRONGLY_ROUNDED[name](*case.args)), outputs(case.formula(*map(widened, case.args)))
    assert any(complaint(g, w, torch.bfloat16) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_logprobs_are_fp32_of_logits_in_the_model_dtype(dtype: torch.dtype, with_entropy: bool) -> None:
    """Operands are multiples of 1/16 and 1/32, so that logits are exact in fp32 and both sides round the same numbers: the limit can
    be fp32's (1e-5 nats for sums of 300) in bf16 too, and logits that skip their rounding are noticed."""
    hidden, weight = torch.randint(-32, 33, (21, 64)) / 16, torch.randint(-32, 33, (320, 64)) / 32
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    labels, temperature, vocab = torch.randint(0, 300, (21,)), 0.5 + torch.rand(21), 300
    before = [bits(t).clone() for t in (hidden, weight, labels, temperature)]
    logprob, entropy, top, total = reference.token_logprobs(hidden, weight, labels, temperature, vocab, with_entropy)
    assert all(t.dtype == torch.float32 and t.shape == (21,) for t in (logprob, entropy, top, total))
    assert all(torch.equal(bits(t), b) for t, b in zip((hidden, weight, labels, temperature), before, strict=True))

    wide = (hidden.double(), weight.double(), labels, temperature.double(), vocab)
    want_logprob, want_entropy = formulas.token_logprobs(*wide, dtype)
    assert (logprob - want_logprob).abs().max() <= 1e-5
    assert (entropy - (want_entropy if with_entropy else 0.0)).abs().max() <= 1e-5
    z = formulas.rounded(wide[0] @ wide[1][:vocab].T, dtype) / wide[3][:, None]
    assert (top - z.amax(-1)).abs().max() <= 1e-5
    assert (top + total.log() - z.logsumexp(-1)).abs().max() <= 1e-5
    if dtype == torch.bfloat16:
        unrounded = formulas.token_logprobs(*wide, torch.float32)[0]
        assert (logprob - unrounded).abs().max() > 1e-3, "the limit would not notice logits that are not rounded"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_drawn_token_carries_the_bytes_that_scoring_it_gives(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference.head, "VOCAB_CHUNK", 64)
    hidden, weight = torch.randn(33, 48).to(dtype), (torch.randn(200, 48) * 3 * 48**-0.5).to(dtype)
    temperature, uniform = 0.5 + torch.rand(33), torch.rand(33, 190)
    ids, logprobs = reference.sample(hidden, weight, temperature, 190, uniform)
    scored = reference.token_logprobs(hidden, weight, ids, temperature, 190, False)[0]
    assert torch.equal(bits(logprobs), bits(scored))
    z = (hidden.double() @ weight[:190].double().T) / temperature.double()[:, None]
    drawn = (z - (-uniform.double().log()).log()).argmax(-1)
    assert (ids == drawn).double().mean() >= 0.9  # bf16 logits may turn a near tie


def test_the_attention_lse_is_a_natural_logarithm() -> None:
    """Some GPU kernels keep it to base 2; the backward reads it as natural."""
    q, k = torch.full((1, 1, 16), 0.5), torch.full((1, 1, 16), 0.5)
    lse = reference.attention(q, k, k, Seqlens.of([1], [1]), 0.25)[1]
    assert float(lse) == 1.0  # 16 * 0.5 * 0.5 * 0.25, and one key only
