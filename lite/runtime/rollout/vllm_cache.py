"""How large a cache of vLLM's holds so many requests to their end."""

from math import prod
from typing import Any

import torch

from lite.vllm_plugin.mamba import state_dtypes, state_shapes

SPARE = 1.1
BLOCK = 16  # tokens; an attention page holds a multiple of it


def cache_bytes(config: Any, sequences: int, length: int) -> int:
    """Of a `DecoderConfig`, for sequences of length tokens each; a tenth to spare, and enough for vLLM without the plugin.

    Attention layers keep keys and values: 2 x 2 bytes x kv heads x head size a token and layer. Without Mamba layers that is all.

    A Mamba layer keeps one page a sequence. The plugin's is the larger one, with C channels of the convolution, W its width, H heads of P,
    N numbers of state and a chunk of L:  2 (W - 1) C  history  +  4 H P N  state  +  2 L C + 2 L H  rows since the last boundary.
    vLLM gives both kinds of layers pages of one size: the Mamba page, rounded up to whole blocks of 16 tokens of attention. Pages belong
    to groups of layers of one size, the smaller kind's number of layers (the larger's, where that is less than 1.5 times as many), so each
    kind counts as if its layers filled its groups; page 0 of each layer in a group is never handed out.

    An attention layer's last page is counted whole beyond the length, which is enough for vLLM's own smaller pages, too.
    """
    token = 2 * 2 * config.kv_heads * config.head_dim
    tokens = length + 64
    attention, mamba = (config.mixers.count(kind) for kind in ("attention", "mamba"))
    if not mamba:
        return int(SPARE * sequences * tokens * attention * token)
    page = -(-mamba_bytes(config.mamba) // (BLOCK * token)) * BLOCK * token
    counts = sorted(count for count in (attention, mamba) if count)
    group = counts[-1] if counts[-1] < 1.5 * counts[0] else counts[0]
    attention, mamba = (-(-count // group) * group for count in (attention, mamba))
    request = attention * (tokens * token + page) + mamba * page
    return int(SPARE * sequences * request) + group * page


def mamba_bytes(mamba: Any) -> int:
    """A sequence's state in one layer (`Mamba2Config`), as the plugin tells vLLM."""
    shape = mamba.shape
    stock = (mamba.conv_width - 1, mamba.channels), (shape.heads, shape.head_dim, shape.state)
    shapes, dtypes = state_shapes(stock, shape.chunk), state_dtypes((torch.bfloat16, torch.float32))
    return sum(prod(sizes) * dtype.itemsize for sizes, dtype in zip(shapes, dtypes, strict=True))
