"""The engine's side of the replay rule: what a request's page keeps of a Mamba layer, and how a step reads and writes it.

A page holds the state at the request's last chunk boundary and the rows since then, as the scan takes them. A step puts those rows before
its new ones and scans from the boundary, so every token's row is computed by the scan that a prefill of the whole sequence would run, from
the same numbers in the same places of the same chunk: prefill, a prefill cut anywhere and decode have the same bits.

How much of a page is meaningful follows from the request's number of computed tokens alone: `computed % chunk` rows; a boundary state from
`chunk` tokens on; a convolution history from the first token on. Pages are handed out as they were left, so the rest is never read.

Pure functions of tensors, and no word of vLLM: `kernels` is a kernel set.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lite.primitive.kernels.visible import SSDShape
from lite.primitive.parallel.packing import Seqlens
from lite.vllm_plugin import page_io

DECODE_SEQUENCES = 64  # scanned at once: each takes a chunk of rows and three states of memory


class Pages(NamedTuple):
    """A layer's state, a page a request; views of the engine's cache, written in place.

    conv[B, W-1, C]          the last rows before the convolution
    boundary[B, H, P, N]     fp32, the state after the last full chunk
    rows[B, L, C], dt[B, L, H]  since then, after the convolution
    """

    conv: Tensor
    boundary: Tensor
    rows: Tensor
    dt: Tensor


class Mixer(NamedTuple):
    """The weights that convolution and scan read, as the trainer's kernels take them."""

    conv_weight: Tensor
    conv_bias: Tensor | None
    A: Tensor
    D: Tensor
    dt_bias: Tensor
    shape: SSDShape


class Pieces(NamedTuple):
    """Pieces of prompts that a step computes, of any length, from any token on. A sequence's rows are the held ones and then the new ones.

    seqlens             of the new rows
    all_seqlens         of all rows
    computed[S]         tokens before
    new_at[T]           where each new row stands among all
    held_of, held_row, held_at  of each held row: its sequence, its place in the page, where it stands among all
    kept_of, kept_row, kept_at  the same of each row that is held afterwards: those after the last full chunk
    """

    seqlens: Seqlens
    all_seqlens: Seqlens
    computed: Tensor
    new_at: Tensor
    held_of: Tensor
    held_row: Tensor
    held_at: Tensor
    kept_of: Tensor
    kept_row: Tensor
    kept_at: Tensor

    @classmethod
    def of(cls, computed: Sequence[int], new: Sequence[int], chunk: int, device: torch.device | str) -> "Pieces":
        """Made on the host, which knows these lengths; once a step, for all layers."""
        old, count = torch.tensor(computed), torch.tensor(new)
        before = old % chunk
        whole = before + count
        ends = whole.cumsum(0)
        starts, after = ends - whole, whole % chunk
        parts = (
            old, _ranges(starts + before, count), _owners(before), _ranges(torch.zeros_like(before), before), _ranges(starts, before),
            _owners(after), _ranges(torch.zeros_like(after), after), _ranges(ends - after, after),
        )  # fmt: skip
        there = torch.cat(parts).to(device).split([len(part) for part in parts])  # one copy: each waits for the device
        return cls(Seqlens.of(new, new, device), Seqlens.of(whole.tolist(), whole.tolist(), device), *there)


def _ranges(start: Tensor, count: Tensor) -> Tensor:
    """start[i] .. start[i] + count[i] - 1 for each i, one after another."""
    return torch.arange(int(count.sum())) + torch.repeat_interleave(start - (count.cumsum(0) - count), count)


def _owners(count: Tensor) -> Tensor:
    """Each i count[i] times."""
    return torch.repeat_interleave(torch.arange(len(count)), count)


def prefill(kernels: Any, mixer: Mixer, pages: Pages, slots: Tensor, pieces: Pieces, xbc: Tensor, dt: Tensor) -> Tensor:
    """xbc[T, C] before the convolution, dt[T, H] of the pieces' new rows; slots[S]: each sequence's page. -> y[T, H*P]."""
    slots = slots.long()
    history = page_io.read_states(pages.conv, slots, pieces.computed > 0)
    rows = kernels.causal_conv1d(xbc, mixer.conv_weight, mixer.conv_bias, history, pieces.seqlens)
    pages.conv[slots] = _last_rows(history, xbc, pieces.seqlens.cu_q)

    all_rows, all_dt = _extend(pages.rows, slots, pieces, rows), _extend(pages.dt, slots, pieces, dt)
    before = page_io.read_states(pages.boundary, slots, pieces.computed >= mixer.shape.chunk)
    y, boundary = kernels.ssd_scan(all_rows, all_dt, mixer.A, mixer.D, mixer.dt_bias, before, pieces.all_seqlens, mixer.shape)
    pages.boundary[slots] = boundary
    for held, now in ((pages.rows, all_rows), (pages.dt, all_dt)):
        held[slots[pieces.kept_of], pieces.kept_row] = now[pieces.kept_at]
    return y[pieces.new_at]


def _last_rows(history: Tensor, x: Tensor, cu: Tensor) -> Tensor:
    """history[S, n, C] and then each sequence's rows of x -> the last n of each."""
    n = history.shape[1]
    place = cu.diff()[:, None] + torch.arange(n, device=x.device)  # counted from the history's first row
    new = x[(cu[:-1, None] + place - n).clamp(min=0)]
    old = history.gather(1, place.clamp(max=n - 1).long()[..., None].expand_as(history))
    return torch.where((place < n)[..., None], old, new)


def _extend(held: Tensor, slots: Tensor, pieces: Pieces, new: Tensor) -> Tensor:
    out = new.new_empty(len(pieces.new_at) + len(pieces.held_at), new.shape[1])
    out[pieces.new_at] = new
    out[pieces.held_at] = held[slots[pieces.held_of], pieces.held_row]
    return out


def decode(kernels: Any, mixer: Mixer, pages: Pages, slots: Tensor, computed: Tensor, xbc: Tensor, dt: Tensor) -> Tensor:
    """One new row of each sequence, xbc[S, C] and dt[S, H], after computed[S] tokens. -> y[S, H*P].

    For CUDA graphs: no size and no launch depends on what the tensors hold. Each sequence is scanned as a chunk of its rows and zeros, and
    y is read at the new row. It has the bits of a scan that ends there: the scan is causal, so what later rows give is multiplied by a
    mask's zeros; a product's row and an entry of a cumulative sum do not read what follows them; and a tile beyond the end of a shorter
    chunk is read as zeros by the kernels themselves. The chunk's final state counts only where the chunk is full.
    """
    y = xbc.new_empty(len(xbc), mixer.shape.heads * mixer.shape.head_dim)
    for start in range(0, len(xbc), DECODE_SEQUENCES):
        part = slice(start, start + DECODE_SEQUENCES)
        y[part] = _decode(kernels, mixer, pages, slots[part].long(), computed[part], xbc[part], dt[part])
    return y


def _decode(kernels: Any, mixer: Mixer, pages: Pages, slots: Tensor, computed: Tensor, xbc: Tensor, dt: Tensor) -> Tensor:
    sequences, chunk, device = len(slots), mixer.shape.chunk, xbc.device
    each = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    sequence, row = each[:-1].long(), (computed % chunk).long()

    history = page_io.read_states(pages.conv, slots, computed > 0)
    new = kernels.causal_conv1d(xbc, mixer.conv_weight, mixer.conv_bias, history, Seqlens(each, each, 1, 1))
    pages.conv[slots] = torch.cat([history[:, 1:], xbc[:, None]], dim=1)

    pages.rows[slots, row], pages.dt[slots, row] = new, dt
    rows, all_dt = (page_io.read_rows(held, slots, row).flatten(0, 1) for held in (pages.rows, pages.dt))
    before = page_io.read_states(pages.boundary, slots, computed >= chunk)
    cu = each * chunk
    y, after = kernels.ssd_scan(rows, all_dt, mixer.A, mixer.D, mixer.dt_bias, before, Seqlens(cu, cu, chunk, chunk), mixer.shape)
    page_io.write_states(pages.boundary, slots, row == chunk - 1, after)
    return y.view(sequences, chunk, -1)[sequence, row]
