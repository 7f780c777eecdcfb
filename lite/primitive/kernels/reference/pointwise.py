"""Reference norms, embedding, rotary, SwiGLU and relu2 out of operations that treat every element alike.

Two habits of ATen on a CPU would break row invariance and are avoided here: a reduction to one element is split over the threads
(so `tree_sum` adds halves element by element), and `sigmoid`/`silu`/`softplus` use another formula for the last elements of a buffer
than for the ones that fill a vector register (so they are spelled with `exp` and `log1p`, whose tail is computed like their body).
"""

import torch
from torch import Tensor


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last axis by adding halves: the order of the additions is the axis length's alone. x fp32."""
    while (n := x.shape[-1]) > 1:
        half = n // 2
        halves = x[..., :half] + x[..., half : 2 * half]
        x = halves if n % 2 == 0 else torch.cat([halves, x[..., -1:]], dim=-1)
    return x[..., 0]


def prefix_sum(x: Tensor) -> Tensor:
    """Sums of the first 1, 2, 3, ... elements of the last axis by doubling distances: what follows an element never enters its sum, and
    the order of the additions is the element's place alone. x fp32."""
    distance = 1
    while distance < x.shape[-1]:
        x = torch.cat([x[..., :distance], x[..., distance:] + x[..., :-distance]], dim=-1)
        distance *= 2
    return x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    mean_square = tree_sum(x32 * x32) / x.shape[-1]
    rstd = 1.0 / torch.sqrt(mean_square + eps)
    return (x32 * rstd[..., None] * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return weight[ids]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the halves of x[T, heads, D] by the angles of cos, sin[T, D/2] (fp32); computed in fp32, rounded once to x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin[positions].float().chunk(2, dim=-1)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)). x fp32."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), from the side that cannot overflow. x fp32."""
    return torch.relu(x) + torch.log1p(torch.exp(-x.abs()))


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate.float().contiguous()).to(gate.dtype) * up


def relu2(x: Tensor) -> Tensor:
    positive = torch.relu(x)
    return positive * positive
