"""Logprobs as vLLM's V1 sampler computes them: bf16 logits to fp32, divided by the temperature, log-softmax in batch-invariant Triton.

The engine writes the whole log-softmax row. Training wants one number of it, so it calls vLLM's kernel for single tokens
(`compute_token_logprobs`), which walks the row in the same blocks; the probe compares the two.
"""

import torch
from torch import Tensor

from lite.primitive.kernels.vllm.gemm import linear

ROWS = 1024  # of logits held at once


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: Tensor, vocab_size: int) -> Tensor:
    return linear(hidden, weight, None)[:, :vocab_size].float() / temperature[:, None]


def token_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor, vocab_size: int, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    logprobs, entropies, tops, sums = [], [], [], []
    for x, label, t in zip(hidden.split(ROWS), labels.split(ROWS), temperature.split(ROWS), strict=True):
        z = _scaled_logits(x, weight, t, vocab_size)
        logprobs.append(compute_token_logprobs(z, label[:, None])[:, 0])
        top = z.amax(-1)
        weights = torch.exp(z - top[:, None])
        total = weights.sum(-1)
        tops.append(top)
        sums.append(total)
        entropies.append(torch.log(total) - (weights * (z - top[:, None])).sum(-1) / total if with_entropy else torch.zeros_like(top))
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(tops), torch.cat(sums)


def sampler_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor, vocab_size: int) -> Tensor:
    """What the engine's sampler returns for these tokens: the row that `log_softmax` writes, read at the label."""
    from vllm.model_executor.layers.batch_invariant import log_softmax

    return log_softmax(_scaled_logits(hidden, weight, temperature, vocab_size)).gather(1, labels[:, None])[:, 0]
