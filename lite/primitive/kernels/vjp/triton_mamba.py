"""VJPs of Mamba-2's gated norm and of its convolution's parameters that read and write each activation once, in Triton; torch_mamba.py has
the formulas.

fp32 inside, rounded once, and no autotuning or atomics, as in triton.py. Rows of an activation may lie apart, as those of a split
projection do: nothing is copied for that.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lite.primitive.kernels.vjp.triton import PROGRAMS

TILE = 1024  # elements of the norm that a program holds at once: 8 a thread of 4 warps, so that four programs fit a processor
CONV_ROWS, CONV_COLUMNS = 64, 256  # of a program; each thread walks down two columns


@cache
def _kernels() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def gated_rms_norm(  # type: ignore[no-untyped-def]
        x, gate, weight, dy, dx, d_gate, d_weight, rows, C, size, x_row, gate_row, dy_row, eps, R: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        place = tl.arange(0, BLOCK)
        inside = place < size
        column = tl.program_id(1) * size + place
        w = tl.load(weight + column, inside, 0.0).to(tl.float32)[None, :]
        sums = tl.zeros((R, BLOCK), tl.float32)
        for start in tl.range(tl.program_id(0) * R, rows, tl.num_programs(0) * R, num_stages=3):  # the next two tiles are on their way
            row = (start + tl.arange(0, R))[:, None].to(tl.int64)
            mask = (row < rows) & inside[None, :]
            x_ = tl.load(x + row * x_row + column[None, :], mask, 0.0).to(tl.float32)
            gate_ = tl.load(gate + row * gate_row + column[None, :], mask, 0.0).to(tl.float32)
            dy_ = tl.load(dy + row * dy_row + column[None, :], mask, 0.0).to(tl.float32)
            sigmoid = 1.0 / (1.0 + tl.exp(-gate_))
            h = x_ * gate_ * sigmoid
            rstd = (1.0 / tl.sqrt(tl.sum(h * h, 1) / size + eps))[:, None]
            g = dy_ * w
            mean = (tl.sum(g * h, 1) / size)[:, None]
            dh = rstd * (g - h * rstd * rstd * mean)
            at = row * C + column[None, :]
            tl.store(dx + at, dh * gate_ * sigmoid, mask)
            tl.store(d_gate + at, dh * x_ * sigmoid * (1.0 + gate_ * (1.0 - sigmoid)), mask)
            sums += dy_ * h * rstd
        tl.store(d_weight + tl.program_id(0) * C + column, tl.sum(sums, 0), inside)

    @triton.jit
    def conv_parameters(  # type: ignore[no-untyped-def]
        x, weight, bias, sequence, dy, sums, rows, C, x_row, dy_row, BIAS: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = column < C
        zero = tl.zeros((BLOCK,), tl.float32)
        w = weight + column * W + W - 4  # a narrower convolution is one of four taps, the first of which are 0
        w0 = tl.load(w, inside & (W > 3), 0.0).to(tl.float32)
        w1 = tl.load(w + 1, inside & (W > 2), 0.0).to(tl.float32)
        w2 = tl.load(w + 2, inside & (W > 1), 0.0).to(tl.float32)
        w3 = tl.load(w + 3, inside, 0.0).to(tl.float32)
        b = zero
        if BIAS:
            b = tl.load(bias + column, inside, 0.0).to(tl.float32)

        # x0 to x3 are what the taps read; before the first row: the three rows above it that are of its sequence
        start = tl.program_id(1).to(tl.int64) * R
        above = tl.load(sequence + start)
        at = x + start * x_row + column
        x1 = tl.load(at - 3 * x_row, inside & (tl.load(sequence + start - 3, start > 2, -1) == above), 0.0).to(tl.float32)
        x2 = tl.load(at - 2 * x_row, inside & (tl.load(sequence + start - 2, start > 1, -1) == above), 0.0).to(tl.float32)
        x3 = tl.load(at - x_row, inside & (tl.load(sequence + start - 1, start > 0, -1) == above), 0.0).to(tl.float32)
        d0, d1, d2, d3, d_bias = zero, zero, zero, zero, zero
        for row in tl.range(start, tl.minimum(start + R, rows), loop_unroll_factor=4):  # four rows are on their way at once
            own = tl.load(sequence + row)
            x0 = tl.where(own == above, x1, 0.0)
            x1 = tl.where(own == above, x2, 0.0)
            x2 = tl.where(own == above, x3, 0.0)
            x3 = tl.load(x + row * x_row + column, inside, 0.0).to(tl.float32)
            dy_ = tl.load(dy + row * dy_row + column, inside, 0.0).to(tl.float32)
            s = b + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
            sigmoid = 1.0 / (1.0 + tl.exp(-s))
            ds = dy_ * sigmoid * (1.0 + s * (1.0 - sigmoid))
            d0 += ds * x0
            d1 += ds * x1
            d2 += ds * x2
            d3 += ds * x3
            d_bias += ds
            above = own
        out = sums + tl.program_id(1).to(tl.int64) * 5 * C + column
        tl.store(out, d0, inside)
        tl.store(out + C, d1, inside)
        tl.store(out + 2 * C, d2, inside)
        tl.store(out + 3 * C, d3, inside)
        tl.store(out + 4 * C, d_bias, inside)

    return SimpleNamespace(gated_rms_norm=gated_rms_norm, conv_parameters=conv_parameters, cdiv=triton.cdiv, power=triton.next_power_of_2)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y = norm(x silu(gate)) weight of x, gate[T, C], the norm over each of the groups. -> (dx as x, d_gate as gate, d_weight fp32)."""
    k, (T, C) = _kernels(), x.shape
    x, gate, dy = _rows(x), _rows(gate), _rows(dy)
    size, block = C // groups, k.power(C // groups)
    dx, d_gate = torch.empty(T, C, dtype=x.dtype, device=x.device), torch.empty(T, C, dtype=gate.dtype, device=x.device)
    sums = torch.empty(PROGRAMS, C, dtype=torch.float32, device=x.device)
    k.gated_rms_norm[(PROGRAMS, groups)](
        x, gate, weight, dy, dx, d_gate, sums, T, C, size, x.stride(0), gate.stride(0), dy.stride(0), eps, R=max(1, TILE // block),
        BLOCK=block, num_warps=min(32, max(4, block // 256)),
    )  # fmt: skip
    return dx, d_gate, sums.sum(0)


def conv_parameters(x: Tensor, weight: Tensor, bias: Tensor | None, sequence: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """y = silu(s), s = bias + sum over w of weight_w x[row - (W - 1) + w], 0 for a row before the sequence; x[T, C], weight[C, W] of at
    most 4 taps, sequence[T] int32: which each row is of. -> (d_weight[C, W], d_bias[C]), fp32."""
    k, (T, C), W = _kernels(), x.shape, weight.shape[1]
    assert W <= 4
    x, dy = _rows(x), _rows(dy)
    sums = torch.empty(k.cdiv(T, CONV_ROWS), 5, C, dtype=torch.float32, device=x.device)
    k.conv_parameters[(k.cdiv(C, CONV_COLUMNS), len(sums))](
        x, weight, weight if bias is None else bias, sequence, dy, sums, T, C, x.stride(0), dy.stride(0), BIAS=bias is not None, W=W,
        R=CONV_ROWS, BLOCK=CONV_COLUMNS, num_warps=4,
    )  # fmt: skip
    total = sums.sum(0)
    return total[4 - W : 4].t().contiguous(), total[4]


def _rows(t: Tensor) -> Tensor:
    """What the kernels take: each row contiguous."""
    return t if t.stride(1) == 1 else t.contiguous()
