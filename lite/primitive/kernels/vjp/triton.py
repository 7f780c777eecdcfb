"""VJPs that read and write each activation once, in Triton; torch.py has the formulas, in a pass for each of their operations.

fp32 inside, rounded once, as there. Transformer Engine's would round a norm weight's gradient to the weight's dtype; here it stays fp32.
The order of every sum depends on shapes alone: no autotuning, no atomics.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PROGRAMS = 264  # partial sums of a norm weight's gradient; two for each processor of an H200, and no other number elsewhere
TILE = 4096  # elements a program holds at once


@cache
def _kernels() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def rms_norm(x, weight, dy, d_total, dx, d_weight, rows, H, eps, ADD: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        column = tl.arange(0, BLOCK)
        inside = column < H
        w = tl.load(weight + column, inside, 0.0).to(tl.float32)[None, :]
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(tl.program_id(0) * R, rows, tl.num_programs(0) * R):
            row = start + tl.arange(0, R)
            at = row[:, None].to(tl.int64) * H + column[None, :]
            mask = (row < rows)[:, None] & inside[None, :]
            x_ = tl.load(x + at, mask, 0.0).to(tl.float32)
            dy_ = tl.load(dy + at, mask, 0.0).to(tl.float32)
            rstd = (1.0 / tl.sqrt(tl.sum(x_ * x_, 1) / H + eps))[:, None]
            g = dy_ * w
            mean = (tl.sum(g * x_, 1) / H)[:, None]
            out = rstd * (g - x_ * rstd * rstd * mean)
            if ADD:
                out += tl.load(d_total + at, mask, 0.0).to(tl.float32)
            tl.store(dx + at, out, mask)
            sums += tl.sum(dy_ * x_ * rstd, 0)
        tl.store(d_weight + tl.program_id(0) * H + column, sums, inside)

    @triton.jit
    def swiglu(gate_up, dy, d_gate_up, F, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < F
        gate = tl.load(gate_up + row * 2 * F + column, inside, 0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * F + F + column, inside, 0.0).to(tl.float32)
        dy_ = tl.load(dy + row * F + column, inside, 0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        tl.store(d_gate_up + row * 2 * F + column, dy_ * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), inside)
        tl.store(d_gate_up + row * 2 * F + F + column, dy_ * gate * sigmoid, inside)

    @triton.jit
    def logits(  # type: ignore[no-untyped-def]
        z, labels, temperature, log_z, entropy, d_logprob, d_entropy, start, C, LOGPROB: tl.constexpr, ENTROPY: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < C
        t = tl.load(temperature + row)
        log_p = tl.load(z + row * C + column, inside, 0.0).to(tl.float32) / t - tl.load(log_z + row)
        p = tl.exp(log_p)
        dz = tl.zeros((BLOCK,), tl.float32)
        if LOGPROB:
            own = column + start == tl.load(labels + row)
            dz += tl.load(d_logprob + row) * (tl.where(own, 1.0, 0.0) - p)
        if ENTROPY:
            dz -= tl.load(d_entropy + row) * tl.where(p > 0.0, p * (log_p + tl.load(entropy + row)), 0.0)
        tl.store(z + row * C + column, dz / t, inside)

    return SimpleNamespace(rms_norm=rms_norm, swiglu=swiglu, logits=logits, cdiv=triton.cdiv, power=triton.next_power_of_2)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dy: Tensor, d_total: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y = norm(x) weight over the last dimension. d_total: what else flows into x, added to its gradient. -> (dx as x, d_weight fp32)."""
    k, H = _kernels(), x.shape[-1]
    x, dy, d_total = x.contiguous(), dy.contiguous(), None if d_total is None else d_total.contiguous()
    rows, block = x.numel() // H, k.power(H)
    dx, sums = torch.empty_like(x), torch.empty(PROGRAMS, H, dtype=torch.float32, device=x.device)
    k.rms_norm[(PROGRAMS,)](
        x, weight, dy, dy if d_total is None else d_total, dx, sums, rows, H, eps, ADD=d_total is not None, R=max(1, TILE // block),
        BLOCK=block, num_warps=8,
    )  # fmt: skip
    return dx, sums.sum(0)


def swiglu(gate_up: Tensor, dy: Tensor) -> Tensor:
    """y = silu(gate) up of gate_up[T, 2 F]. -> d_gate_up."""
    k, (T, F) = _kernels(), dy.shape
    grad = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    k.swiglu[(T, k.cdiv(F, TILE))](gate_up.contiguous(), dy.contiguous(), grad, F, BLOCK=min(TILE, k.power(F)), num_warps=8)
    return grad


def logits_(
    z: Tensor,
    labels: Tensor,
    temperature: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    d_logprob: Tensor | None,
    d_entropy: Tensor | None,
    start: int,
) -> Tensor:
    """Logits z[T, C] of the words from `start` on, before the temperature, are replaced by their gradient. labels[T] int64, the rest [T]
    fp32. -> z."""
    k, (T, C) = _kernels(), z.shape
    k.logits[(T, k.cdiv(C, TILE))](
        z, labels, temperature, log_z, entropy, *(log_z if d is None else d.contiguous() for d in (d_logprob, d_entropy)), start, C,
        LOGPROB=d_logprob is not None, ENTROPY=d_entropy is not None, BLOCK=min(TILE, k.power(C)), num_warps=8,
    )  # fmt: skip
    return z
