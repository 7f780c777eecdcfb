"""Logprobs are of softmax(logits / temperature) over the real vocabulary; padding rows take no part, whatever they hold."""

import pytest
import torch
from torch import Tensor, nn

from lite.primitive.modules.head import LMHead
from lite.primitive.ops.bridges import reference_ops

VOCAB, PADDED, H = 151_936, 152_064, 8


def test_temperature_divides_the_logits() -> None:
    """A vocabulary of 4, whose logits are the hidden state itself."""
    logits = torch.tensor([1.0, -0.5, 2.0, 0.25])
    hidden, labels = logits.expand(4, 4).contiguous(), torch.arange(4)
    logprob, entropy = reference_ops().token_logprobs(hidden, torch.eye(4), labels, torch.full((4,), 0.6), 4, True)
    p = (logits.double() / 0.6).softmax(-1)
    torch.testing.assert_close(logprob.double().exp(), p, rtol=1e-6, atol=0)
    torch.testing.assert_close(entropy.double(), -(p * p.log()).sum().expand(4), rtol=1e-6, atol=0)
    assert (p - logits.double().softmax(-1)).abs().max() > 0.05, "the case does not tell temperature 0.6 from 1"
    assert (p - (logits.double() * 0.6).softmax(-1)).abs().max() > 0.05, "nor a product from a quotient"


def test_each_row_has_its_own_temperature() -> None:
    hidden, weight, labels = torch.randn(3, H), torch.randn(20, H), torch.tensor([4, 5, 6])
    temperature = torch.tensor([0.6, 1.0, 2.5])
    together = reference_ops().token_logprobs(hidden, weight, labels, temperature, 20, True)
    for i in range(3):
        alone = reference_ops().token_logprobs(hidden[i : i + 1], weight, labels[i : i + 1], temperature[i : i + 1], 20, True)
        assert all(torch.equal(a, t[i : i + 1]) for a, t in zip(alone, together, strict=True))


@pytest.fixture
def padded_head() -> tuple[Tensor, nn.Parameter, Tensor, Tensor]:
    """The last rows point along the hidden states with a factor of 1,000: they would win every softmax."""
    hidden = torch.randn(3, H)
    weight = nn.Parameter(torch.randn(PADDED, H))
    with torch.no_grad():
        weight[VOCAB:] = 1000 * hidden[0]
    return hidden.requires_grad_(), weight, torch.tensor([0, 75_000, VOCAB - 1]), torch.full((3,), 0.6)


def test_padding_rows_are_dropped_before_the_softmax(padded_head: tuple[Tensor, nn.Parameter, Tensor, Tensor]) -> None:
    hidden, weight, labels, temperature = padded_head
    scores = LMHead(weight, VOCAB, reference_ops())(hidden, labels, temperature)
    z = hidden.detach().double() @ weight.detach()[:VOCAB].double().T / 0.6
    log_p = z.log_softmax(-1)
    torch.testing.assert_close(scores.logprob.detach().double(), log_p.gather(1, labels[:, None])[:, 0], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(scores.entropy.detach().double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=0)

    unaware = LMHead(weight, PADDED, reference_ops())(hidden, labels, temperature)
    assert (unaware.logprob - scores.logprob)[0].abs() > 100, "padding that takes part would not be noticed"


def test_padding_rows_get_a_gradient_of_exactly_zero(padded_head: tuple[Tensor, nn.Parameter, Tensor, Tensor]) -> None:
    hidden, weight, labels, temperature = padded_head
    scores = LMHead(weight, VOCAB, reference_ops())(hidden, labels, temperature)
    (scores.logprob.sum() + 0.1 * scores.entropy.sum()).backward()
    assert weight.grad is not None and weight.grad.shape == (PADDED, H)
    assert weight.grad[VOCAB:].count_nonzero() == 0
    assert (weight.grad[labels].abs().amax(-1) > 0.1).all(), "the rows that were asked for"
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all() and hidden.grad.abs().max() < 100


def test_the_bytes_do_not_depend_on_the_padding(padded_head: tuple[Tensor, nn.Parameter, Tensor, Tensor]) -> None:
    hidden, weight, labels, temperature = padded_head
    padded = LMHead(weight, VOCAB, reference_ops())(hidden, labels, temperature)
    bare = LMHead(nn.Parameter(weight.detach()[:VOCAB].clone()), VOCAB, reference_ops())(hidden, labels, temperature)
    assert torch.equal(padded.logprob, bare.logprob) and torch.equal(padded.entropy, bare.entropy)
