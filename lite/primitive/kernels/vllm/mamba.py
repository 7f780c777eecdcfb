"""Mamba-2 as vLLM's kernels compute it: convolution, chunked scan, gated norm.

vLLM decodes by other kernels than it prefills, with other bits (`selective_state_update`). Here there is one scan, for the trainer and for
every step of the engine: chunks are aligned to each sequence's own start, and who continues inside a chunk gives that chunk's rows again
(the replay rule of `visible.py`). Nothing else than a sequence's rows and their places in its chunks enters a row's bits.

One compiled form each: the convolution always reads a history and the scan always initial states, zeros where there are none. Inputs of
the scan are dense, since Triton lays out a reduction by what it knows of strides and alignment.
"""

from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lite.errors import InputError
from lite.primitive.kernels.visible import SSDShape
from lite.primitive.parallel.packing import Seqlens

CONV_ROWS = 8  # of one sequence that a program of the convolution walks; vLLM's metadata knows no other number
SCAN_KERNELS = ("ssd_bmm", "ssd_chunk_scan", "ssd_chunk_state", "ssd_state_passing")


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None, seqlens: Seqlens) -> Tensor:
    """See `VisibleKernels.causal_conv1d`. Each product of a row and a tap is rounded to the model dtype before it is added in fp32."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn

    sequences, width = len(seqlens.cu_q) - 1, weight.shape[1]
    # vLLM writes the last rows into the cache that it reads; the kernel is compiled anew for each number of lines in it
    lines = x.new_zeros(max(8, 1 << (sequences - 1).bit_length()), width - 1, x.shape[1])
    if history is not None:
        lines[:sequences] = history
    programs = _conv_programs(seqlens, x.shape[0])
    return causal_conv1d_fn(
        x.t(), weight, bias, lines.transpose(1, 2), seqlens.cu_q,
        cache_indices=torch.arange(sequences, dtype=torch.int32, device=x.device),
        has_initial_state=torch.ones(sequences, dtype=torch.bool, device=x.device),
        activation="silu", null_block_id=-1, metadata=programs,
    ).t()  # fmt: skip


def _conv_programs(seqlens: Seqlens, rows: int) -> Any:
    """What vLLM's `compute_causal_conv1d_metadata` makes on the host, without asking the device how many: sequence and block of each
    program, -1 for those too many."""
    sequences, device = len(seqlens.cu_q) - 1, seqlens.cu_q.device
    if rows == sequences:  # one row each, as in a decode step: a few launches less, of which a step with few requests consists
        batch, offset = (make(sequences, dtype=torch.int32, device=device) for make in (torch.arange, torch.zeros))
        return _programs(batch, offset)
    count = sequences if seqlens.max_q <= CONV_ROWS else rows // CONV_ROWS + sequences
    blocks = (seqlens.cu_q.diff() + CONV_ROWS - 1) // CONV_ROWS
    ends = blocks.cumsum(0)
    program = torch.arange(count, device=device)
    sequence = torch.searchsorted(ends, program, right=True)
    block = program - (ends - blocks)[sequence.clamp(max=sequences - 1)]
    real = sequence < sequences
    return _programs(*(torch.where(real, t, -1).int() for t in (sequence, block)))


def _programs(batch: Tensor, offset: Tensor) -> Any:
    count = len(batch)
    held = {"tot": count, "mlist": batch, "mlist_len": count, "offsetlist": offset, "batch_ptr": batch, "token_chunk_offset_ptr": offset}
    return SimpleNamespace(nums_dict={CONV_ROWS: held}, batch_ptr=batch, token_chunk_offset_ptr=offset)


class Chunks(NamedTuple):
    """starts[n + 1]: each chunk's first row, and the end; last[S]: each sequence's last chunk; sequence[n]: whose each chunk is. int32."""

    starts: Tensor
    last: Tensor
    sequence: Tensor


def chunks_of(cu: Tensor, longest: int, rows: int, size: int) -> Chunks:
    """Chunks of `size` rows from each sequence's first row on, the last one shorter. The device is not asked how many: there may be some
    more at the end, of no rows, that count as the last sequence's. Each sequence has a row."""
    sequences = len(cu) - 1
    if longest == size and rows == sequences * size:  # each sequence is one full chunk, as in a decode step
        each = torch.arange(sequences, dtype=torch.int32, device=cu.device)
        return Chunks(cu.int(), each, each)
    count = sequences if longest <= size else rows // size + sequences
    chunks = (cu.diff() + size - 1) // size
    ends = chunks.cumsum(0)
    chunk = torch.arange(count, device=cu.device)
    sequence = torch.searchsorted(ends, chunk, right=True).clamp(max=sequences - 1)
    within = chunk - (ends - chunks)[sequence]
    starts = torch.minimum(cu[sequence] + within * size, cu[-1])
    return Chunks(torch.cat([starts, cu[-1:]]).int(), (ends - 1).int(), sequence.int())


def ssd_scan(
    xbc: Tensor, dt: Tensor, A: Tensor, D: Tensor, dt_bias: Tensor, boundary: Tensor | None, seqlens: Seqlens, shape: SSDShape
) -> tuple[Tensor, Tensor]:
    """See `VisibleKernels.ssd_scan`. The number of queries is read from the device where they are not all rows, that is, where cu_q is
    another tensor than cu_k; training and the engine give one for both."""
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    pin_autotuners()
    (rows, _), cu, inner = xbc.shape, seqlens.cu_k, shape.heads * shape.head_dim
    chunks = chunks_of(cu, seqlens.max_k, rows, shape.chunk)
    if boundary is None:
        boundary = xbc.new_zeros(len(cu) - 1, shape.heads, shape.head_dim, shape.state, dtype=torch.float32)
    x, b, c = xbc.contiguous().split([inner, shape.groups * shape.state, shape.groups * shape.state], dim=-1)
    y = x.new_empty(rows, shape.heads, shape.head_dim)
    states = mamba_chunk_scan_combined_varlen(
        x.unflatten(1, (shape.heads, -1)), dt.contiguous(), A, b.unflatten(1, (shape.groups, -1)), c.unflatten(1, (shape.groups, -1)),
        shape.chunk, cu, chunks.starts, chunks.last, chunks.sequence, y, D=D, dt_bias=dt_bias, initial_states=boundary.contiguous(),
        dt_softplus=True, dt_limit=(0.0, float("inf")), return_intermediate_states=True, state_dtype=torch.float32,
    )  # fmt: skip
    if rows == shape.chunk * (len(cu) - 1) and seqlens.max_k == shape.chunk:  # each sequence is one full chunk, as in a decode step
        return _queries(y.flatten(1), seqlens), states
    return _queries(y.flatten(1), seqlens), _last_full(states, boundary, cu.diff(), chunks.last, shape.chunk)


def _queries(y: Tensor, seqlens: Seqlens) -> Tensor:
    """The rows of each sequence's last len_q."""
    if seqlens.cu_q is seqlens.cu_k:
        return y
    count = int(seqlens.cu_q[-1])
    offset = (seqlens.cu_k[1:] - seqlens.cu_q[1:]).long()
    return y[torch.arange(count, device=y.device) + torch.repeat_interleave(offset, seqlens.cu_q.diff().long(), output_size=count)]


def _last_full(states: Tensor, boundary: Tensor, lengths: Tensor, last: Tensor, size: int) -> Tensor:
    """states[n]: after each chunk -> [S]: after each sequence's last full one, or its boundary where none is."""
    full = (lengths // size).long()
    at = last.long() - (lengths % size != 0).long()
    return torch.where((full > 0)[:, None, None, None], states[at.clamp(min=0)], boundary)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """See `VisibleKernels.gated_rms_norm`: vLLM's Triton kernel for one group (it rounds once, at the end), else its PyTorch form with the
    mean that batch-invariant mode puts there, called by its name: what else the process overrides does not matter."""
    if groups == 1:
        from vllm.model_executor.layers.mamba.ops.layernorm_gated import rms_norm_gated

        return rms_norm_gated(x, weight, bias=None, z=gate, eps=eps, norm_before_gate=False)
    from vllm.model_executor.layers.batch_invariant import mean_batch_invariant

    gated = (x * F.silu(gate.float())).unflatten(1, (groups, -1))
    normed = gated * torch.rsqrt(mean_batch_invariant(gated.pow(2), [-1], keepdim=True) + eps)
    return weight * normed.flatten(1).to(x.dtype)


def relu2(x: Tensor) -> Tensor:
    import vllm._custom_ops  # noqa: F401  (registers torch.ops._C)

    out = torch.empty_like(x)
    torch.ops._C.relu_squared(out, x)
    return out


@cache
def pin_autotuners() -> None:
    """The scan's five kernels are autotuned by time: two processes may choose other tiles, which are other bits. From here on each has the
    first of its configurations. InputError where one has chosen already."""
    from triton.runtime.autotuner import Autotuner

    for name in SCAN_KERNELS:
        for kernel in vars(import_module(f"vllm.model_executor.layers.mamba.ops.{name}")).values():
            if not isinstance(kernel, Autotuner):
                continue
            if kernel.cache:
                fix = "pin vLLM's autotuners (pin_autotuners) before a Mamba layer runs in this process"
                raise InputError("vllm", f"{kernel.base_fn.__name__} has chosen its tiles by time", fix)
            kernel.configs = kernel.configs[:1]
