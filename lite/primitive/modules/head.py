"""From the last hidden states to what RL reads: each token's logprob and the entropy of its distribution."""

from typing import NamedTuple

from torch import Tensor, nn

from lite.primitive.ops.bridges import Ops


class TokenScores(NamedTuple):
    logprob: Tensor  # [T] fp32
    entropy: Tensor  # [T] fp32, nats


class LMHead(nn.Module):
    """weight[V, hidden] may be the embedding's own parameter (tied). Rows past vocab_size are padding and take no part."""

    def __init__(self, weight: nn.Parameter, vocab_size: int, ops: Ops):
        super().__init__()
        self.ops, self.vocab_size = ops, vocab_size
        self.weight = weight

    def forward(self, hidden: Tensor, labels: Tensor, temperature: Tensor, with_entropy: bool = True) -> TokenScores:
        """hidden[T, H], labels[T] int64, temperature[T] fp32."""
        return TokenScores(*self.ops.token_logprobs(hidden, self.weight, labels, temperature, self.vocab_size, with_entropy))
