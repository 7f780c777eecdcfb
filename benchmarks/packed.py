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

    layers     6 * matmul parameters of the layers * tokens (2 forward, 4 backward)
    attention  12 * heads * head size * pairs * layers, where a causal sequence of n tokens has n (n + 1) / 2 pairs of query and key
    head       6 * vocabulary * hidden * scored tokens: only responses go through the head
    """
    layer = c.hidden * (c.heads + 2 * c.kv_heads) * c.head_dim + c.heads * c.head_dim * c.hidden + 3 * c.hidden * c.intermediate
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    parts = {
        "layers": 6 * c.layers * layer * sum(lengths),
        "attention": 12 * c.heads * c.head_dim * pairs * c.layers,
        "head": 6 * c.vocab_size * c.hidden * scored,
    }
    return parts | {"total": sum(parts.values())}
