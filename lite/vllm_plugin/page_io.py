"""What a decode step reads of the pages of its requests and writes into them. On a GPU each is one Triton kernel, which moves only what
counts; the torch functions beside them are the formulas.

held[B, ...]: a view of the engine's cache, a page a request, dense inside a page. slots[S] int64: each request's page.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

TILE = 4096  # elements a program holds at once


@cache
def _kernels() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def read_rows(held, slots, last, out, page, L, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
        request = tl.program_id(0).to(tl.int64)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = (row < L) & (column < C)
        found = tl.load(held + tl.load(slots + request) * page + row * C + column, inside & (row <= tl.load(last + request)), 0.0)
        tl.store(out + request * L * C + row * C + column, found, inside)

    @triton.jit
    def read_states(held, slots, valid, out, page, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        request = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        counts = (at < N) & (tl.load(valid + request) != 0)
        tl.store(out + request * N + at, tl.load(held + tl.load(slots + request) * page + at, counts, 0.0), at < N)

    @triton.jit
    def write_states(held, slots, full, states, page, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        request = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        counts = (at < N) & (tl.load(full + request) != 0)
        tl.store(held + tl.load(slots + request) * page + at, tl.load(states + request * N + at, counts), counts)

    return SimpleNamespace(
        read_rows=read_rows, read_states=read_states, write_states=write_states, cdiv=triton.cdiv, power=triton.next_power_of_2
    )  # fmt: skip


def read_rows(held: Tensor, slots: Tensor, last: Tensor) -> Tensor:
    """held[B, L, C] -> [S, L, C]: rows up to and including last[S], zeros after them."""
    if held.is_cuda:
        return fused_read_rows(held, slots, last)
    counts = torch.arange(held.shape[1], device=held.device) <= last[:, None]
    return torch.where(counts[..., None], held[slots], 0)


def read_states(held: Tensor, slots: Tensor, valid: Tensor) -> Tensor:
    """-> [S, ...]: the page where valid[S] bool, zeros where not: whatever it held before may be NaN."""
    if held.is_cuda:
        return fused_read_states(held, slots, valid)
    return torch.where(valid.view(-1, *[1] * (held.ndim - 1)), held[slots], 0)


def write_states(held: Tensor, slots: Tensor, full: Tensor, states: Tensor) -> None:
    """states[S, ...] into the pages where full[S] bool. A page may be named several times where it is not."""
    if held.is_cuda:
        fused_write_states(held, slots, full, states)
    else:
        held[slots[full]] = states[full]


def fused_read_rows(held: Tensor, slots: Tensor, last: Tensor) -> Tensor:
    k, (_, L, C) = _kernels(), held.shape
    out = held.new_empty(len(slots), L, C)
    columns = min(512, k.power(C))
    rows = TILE // columns
    k.read_rows[(len(slots), k.cdiv(L, rows), k.cdiv(C, columns))](
        held, slots.contiguous(), last, out, held.stride(0), L, C, ROWS=rows, COLUMNS=columns, num_warps=8
    )  # fmt: skip
    return out


def fused_read_states(held: Tensor, slots: Tensor, valid: Tensor) -> Tensor:
    k, out = _kernels(), held.new_empty(len(slots), *held.shape[1:])
    size = held[0].numel()
    k.read_states[(len(slots), k.cdiv(size, TILE))](held, slots.contiguous(), valid, out, held.stride(0), size, BLOCK=TILE, num_warps=8)
    return out


def fused_write_states(held: Tensor, slots: Tensor, full: Tensor, states: Tensor) -> None:
    k, size = _kernels(), held[0].numel()
    k.write_states[(len(slots), k.cdiv(size, TILE))](
        held, slots.contiguous(), full, states.contiguous(), held.stride(0), size, BLOCK=TILE, num_warps=8
    )  # fmt: skip
