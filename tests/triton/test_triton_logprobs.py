"""vLLM's two ways to a logprob agree with the reference and with each other, bit for bit."""

import torch
from torch import Tensor

from lite.primitive.compare import compare_bytes
from lite.primitive.kernels import reference
from lite.primitive.kernels.vllm import triton_set
from tests.closeness import agrees
from tests.invariance import row_violations

H, V, PADDED = 24, 1100, 1104  # the kernels walk a row in blocks of 1024


def rows(count: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, labels, temperature"""
    return torch.randn(count, H), torch.randint(0, V - 1, (count,)), 0.5 + torch.rand(count)


def head() -> Tensor:
    """Trained-like logits, a few units wide. The padding's would win a softmax."""
    weight = 3 * torch.randn(PADDED, H) * H**-0.5
    weight[V:] = 5
    return weight


def test_logprobs_entropy_and_statistics_agree_with_the_reference() -> None:
    (x, labels, temperature), weight = rows(), head()
    got = triton_set.token_logprobs(x, weight, labels, temperature, V, True)
    want = reference.token_logprobs(x, weight, labels, temperature, V, True)
    for name, g, w in zip(("logprob", "entropy", "max", "sum"), got, want, strict=True):
        assert agrees(g[:, None], w[:, None]), name


def test_a_wrong_label_temperature_or_vocabulary_is_noticed() -> None:
    (x, labels, temperature), weight = rows(), head()
    want = reference.token_logprobs(x, weight, labels, temperature, V, False)[0]
    plants = {
        "next label": (labels + 1, temperature, V),
        "no temperature": (labels, torch.ones_like(temperature), V),
        "one padding row": (labels, temperature, V + 1),
    }
    for name, (label, t, vocab) in plants.items():
        got = triton_set.token_logprobs(x, weight, label, t, vocab, False)[0]
        assert not agrees(got[:, None], want[:, None]), name


def test_the_sampler_and_the_trainer_get_the_same_bits() -> None:
    (x, labels, temperature), weight = rows(40), head()
    trainer = triton_set.token_logprobs(x, weight, labels, temperature, V, False)[0]
    assert compare_bytes(triton_set.sampler_logprobs(x, weight, labels, temperature, V), trainer).exact
    one_ulp = trainer.clone()
    one_ulp[7] = torch.nextafter(one_ulp[7], torch.tensor(0.0))
    assert compare_bytes(one_ulp, trainer).mismatch == 1


def test_a_tokens_logprob_has_the_same_bits_in_any_company() -> None:
    weight = head()
    both = lambda x, labels, t: (
        triton_set.token_logprobs(x, weight, labels, t, V, False)[0],
        triton_set.sampler_logprobs(x, weight, labels, t, V),
    )
    assert row_violations(both, *rows(3)) == []


def test_both_kernels_give_a_row_of_logits_the_same_bits_in_any_company() -> None:
    """The likeliest token's logprob is the logarithm of the sum alone: there another order of the sum shows most."""
    from vllm.model_executor.layers.batch_invariant import log_softmax
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    z = 3 * torch.randn(12, 3000)
    assert row_violations(lambda rows: (compute_token_logprobs(rows, rows.argmax(-1, keepdim=True)), log_softmax(rows)), z) == []


def test_a_logprob_that_depends_on_its_company_is_caught() -> None:
    """The softmax's statistics of the first row for all."""
    weight = head()

    def shared(x: Tensor, labels: Tensor, t: Tensor) -> Tensor:
        logprob, _, top, total = triton_set.token_logprobs(x, weight, labels, t, V, False)
        return logprob + (top - top[0]) + torch.log(total / total[0])

    assert row_violations(shared, *rows(3))
