"""vLLM's two attention kernels, each without pages where it can be and with the engine's pages.

FlashAttention 3 takes packed keys directly; `probe.py` must show that this equals decode through pages (it does at head size 128, it does
not at 64). The Triton kernel only reads pages, so training lays its keys out in pages too; its bits do not depend on their size.
"""

import torch
from torch import Tensor

from lite.primitive.parallel.packing import Seqlens

PAGE = 16


def paged(k: Tensor, v: Tensor, seqlens: Seqlens, page: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed k, v[T, Hk, D] in the engine's cache layout. -> (keys, values [pages, page, Hk, D] as two halves of one buffer, block
    table [S, n] int32, lengths [S] int32). The buffer has room for one part-filled page a sequence, so that its size is known here."""
    lengths = seqlens.cu_k.diff()
    used = (lengths + page - 1) // page
    first_page = used.cumsum(0) - used
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=k.device), lengths.long(), output_size=k.shape[0])
    offset = torch.arange(k.shape[0], device=k.device) - seqlens.cu_k[:-1].long()[sequence]
    row = first_page.long()[sequence] * page + offset
    pages = k.shape[0] // page + len(lengths)
    cache = k.new_zeros(pages, page, k.shape[1], 2 * k.shape[2])
    cache.view(-1, k.shape[1], 2 * k.shape[2])[row] = torch.cat([k, v], dim=-1)
    table = first_page[:, None] + torch.arange(-(-seqlens.max_k // page), device=k.device)
    keys, values = cache.split(k.shape[2], dim=-1)
    return keys, values, table.clamp(max=pages - 1).int(), lengths.int()


def flash(q: Tensor, k: Tensor, v: Tensor, seqlens: Seqlens, scale: float) -> tuple[Tensor, Tensor]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    out, lse = flash_attn_varlen_func(
        q, k, v, seqlens.max_q, seqlens.cu_q, seqlens.max_k, cu_seqlens_k=seqlens.cu_k,
        softmax_scale=scale, causal=True, num_splits=1, fa_version=3, return_softmax_lse=True,
    )  # fmt: skip
    return out, lse.t()


def flash_paged(q: Tensor, k: Tensor, v: Tensor, seqlens: Seqlens, scale: float, page: int) -> tuple[Tensor, Tensor]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    keys, values, table, lengths = paged(k, v, seqlens, page)
    out, lse = flash_attn_varlen_func(
        q, keys, values, seqlens.max_q, seqlens.cu_q, seqlens.max_k, seqused_k=lengths, block_table=table,
        softmax_scale=scale, causal=True, num_splits=1, fa_version=3, return_softmax_lse=True,
    )  # fmt: skip
    return out, lse.t()


def triton_paged(q: Tensor, k: Tensor, v: Tensor, seqlens: Seqlens, scale: float, page: int) -> tuple[Tensor, Tensor]:
    """The kernel keeps no lse: that of the result is empty, and the backward computes its own."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    keys, values, table, lengths = paged(k, v, seqlens, page)
    out = torch.empty_like(q)
    unified_attention(
        q.contiguous(), keys, values, out, seqlens.cu_q, seqlens.max_q, lengths, seqlens.max_k, scale, True, (-1, -1),
        table, 0.0, None, None, None,
    )  # fmt: skip
    return out, q.new_empty(0, dtype=torch.float32)


def triton(q: Tensor, k: Tensor, v: Tensor, seqlens: Seqlens, scale: float) -> tuple[Tensor, Tensor]:
    return triton_paged(q, k, v, seqlens, scale, PAGE)
