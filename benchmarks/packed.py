"""The work of one training step: a packed batch of unequal sequences, and how many floating-point operations it asks for."""

import random
from collections.abc import Sequence

from lite.primitive.modules.decoder import DecoderConfig
from lite.runtime.batch import PackedBatch


def unequal_lengths(tokens: int, longest: int, seed: int) -> list[int]:
    """Lengths between longest / 8 and longest that add up to tokens; only the last may be shorter, and none is under 2."""
    draw, lengths, left = random.Random(seed), [], tokens
    while left > 0:
        length = min(draw.randint(max(2, longest // 8), longest), left)
        lengths.append(length if left - length != 1 else length - 1)
        left -= lengths[-1]
    return lengths


def packed_batch(tokens: int, longest: int, vocab_size: int, seed: int) -> PackedBatch:
    """Random tokens; each sequence's second half is its response, which alone is scored."""
    draw, samples = random.Random(seed), []
    for length in unequal_lengths(tokens, longest, seed):
        ids = [draw.randrange(vocab_size) for _ in range(length)]
        samples.append((ids[: length - length // 2], ids[length - length // 2 :]))
    return PackedBatch.from_samples(samples)


def step_flops(c: DecoderConfig, lengths: Sequence[int], scored: int) -> dict[str, int]:
    """Forward and backward of one step, nothing counted twice that is computed again in the backward.

    layers     6 * matmul parameters that a token meets in the layers * tokens (2 forward, 4 backward); among experts it meets the router,
               the k chosen ones and the shared one
    attention  12 * heads * head size * pairs in each attention layer, where a causal sequence of n tokens has n (n + 1) / 2 pairs of
               query and key
    scan       6 * ((groups * state + heads * head size) * pairs + 2 * heads * head size * state * tokens) in each Mamba-2 layer, where
               pairs are those inside the chunks of a sequence: the chunked form; its convolution is not counted
    head       6 * vocabulary * hidden * scored tokens: only responses go through the head
    """
    met: dict[str | None, int] = {None: 0, "gated": 3 * c.hidden * c.intermediate, "relu2": 2 * c.hidden * c.intermediate}
    met["attention"] = c.hidden * (c.heads + 2 * c.kv_heads) * c.head_dim + c.heads * c.head_dim * c.hidden
    scan = 0
    if c.mamba:
        H, P, G, N, L = c.mamba.shape
        met["mamba"] = c.hidden * (c.mamba.inner + c.mamba.channels + H) + c.mamba.inner * c.hidden
        inside = sum(n // L * causal_pairs(L) + causal_pairs(n % L) for n in lengths)
        scan = 6 * ((G * N + H * P) * inside + 2 * H * P * N * sum(lengths))
    if c.moe:
        met["moe"] = c.hidden * (c.moe.experts + c.moe.k * (c.moe.up_rows + c.moe.intermediate) + 2 * (c.moe.shared or 0))
    parts = {
        "layers": 6 * sum(met[kind] for kind in (*c.mixers, *c.mlps)) * sum(lengths),
        "attention": 12 * c.heads * c.head_dim * sum(map(causal_pairs, lengths)) * c.mixers.count("attention"),
        "scan": scan * c.mixers.count("mamba"),
        "head": 6 * c.vocab_size * c.hidden * scored,
    }
    return parts | {"total": sum(parts.values())}


def causal_pairs(n: int) -> int:
    return n * (n + 1) // 2
