"""VJPs of routed experts and of relu2 on a Hopper GPU in bf16: tensor cores for the products, Triton for what lies between them, where
each element is read and written once. torch_moe.py has the formula, in a pass for each of its operations.

fp32 inside, rounded once, as there; only W2^T dout and the experts' own sums come rounded from their products. The order of every sum
depends on shapes alone: no autotuning, no atomics.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lite.primitive.kernels.vjp import Grads, Needs, Values
from lite.primitive.kernels.vjp.torch_moe import by_expert, unsorted

BLOCK = 1024  # elements a program holds at once: for each of its 128 threads 8, which are 16 bytes of bf16
GATED = {"silu": True, "relu2_no_mul": False}


@cache
def _kernels() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def gather(d_out, token, weight, d_rows, weighted, H, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < H
        d = tl.load(d_out + tl.load(token + row) * H + column, inside, 0.0)
        tl.store(d_rows + row * H + column, d, inside)
        tl.store(weighted + row * H + column, d.to(tl.float32) * tl.load(weight + row), inside)

    @triton.jit
    def activation(up, d_mixed, weight, active, d_weight, d_up, F, GATED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        w = tl.load(weight + row)
        G = 2 * F if GATED else F
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, F, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < F
            first = tl.load(up + row * G + column, inside, 0.0).to(tl.float32)
            d_active = tl.load(d_mixed + row * F + column, inside, 0.0).to(tl.float32)
            d = d_active * w
            if GATED:
                second = tl.load(up + row * G + F + column, inside, 0.0).to(tl.float32)
                denominator = 1.0 + tl.exp(-first)
                silu, sigmoid = first / denominator, 1.0 / denominator
                a = silu.to(active.dtype.element_ty).to(tl.float32) * second  # silu is rounded before the product, as in the forward
                tl.store(d_up + row * G + column, d * second * sigmoid * (1.0 + first * (1.0 - sigmoid)), inside)
                tl.store(d_up + row * G + F + column, d * silu, inside)
            else:
                positive = tl.where(first < 0.0, 0.0, first)  # a NaN stays one
                a = positive * positive
                tl.store(d_up + row * G + column, 2.0 * positive * d, inside)
            a = a.to(active.dtype.element_ty)
            tl.store(active + row * F + column, a, inside)
            sums += d_active * a.to(tl.float32)
        tl.store(d_weight + row, tl.sum(sums, 0))

    @triton.jit
    def combine(rows, position, dx, H, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        token = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < H
        sums = tl.zeros((BLOCK,), tl.float32)
        for j in tl.static_range(K):
            row = tl.load(position + token * K + j)
            sums += tl.load(rows + row * H + column, inside, 0.0).to(tl.float32)
        tl.store(dx + token * H + column, sums, inside)

    @triton.jit
    def relu2(x, dy, dx, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        x_ = tl.load(x + at, inside, 0.0).to(tl.float32)
        dy_ = tl.load(dy + at, inside, 0.0).to(tl.float32)
        tl.store(dx + at, 2.0 * tl.where(x_ < 0.0, 0.0, x_) * dy_, inside)

    return SimpleNamespace(gather=gather, activation=activation, combine=combine, relu2=relu2, cdiv=triton.cdiv)


def gather(d_out: Tensor, token: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """d_out[T, H], token[M] int64, weight[M] fp32 -> (d_out[token], the same times weight), both [M, H] and as d_out."""
    k, M, H = _kernels(), token.shape[0], d_out.shape[1]
    d_rows, weighted = d_out.new_empty(M, H), d_out.new_empty(M, H)
    k.gather[(M, k.cdiv(H, BLOCK))](d_out.contiguous(), token, weight, d_rows, weighted, H, BLOCK=BLOCK, num_warps=4)
    return d_rows, weighted


def activation(name: str, up: Tensor, d_mixed: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a = act(up) of up[M, G], and what flows back from w a, with d_mixed[M, F] that of a alone (da = w d_mixed); weight[M] fp32.
    -> (a[M, F] rounded as the forward rounds it, but for the last bits of silu's exp in fp32; dw[M] = sum of a d_mixed in fp32;
    d_up[M, G])."""
    k, (M, F) = _kernels(), d_mixed.shape
    active, d_weight, d_up = up.new_empty(M, F), weight.new_empty(M), torch.empty_like(up)
    k.activation[(M,)](up, d_mixed, weight, active, d_weight, d_up, F, GATED=GATED[name], BLOCK=BLOCK, num_warps=4)
    return active, d_weight, d_up


def combine(rows: Tensor, position: Tensor) -> Tensor:
    """rows[M, H], position[T, k] int64 -> [T, H]: the sum of a token's rows in the order of k, as rows."""
    k, (T, K), H = _kernels(), position.shape, rows.shape[1]
    out = rows.new_empty(T, H)
    k.combine[(T, k.cdiv(H, BLOCK))](rows, position, out, H, K=K, BLOCK=BLOCK, num_warps=4)
    return out


def relu2(x: Tensor, dy: Tensor) -> Tensor:
    """y = relu(x)^2 of any shape. -> dx."""
    k, x, dy = _kernels(), x.contiguous(), dy.contiguous()
    dx = torch.empty_like(x)
    k.relu2[(k.cdiv(x.numel(), BLOCK),)](x, dy, dx, x.numel(), BLOCK=BLOCK, num_warps=4)
    return dx


def grouped_rows(a: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """torch_moe's in one launch for all experts; bf16 of sizes that are multiples of 8, accumulated in fp32, rounded once (it has no other
    output)."""
    return torch._grouped_mm(a, w, offs=ends)


def grouped_outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """torch_moe's in one launch, too, and so no wait for `ends`: an expert's sum over a micro-batch is rounded to bf16 once, sums of
    micro-batches are fp32. An expert without rows gets zeros."""
    return torch._grouped_mm(a.t(), b, offs=ends).float()


def routed_experts(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """torch_moe's formula."""
    x, w13, w2, weights, ids = (values[name] for name in ("x", "w13", "w2", "weights", "ids"))
    d_out = d["y"]
    assert d_out is not None
    order, token, ends = by_expert(ids, w13.shape[0])
    position = unsorted(torch.arange(len(order), device=order.device), order)
    weight, x_rows = weights.view(-1)[order], x[token]

    up = grouped_rows(x_rows, w13.transpose(1, 2), ends)
    d_rows, weighted = gather(d_out, token, weight)
    active, d_weight, d_up = activation(values["activation"], up, grouped_rows(d_rows, w2, ends), weight)
    grads = {}
    if "weights" in needs:
        grads["weights"] = d_weight[position].view_as(weights)
    if "w2" in needs:
        grads["w2"] = grouped_outer(weighted, active, ends)
    if "w13" in needs:
        grads["w13"] = grouped_outer(d_up, x_rows, ends)
    if "x" in needs:
        grads["x"] = combine(grouped_rows(d_up, w13, ends), position.view_as(ids))
    return grads
