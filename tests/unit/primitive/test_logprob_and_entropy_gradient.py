"""Logprob and entropy in one loss: chunked and not, with probabilities of exactly 0, against the formula and against differences."""

from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from lite.primitive.compare import bits
from lite.primitive.kernels import reference
from lite.primitive.kernels.vjp import torch as torch_vjp
from lite.primitive.ops.bridges import Ops, reference_ops
from tests import formulas
from tests.gradients import assert_gradient, relative_l2

T, H, V, ROWS = 9, 12, 50, 56
CHUNKS = [7, 16, 50, 8192]
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # as in test_vjp.py, for its reasons


def loss_of(logprob: Tensor, entropy: Tensor) -> Tensor:
    return -(logprob * torch.linspace(-1, 1, T)).sum() - 0.1 * entropy.sum()


def inputs(dtype: torch.dtype, spread: float) -> tuple[Tensor, nn.Parameter, Tensor, Tensor]:
    """spread: the logits' standard deviation. At 150 most probabilities underflow to exactly 0, some labels' among them."""
    hidden = torch.randn(T, H).to(dtype).requires_grad_()
    weight = nn.Parameter((torch.randn(ROWS, H) * H**-0.5 * spread).to(dtype))
    weight.grad_dtype = torch.float32
    return hidden, weight, torch.randint(0, V, (T,)), 0.6 + torch.rand(T)


def run(ops: Ops, hidden: Tensor, weight: nn.Parameter, labels: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
    """-> logprob, entropy, gradient of hidden, gradient of weight."""
    hidden.grad = weight.grad = None
    logprob, entropy = ops.token_logprobs(hidden, weight, labels, temperature, V, True)
    loss_of(logprob, entropy).backward()
    assert hidden.grad is not None and weight.grad is not None
    return logprob.detach(), entropy.detach(), hidden.grad, weight.grad


def set_chunk(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    for module in (reference.head, torch_vjp):
        monkeypatch.setattr(module, "VOCAB_CHUNK", width)


@pytest.mark.parametrize("spread", [1.0, 150.0])
@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_gradient_is_the_formulas(monkeypatch: pytest.MonkeyPatch, chunk: int, dtype: torch.dtype, spread: float) -> None:
    set_chunk(monkeypatch, chunk)
    hidden, weight, labels, temperature = inputs(dtype, spread)
    copies = [bits(t.detach()).clone() for t in (hidden, weight)]
    logprob, entropy, d_hidden, d_weight = run(reference_ops(), hidden, weight, labels, temperature)
    assert all(torch.equal(bits(t.detach()), c) for t, c in zip((hidden, weight), copies, strict=True)), "changed in place"
    assert all(torch.isfinite(t).all() for t in (logprob, entropy, d_hidden, d_weight))

    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    want_logprob, want_entropy = formulas.token_logprobs(*wide, labels, temperature.double(), V, dtype)
    if spread > 100:
        z = (wide[0] @ wide[1][:V].T / temperature.double()[:, None]).float()
        assert (z.softmax(-1) == 0).any(), "the case does not hold a probability of exactly 0"
    loss_of(want_logprob, want_entropy).backward()
    torch.testing.assert_close(logprob.double(), want_logprob.detach(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy.detach(), rtol=1e-6, atol=1e-5)
    assert_gradient(d_hidden, wide[0].grad, LIMITS[dtype], "hidden")
    assert_gradient(d_weight, wide[1].grad, LIMITS[dtype], "weight")


@pytest.mark.parametrize("chunk", CHUNKS)
def test_minus_infinity_logits_give_no_nan(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """A weight row that overflows fp32 gives a logit of -inf: probability 0, and everything stays finite, backwards too."""
    set_chunk(monkeypatch, chunk)
    hidden, weight, labels, temperature = inputs(torch.float32, 1.0)
    with torch.no_grad():
        hidden.abs_().add_(1)
        weight[5] = -3e38
        labels[labels == 5] = 6
        assert (hidden @ weight[5]).isinf().all(), "the case does not hold a logit of -inf"
    assert all(torch.isfinite(t).all() for t in run(reference_ops(), hidden, weight, labels, temperature))


@pytest.mark.parametrize("chunk", CHUNKS[:2])
def test_the_gradient_is_the_slope(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Central differences of the visible forward itself along random directions: no formula in between.

    The forward is fp32 (noise 1e-6 of a loss of about 20 over steps of 1e-2), so 1e-2 is what a difference can tell; 5% it can.
    """
    set_chunk(monkeypatch, chunk)
    ops = reference_ops()
    hidden, weight, labels, temperature = inputs(torch.float32, 1.0)
    *_, d_hidden, d_weight = run(ops, hidden, weight, labels, temperature)
    step = 1e-2
    for _ in range(5):
        along = torch.sign(d_hidden) * torch.rand(T, H), torch.sign(d_weight) * torch.rand(ROWS, H)

        def value(sign: float, along: tuple[Tensor, Tensor] = along) -> Tensor:
            moved = hidden.detach() + sign * step * along[0], weight.detach() + sign * step * along[1]
            return loss_of(*ops.token_logprobs(*moved, labels, temperature, V, True)).double()

        slope = (value(1) - value(-1)) / (2 * step)
        predicted = (d_hidden * along[0]).double().sum() + (d_weight * along[1]).double().sum()
        assert relative_l2(predicted, slope) <= 1e-2
        assert relative_l2(predicted * 1.05, slope) > 1e-2


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
def test_chunks_change_rounding_only(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The logits are the same bytes; only the order of fp32 sums differs, and one last rounding of the hidden states' gradient."""
    given = inputs(dtype, 2.0)
    results = []
    for chunk in CHUNKS:
        set_chunk(monkeypatch, chunk)
        results.append(run(reference_ops(), *given))
    for other in results[1:]:
        for name, a, b in zip(("logprob", "entropy", "d_hidden", "d_weight"), results[0], other, strict=True):
            assert relative_l2(b, a) <= (LIMITS[dtype] if name == "d_hidden" else 1e-6), name


def test_dropping_a_term_of_either_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted error: an entropy gradient without its + H term."""
    wrong = ModuleType("wrong_vjp")
    wrong.__dict__.update(vars(torch_vjp))
    wrong.token_logprobs = lambda values, needs, d: torch_vjp.token_logprobs(values | {"entropy": values["entropy"] * 0}, needs, d)
    given = inputs(torch.float32, 1.0)
    good, bad = run(reference_ops(), *given)[2:], run(Ops(reference, wrong), *given)[2:]
    assert all(relative_l2(b, g) > 1e-2 for b, g in zip(bad, good, strict=True))
