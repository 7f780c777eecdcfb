"""Reference logprobs: the vocabulary walked in chunks of one fixed width, the softmax's statistics kept online in fp32.

The trainer knows the token and asks for its logprob (`token_logprobs`); the engine draws the token from the same chunks (`sample`).
Both read the same logits and the same statistics, so both get the same bytes.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lite.primitive.kernels.reference.gemm import linear
from lite.primitive.kernels.reference.pointwise import tree_sum

VOCAB_CHUNK = 8192


def scaled_logits(hidden: Tensor, weight: Tensor, temperature: Tensor, vocab_size: int) -> Iterator[tuple[int, Tensor]]:
    """Chunks (first id, logits[T, n] fp32 divided by temperature[T]) of the first vocab_size rows of weight[V, H]."""
    for start in range(0, vocab_size, VOCAB_CHUNK):
        chunk = weight[start : min(start + VOCAB_CHUNK, vocab_size)]
        yield start, linear(hidden, chunk, None).float() / temperature[:, None]


class SoftmaxStatistics:
    """Running max, sum of exp(z - max) and sum of exp(z - max) * (z - max) over chunks of z[T, n]."""

    def __init__(self, with_entropy: bool):
        self.with_entropy = with_entropy
        self.max = self.sum = self.weighted = torch.empty(0)

    def update(self, z: Tensor) -> None:
        top = z.amax(-1)
        if self.max.numel():
            top = torch.maximum(self.max, top)
        shifted = z - top[:, None]
        weights = torch.exp(shifted)
        new_sum = tree_sum(weights)
        # a weight of exactly 0 contributes 0, also where z is -inf
        new_weighted = tree_sum(torch.where(weights > 0, weights * shifted, 0.0)) if self.with_entropy else new_sum
        if self.max.numel():
            rescale = torch.exp(self.max - top)
            new_weighted = (self.weighted + self.sum * (self.max - top)) * rescale + new_weighted
            new_sum = self.sum * rescale + new_sum
        self.max, self.sum, self.weighted = top, new_sum, new_weighted

    def entropy(self) -> Tensor:
        return torch.log(self.sum) - self.weighted / self.sum if self.with_entropy else torch.zeros_like(self.sum)


def token_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor, vocab_size: int, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stats = SoftmaxStatistics(with_entropy)
    own = hidden.new_full(labels.shape, -torch.inf, dtype=torch.float32)
    for start, z in scaled_logits(hidden, weight, temperature, vocab_size):
        stats.update(z)
        here = (labels >= start) & (labels < start + z.shape[1])
        own = torch.where(here, z.gather(1, (labels - start).clamp(0, z.shape[1] - 1)[:, None])[:, 0], own)
    return (own - stats.max) - torch.log(stats.sum), stats.entropy(), stats.max, stats.sum


def sample(hidden: Tensor, weight: Tensor, temperature: Tensor, vocab_size: int, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draws one token a row from softmax(logits / temperature) by the Gumbel trick: uniform[T, vocab_size] in [0, 1), fp32.
    -> (ids[T] int64, their logprobs[T] fp32, the bytes that `token_logprobs` gives)."""
    stats = SoftmaxStatistics(with_entropy=False)
    chunks = []
    for _, z in scaled_logits(hidden, weight, temperature, vocab_size):
        stats.update(z)
        chunks.append(z)
    z = torch.cat(chunks, dim=1)
    ids = (z - torch.log(-torch.log(uniform))).argmax(-1)
    own = z.gather(1, ids[:, None])[:, 0]
    return ids, (own - stats.max) - torch.log(stats.sum)


def sampler_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor, vocab_size: int) -> Tensor:
    """`sample`'s logprob of a token that is already known."""
    return token_logprobs(hidden, weight, labels, temperature, vocab_size, False)[0]
