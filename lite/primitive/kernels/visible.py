"""The contract of every visible kernel: what inference runs, and therefore what the training forward runs.

A kernel set is a module that fulfils `VisibleKernels` with pure functions: no argument is changed, nothing is kept between calls
(a kernel that writes in place at inference is wrapped with its copy). Three promises hold for every function of every set, and
`probe.py` checks them on the device in hand:

* row invariance: a token's output does not depend on which other tokens are in the call, how many, or where it stands among them;
* prefix invariance (attention): a query's output is the same whether its keys came in one call or were cached by earlier ones;
* rounding: a result is rounded to the dtype stated here, at the points stated here, and nowhere else.

Shapes: T tokens of all sequences in one row, H hidden, Hq/Hk query/key heads of D, F intermediate, V vocabulary rows held,
S sequences. "model dtype" is the dtype of the weights: bf16 or fp32. Where sets may differ (a rounding point inside rotary or
attention) the set's own docstring says what it does; both processes use the same set, so both round alike.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from lite.primitive.parallel.packing import Seqlens


class SSDShape(NamedTuple):
    """Of a Mamba-2 scan; short H, P, G, N, L. The convolution has C = H*P + 2*G*N channels: x | B | C."""

    heads: int
    head_dim: int
    groups: int
    state: int
    chunk: int


class VisibleKernels(Protocol):
    NAME: str

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x[T, H] * rsqrt(mean(x^2) + eps) * weight[H] -> [T, H]. Statistics and products in fp32, one rounding to the model dtype."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), both [T, H]. The sum is rounded to the model dtype before the norm reads it."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x[T, K] @ weight[N, K].T (+ bias[N]) -> [T, N]. Accumulated in fp32, rounded to the model dtype; the bias is added to the
        rounded product and rounded again, as vLLM 0.26 does in batch-invariant mode."""

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows ids[T] (int64) of weight[V, H] -> [T, H]. No arithmetic."""

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """q[T, Hq, D], k[T, Hk, D] turned by positions[T] (int64), halves paired (NeoX). cos_sin[P, D] holds cos | sin of D/2 angles
        each, in the model dtype. Vectorised over heads; rounds at least once, to the model dtype, at the end."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, seqlens: Seqlens, scale: float) -> tuple[Tensor, Tensor]:
        """Causal attention of packed sequences: q[Tq, Hq, D], k and v[Tk, Hk, D]. Sequence i's queries are its last tokens: query r of n
        sees keys 0 .. len_k - n + r. -> (out[Tq, Hq, D] in the model dtype, lse[Tq, Hq] fp32, natural log of the sum of
        exp(scale * q.k)). In training queries and keys have the same lengths."""

    def paged_attention(self, q: Tensor, k: Tensor, v: Tensor, seqlens: Seqlens, scale: float, page: int) -> tuple[Tensor, Tensor]:
        """The same as the engine computes it, from a cache of pages of `page` tokens."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of gate_up[T, 2F] -> [T, F]. silu in fp32, rounded to the model dtype, then the product rounded."""

    def token_logprobs(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor, vocab_size: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log softmax(logits / temperature)[labels] for hidden[T, H], weight[V, H] with V >= vocab_size, labels[T] (int64),
        temperature[T] (fp32) -> (logprob[T], entropy[T], max[T], sum[T]), all fp32.

        Logits are rounded to the model dtype, cast to fp32, divided by the temperature; rows of weight past vocab_size (padding)
        take no part. max and sum are the softmax's statistics, for the backward. Entropy is in nats, and zeros without with_entropy.
        The vocabulary is walked in chunks; logits are never changed in place."""

    def sampler_logprobs(self, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor, vocab_size: int) -> Tensor:
        """The logprobs [T] that the engine's sampler returns for labels[T]."""
