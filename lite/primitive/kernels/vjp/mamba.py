"""VJPs of Mamba-2's convolution and scan on a Hopper GPU in bf16, deterministic: causal_conv1d's backward for the rows, mamba_ssm's for
the scan, and torch for what the former would add atomically.

They serve training, where whole sequences are given: no history, no boundary. mamba_ssm cuts its chunks at multiples of the packed row
instead of each sequence's and keeps sequences apart inside a chunk; that rounds elsewhere and changes no formula.
"""

import os
from typing import Any

import torch
from torch import Tensor

from lite.errors import InputError
from lite.primitive.kernels.vjp.torch import Grads, Needs, Values

CONV_BLOCK = 4096  # rows whose activations are held at once in fp32


def causal_conv1d(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """y = silu(z), z = bias + sum of taps: with g = silu'(z) dy, dx[t] = sum of weight[w] g[t + W - 1 - w] within its sequence,
    dW[w] = sum of g x[t - W + 1 + w], db = sum of g."""
    from causal_conv1d.cpp_functions import causal_conv1d_bwd_function

    x, weight, bias, cu, dy = values["x"], values["weight"], values["bias"], values["seqlens"].cu_q, d["y"]
    assert dy is not None and values["history"] is None
    grads = {}
    if "x" in needs:
        rows = [t.contiguous()[None].transpose(1, 2) for t in (x, dy)]  # [1, C, T], channels last: the layout that takes seq_idx
        sequence = _sequence_of_rows(cu, x.shape[0])[None]
        dx, *_ = causal_conv1d_bwd_function(rows[0], weight, bias, rows[1], sequence, None, None, None, False, True)
        grads["x"] = dx[0].t()
    if "weight" in needs or "bias" in needs:
        d_weight, d_bias = _conv_parameters(x, weight, bias, cu, dy)
        grads |= {"weight": d_weight} if "weight" in needs else {}
        grads |= {"bias": d_bias} if "bias" in needs else {}
    return grads


def _sequence_of_rows(cu: Tensor, rows: int) -> Tensor:
    index = torch.arange(len(cu) - 1, dtype=torch.int32, device=cu.device)
    return torch.repeat_interleave(index, cu.diff().long(), output_size=rows)


def _conv_parameters(x: Tensor, weight: Tensor, bias: Tensor | None, cu: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """-> (dW[C, W], db[C]) in fp32, block after block of rows in their order."""
    (total, channels), width = x.shape, weight.shape[1]
    place = torch.arange(total, device=x.device) - cu[_sequence_of_rows(cu, total).long()]  # in its sequence
    w32 = weight.float().t()
    d_weight, d_bias = (torch.zeros(*size, channels, device=x.device) for size in ((width,), ()))
    for start in range(0, total, CONV_BLOCK):
        rows = slice(start, min(start + CONV_BLOCK, total))
        taps = [_shifted(x, rows, place[rows], width - 1 - w) for w in range(width)]
        z = sum((tap * w32[w] for w, tap in enumerate(taps)), torch.zeros_like(d_bias) if bias is None else bias.float())
        sigmoid = torch.sigmoid(z)
        g = dy[rows].float() * sigmoid * (1 + z * (1 - sigmoid))
        d_bias += g.sum(0)
        for w, tap in enumerate(taps):
            d_weight[w] += (g * tap).sum(0)
    return d_weight.t().contiguous(), d_bias


def _shifted(x: Tensor, rows: slice, place: Tensor, back: int) -> Tensor:
    """x[t - back] for the rows t in fp32, zeros before their sequence."""
    index = torch.arange(rows.start - back, rows.stop - back, device=x.device).clamp(min=0)
    return torch.where((place >= back)[:, None], x[index].float(), 0.0)


def ssd_scan(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """The recurrence's adjoint; gradients of A, D and dt_bias are sums over all rows, in fp32."""
    backward = _mamba_backward()
    xbc, dt, shape, cu, dy = values["xbc"], values["dt"], values["shape"], values["seqlens"].cu_k, d["y"]
    assert dy is not None and values["boundary"] is None
    rows, states = xbc.shape[0], shape.groups * shape.state
    x, b, c = xbc.contiguous().split([shape.heads * shape.head_dim, states, states], dim=-1)
    heads = (1, rows, shape.heads, shape.head_dim)
    x, b, c = x.view(heads), b.view(1, rows, shape.groups, -1), c.view(1, rows, shape.groups, -1)
    dx, d_dt, d_a, d_b, d_c, d_d, _, d_dt_bias, _ = backward(
        dy.contiguous().view(heads), x, dt.contiguous()[None], values["A"], b, c, x, shape.chunk, D=values["D"].float(),
        dt_bias=values["dt_bias"].float(), seq_idx=_sequence_of_rows(cu, rows)[None], dt_softplus=True,
    )  # fmt: skip
    found = {
        "xbc": torch.cat([t.reshape(rows, -1) for t in (dx, d_b, d_c)], dim=-1).to(xbc.dtype),
        "dt": d_dt[0].to(dt.dtype), "A": d_a, "D": d_d, "dt_bias": d_dt_bias,
    }  # fmt: skip
    return {name: grad for name, grad in found.items() if name in needs}


def _mamba_backward() -> Any:
    """mamba_ssm's backward of the scan in its deterministic mode, which it reads from the environment: when it is imported, to take one
    configuration of each kernel in place of those that it would time, and in each call, to sum without atomics."""
    os.environ["MAMBA_DETERMINISTIC"] = "1"
    from mamba_ssm.ops.triton import ssd_combined

    if len(ssd_combined._chunk_scan_chunk_state_bwd_dx_kernel.configs) != 1:
        raise InputError("mamba_ssm", "was imported outside its deterministic mode", "set MAMBA_DETERMINISTIC=1 before it is imported")
    return ssd_combined._mamba_chunk_scan_combined_bwd
