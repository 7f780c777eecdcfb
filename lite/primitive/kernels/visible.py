"""The contract of every visible kernel: what inference runs, and therefore what the training forward runs.

A kernel set is a module that fulfils `VisibleKernels` with pure functions: no argument is changed, nothing is kept between calls
(a kernel that writes in place at inference is wrapped with its copy). Three promises hold for every function of every set, and
`probe.py` checks them on the device in hand:

* row invariance: a token's output does not depend on which other tokens are in the call, how many, or where it stands among them;
* prefix invariance (attention, scan): a token's output is the same whether what came before it came in one call or was kept from
  earlier ones;
* rounding: a result is rounded to the dtype stated here, at the points stated here, and nowhere else.

Shapes: T tokens of all sequences in one row, H hidden, Hq/Hk query/key heads of D, F intermediate, V vocabulary rows held,
S sequences, E experts of which a token has k. "model dtype" is the dtype of the weights: bf16 or fp32. Where sets may differ (a
rounding point inside rotary or attention) the set's own docstring says what it does; both processes use the same set, so both round
alike.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lite.primitive.parallel.packing import Seqlens


class SSDShape(NamedTuple):
    """Mamba-2's scan: H heads of P, G groups of heads that share B and C, N numbers of state for each of a head's P, chunks of L tokens.
    The convolution before it has H P + 2 G N channels."""

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

    def relu2(self, x: Tensor) -> Tensor:
        """relu(x[T, F])^2 -> [T, F]: relu in the model dtype, squared, one rounding."""

    def causal_conv1d(self, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None, seqlens: Seqlens) -> Tensor:
        """Depthwise causal convolution of packed sequences (seqlens.cu_q) and silu: x[T, C], weight[C, W], bias[C] -> [T, C],
        silu(bias + sum over w of weight[:, w] * row(t - W + 1 + w)). history[S, W - 1, C]: the rows before each sequence's first one,
        zeros where there is nothing; None: zeros for all. Accumulated in fp32 from the bias on, taps in order; silu in fp32; one
        rounding to the model dtype."""

    def ssd_scan(
        self,
        xbc: Tensor,
        dt: Tensor,
        A: Tensor,
        D: Tensor,
        dt_bias: Tensor,
        boundary: Tensor | None,
        seqlens: Seqlens,
        shape: SSDShape,
    ) -> tuple[Tensor, Tensor]:
        """Mamba-2's scan. Head h of group g: state_t = exp(d_t A) state_{t-1} + d_t x_t B_t^T, y_t = state_t C_t + D x_t, with
        d = softplus(dt + dt_bias), all in fp32. xbc[Tk, H P + 2 G N] holds x | B | C as they come out of the convolution; dt[Tk, H];
        A[H] fp32; D, dt_bias[H] -> (y[Tq, H P] in the model dtype, boundary[S, H, P, N] fp32).

        The replay rule: each sequence's rows (cu_k) begin at one of its chunk boundaries, a multiple of `shape.chunk` tokens, and
        boundary[S, H, P, N] (fp32) is the state there; None: zeros, the sequences' starts. y is given for each sequence's last len_q
        rows (cu_q); the boundary returned is the state after its last FULL chunk, the given one where there is none. An engine that
        keeps the rows since the last boundary and gives them again before the new ones gets the same bits from a prefill, a prefill
        cut at any token, and decode. In training cu_q == cu_k and boundary is None."""

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        """x[T, M] * silu(gate[T, M]), RMS-normalised over each of `groups` equal parts, all in fp32; rounded to the model dtype, times
        weight[M], rounded -> [T, M]."""

    def router_logits(self, x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
        """x[T, H] @ weight[E, H].T -> [T, E] in out_dtype: fp32, or the model dtype (then it is `linear`). Accumulated in fp32."""

    def topk_softmax(self, logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        """The k largest of softmax(logits[T, E]) in fp32, largest first, the lower expert first where two are equal ->
        (weights[T, k] fp32, ids[T, k] int32). renormalize: weights divided by their sum."""

    def grouped_topk(self, logits: Tensor, bias: Tensor, k: int, groups: int, topk_groups: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        """Scores are sigmoid(logits[T, E] fp32). Experts are CHOSEN by score + bias[E] (fp32): the topk_groups groups, of equal
        parts of the experts, with the largest sum of their two best, then the k best inside those, best first. -> (weights[T, k]
        fp32, ids[T, k] int32). Weights are the scores WITHOUT the bias; renormalize: divided by their sum (+ 1e-20, against 0/0).
        Where two are equal the lower expert comes first."""

    def routed_experts(self, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, activation: str) -> Tensor:
        """sum over k of weights[T, k] (fp32) * expert[ids[T, k]](x[T, H]) -> [T, H], for w13[E, G, H] and w2[E, H, F].

        activation "silu": G = 2F, `swiglu` of gate | up; "relu2_no_mul": G = F, `relu2`. Products are accumulated in fp32 and rounded
        to the model dtype, the second after it was multiplied by its weight; the k results are added in fp32 in the order of k,
        then rounded."""

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
