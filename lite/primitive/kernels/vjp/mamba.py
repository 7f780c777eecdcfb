"""VJPs of Mamba-2's convolution and scan on a Hopper GPU in bf16, deterministic: causal_conv1d's backward for the rows, mamba_ssm's for
the scan, and triton_mamba.py for the convolution's parameters, which the former would add atomically.

They serve training, where whole sequences are given: no history, no boundary. mamba_ssm cuts its chunks at multiples of the packed row
instead of each sequence's and keeps sequences apart inside a chunk; that rounds elsewhere and changes no formula.
"""

import os
from typing import Any

import torch
from torch import Tensor

from lite.errors import InputError
from lite.primitive.kernels.vjp import Grads, Needs, Values, triton_mamba


def causal_conv1d(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """torch_mamba.py has the formula."""
    x, weight, bias, dy = values["x"], values["weight"].detach(), values["bias"], d["y"]
    assert dy is not None and values["history"] is None
    bias = None if bias is None else bias.detach()
    sequence = _sequence_of_rows(values["seqlens"].cu_q, x.shape[0])
    grads = {}
    if "x" in needs:
        from causal_conv1d.cpp_functions import causal_conv1d_bwd_function

        rows, d_rows = (t.contiguous()[None].transpose(1, 2) for t in (x, dy))  # [1, C, T], channels last: the layout that takes seq_idx
        dx, *_ = causal_conv1d_bwd_function(rows, weight, bias, d_rows, sequence[None], None, None, None, False, True)
        grads["x"] = dx[0].t()
    if needs & {"weight", "bias"}:
        found = zip(("weight", "bias"), triton_mamba.conv_parameters(x, weight, bias, sequence, dy), strict=True)
        grads |= {name: grad for name, grad in found if name in needs}
    return grads


def _sequence_of_rows(cu: Tensor, rows: int) -> Tensor:
    index = torch.arange(len(cu) - 1, dtype=torch.int32, device=cu.device)
    return torch.repeat_interleave(index, cu.diff().long(), output_size=rows)


def ssd_scan(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """The recurrence's adjoint; gradients of A, D and dt_bias are sums over all rows, in fp32."""
    backward = scan_backward()
    xbc, dt, shape, dy = values["xbc"], values["dt"], values["shape"], d["y"]
    assert dy is not None and values["boundary"] is None
    rows, states = xbc.shape[0], shape.groups * shape.state
    x, b, c = xbc.contiguous().split([shape.heads * shape.head_dim, states, states], dim=-1)
    heads, groups = (1, rows, shape.heads, shape.head_dim), (1, rows, shape.groups, shape.state)
    x, b, c = x.view(heads), b.view(groups), c.view(groups)
    D, dt_bias = (values[name].detach().float() for name in ("D", "dt_bias"))  # in fp32, so that their gradients are
    dx, d_dt, d_a, d_b, d_c, d_d, _, d_dt_bias, _ = backward(
        dy.contiguous().view(heads),
        x,
        dt.contiguous()[None],
        values["A"],
        b,
        c,
        x,
        shape.chunk,
        D=D,
        dt_bias=dt_bias,
        seq_idx=_sequence_of_rows(values["seqlens"].cu_k, rows)[None],
        dt_softplus=True,
    )  # fmt: skip  (the second x stands for the output, of which the backward reads the shape)
    d_xbc = torch.cat([t.reshape(rows, -1) for t in (dx, d_b, d_c)], dim=-1)
    found = {"xbc": d_xbc.to(xbc.dtype), "dt": d_dt[0].to(dt.dtype), "A": d_a, "D": d_d, "dt_bias": d_dt_bias}
    return {name: grad for name, grad in found.items() if name in needs}


def scan_backward() -> Any:
    """mamba_ssm's backward of the scan in its deterministic mode, which it reads from the environment: when it is imported, to take one
    configuration of each kernel in place of those that it would time, and in each call, to sum without atomics. vLLM's import has asked
    Triton to keep timings on disk, for which mamba_ssm would time its kernels in that mode too."""
    os.environ["MAMBA_DETERMINISTIC"] = "1"
    cached = os.environ.pop("TRITON_CACHE_AUTOTUNING", None)
    from mamba_ssm.ops.triton import ssd_combined

    if cached is not None:
        os.environ["TRITON_CACHE_AUTOTUNING"] = cached
    if len(ssd_combined._chunk_scan_chunk_state_bwd_dx_kernel.configs) != 1:
        raise InputError("mamba_ssm", "was imported outside its deterministic mode", "set MAMBA_DETERMINISTIC=1 before it is imported")
    return ssd_combined._mamba_chunk_scan_combined_bwd
