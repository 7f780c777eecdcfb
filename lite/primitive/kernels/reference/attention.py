"""Reference attention: tiles of a fixed shape, keys walked in order with the online softmax.

A tile holds Q_ROWS queries of one sequence, with all query heads that share a key head, against KV_ROWS keys that start at a
multiple of KV_ROWS. A query's arithmetic is then the same in prefill, in a chunk of it and in decode: same products at one GEMM
shape, same order over the keys, and key tiles in its future change nothing (their weights are exactly 0, the maximum stays).
Scores, probabilities and sums stay in fp32; the output is rounded once.
"""

import torch
from torch import Tensor

from lite.primitive.kernels.reference.pointwise import tree_sum
from lite.primitive.parallel.packing import Seqlens

Q_ROWS, KV_ROWS = 8, 64


def attention(q: Tensor, k: Tensor, v: Tensor, seqlens: Seqlens, scale: float) -> tuple[Tensor, Tensor]:
    Tq, Hq, D = q.shape
    Tk, Hk, _ = k.shape
    rows = Hq // Hk * Q_ROWS
    tile_seq, tile_row, tile_pos = _query_tiles(seqlens.cu_q.long(), seqlens.cu_k.long())
    n = len(tile_seq)

    # one zero row past the end stands for everything that pads a tile
    q_pad = torch.cat([q.float(), q.new_zeros(1, Hq, D, dtype=torch.float32)])
    k_pad = torch.cat([k.float(), k.new_zeros(1, Hk, D, dtype=torch.float32)])
    v_pad = torch.cat([v.float(), v.new_zeros(1, Hk, D, dtype=torch.float32)])
    q_tiles = q_pad[tile_row].view(n, Q_ROWS, Hk, Hq // Hk, D).permute(0, 2, 3, 1, 4).reshape(n, Hk, rows, D).contiguous()

    top = q_tiles.new_full((n, Hk, rows), -torch.inf)
    total = q_tiles.new_zeros(n, Hk, rows)
    acc = q_tiles.new_zeros(n, Hk, rows, D)
    k_first = seqlens.cu_k[:-1].long()[tile_seq]
    k_len = seqlens.cu_k.diff().long()[tile_seq]
    last_pos = tile_pos.amax(-1)
    offsets = torch.arange(KV_ROWS, device=q.device)
    for start in range(0, seqlens.max_k, KV_ROWS):
        active = (last_pos >= start).nonzero()[:, 0]
        key_pos = start + offsets
        key_row = torch.where(key_pos < k_len[active, None], k_first[active, None] + key_pos, Tk)
        # contiguous: for one tile or one key head these are views, and a BLAS may sum another layout in another order
        k_tile = k_pad[key_row].permute(0, 2, 3, 1).reshape(-1, D, KV_ROWS).contiguous()
        v_tile = v_pad[key_row].permute(0, 2, 1, 3).reshape(-1, KV_ROWS, D).contiguous()
        scores = torch.bmm(q_tiles[active].view(-1, rows, D), k_tile).view(-1, Hk, Hq // Hk, Q_ROWS, KV_ROWS) * scale
        future = key_pos > tile_pos[active][:, None, None, :, None]
        scores = scores.masked_fill(future, -torch.inf).view(-1, Hk, rows, KV_ROWS)

        new_top = torch.maximum(top[active], scores.amax(-1))
        rescale = torch.exp(top[active] - new_top)
        weights = torch.exp(scores - new_top[..., None])
        total[active] = total[active] * rescale + tree_sum(weights)
        mixed = torch.bmm(weights.view(-1, rows, KV_ROWS), v_tile).view(-1, Hk, rows, D)
        acc[active] = acc[active] * rescale[..., None] + mixed
        top[active] = new_top

    kept = (tile_row < Tq).view(-1).nonzero()[:, 0]
    out = (acc / total[..., None]).view(n, Hk, Hq // Hk, Q_ROWS, D).permute(0, 3, 1, 2, 4).reshape(n * Q_ROWS, Hq, D)
    lse = (top + torch.log(total)).view(n, Hk, Hq // Hk, Q_ROWS).permute(0, 3, 1, 2).reshape(n * Q_ROWS, Hq)
    return out[kept].to(q.dtype), lse[kept]


def paged_attention(q: Tensor, k: Tensor, v: Tensor, seqlens: Seqlens, scale: float, page: int) -> tuple[Tensor, Tensor]:
    """The embedded engine gathers its pages and calls `attention`."""
    return attention(q, k, v, seqlens, scale)


def _query_tiles(cu_q: Tensor, cu_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each tile: its sequence [n], the rows of q it holds [n, Q_ROWS] (Tq where it pads) and their positions in the sequence.
    A padding row repeats the position of the tile's last real one, so that it asks for no further keys."""
    len_q, past = cu_q.diff(), cu_k.diff() - cu_q.diff()
    tiles = (len_q + Q_ROWS - 1) // Q_ROWS
    seq = torch.repeat_interleave(torch.arange(len(tiles), device=cu_q.device), tiles)
    index_in_seq = torch.arange(len(seq), device=cu_q.device) - (tiles.cumsum(0) - tiles)[seq]
    offset = index_in_seq[:, None] * Q_ROWS + torch.arange(Q_ROWS, device=cu_q.device)
    real = offset < len_q[seq, None]
    row = torch.where(real, cu_q[seq, None] + offset, cu_q[-1])
    position = past[seq, None] + torch.minimum(offset, len_q[seq, None] - 1)
    return seq, row, position
