"""On a Hopper GPU: convolution, scan and gated norm against the references that causal-conv1d and mamba-ssm test their own kernels with,
at those tests' sizes, splits and tolerances (causal-conv1d 1.7's `test_causal_conv1d_varlen`; weights here are bf16, as vLLM holds them).

    python -m pytest tests/gpu/test_upstream_references.py -m gpu       # with vLLM 0.26, mamba-ssm and causal-conv1d installed

What they test of the backwards that ours call is in their source distributions and needs nothing of ours:

    python -m pytest causal_conv1d-1.7.0/tests/test_causal_conv1d.py -k "bwd_deterministic"
    python -m pytest mamba_ssm-2.3.2.post1/tests/test_determinism.py -k "combined_kernel"
"""

import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F

from lite.primitive.kernels.visible import SSDShape
from lite.primitive.parallel.packing import Seqlens
from tests.gradients import relative_l2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or any(importlib.util.find_spec(name) is None for name in ("vllm", "mamba_ssm", "causal_conv1d")),
        reason="needs a Hopper GPU, vLLM 0.26, mamba-ssm and causal-conv1d: "
        "run `python -m pytest tests/gpu/test_upstream_references.py -m gpu`",
    ),
]

DEVICE, BF16 = "cuda", torch.bfloat16
SCAN_LIMIT = 1e-2  # relative L2; upstream compares its scan with no reference of its own


@pytest.fixture(scope="module")
def ops():
    os.environ.update(VLLM_BATCH_INVARIANT="1", VLLM_LOGGING_LEVEL="ERROR")
    from vllm.model_executor.layers.batch_invariant import init_batch_invariance

    from lite.primitive.kernels.vjp.mamba import scan_backward
    from lite.primitive.ops.bridges import vllm_ops

    scan_backward()  # before a test imports mamba_ssm's references: its deterministic mode is chosen by the first import
    init_batch_invariance()
    return vllm_ops("FLASH_ATTN")


def splits(total: int, generator: torch.Generator) -> list[int]:
    """Two to five sequences of at least one token, as upstream draws them."""
    cuts = int(torch.randint(1, 5, (1,), generator=generator))
    ends = torch.randperm(total - 1, generator=generator)[:cuts].sort().values.tolist()
    return [end - start for start, end in zip([-1, *ends], [*ends, total - 1], strict=True)]


def drawn(generator: torch.Generator, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE).requires_grad_()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("total", [8, 64, 151, 1134, 4096])
@pytest.mark.parametrize("channels", [64, 4096 + 32])
def test_a_packed_convolution_is_causal_conv1ds(ops, channels: int, total: int, width: int, has_bias: bool) -> None:
    from causal_conv1d.causal_conv1d_interface import causal_conv1d_ref

    generator = torch.Generator().manual_seed(total + channels + width)
    lengths = splits(total, generator)
    ours = [drawn(generator, total, channels), drawn(generator, channels, width), *([drawn(generator, channels)] if has_bias else [])]
    theirs = [t.detach().float().requires_grad_() for t in ours]
    for t in ours[1:]:
        t.grad_dtype = torch.float32  # as the trainer has it
    out = ops.causal_conv1d(ours[0], ours[1], ours[2] if has_bias else None, None, Seqlens.of(lengths, lengths, DEVICE))
    pieces = [
        causal_conv1d_ref(rows.t()[None], theirs[1], theirs[2] if has_bias else None, activation="silu")[0].t()
        for rows in theirs[0].split(lengths)
    ]
    want = torch.cat(pieces)
    torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=5e-2)

    dy = drawn(generator, total, channels).detach()
    dx, *of_weights = torch.autograd.grad(out, ours, dy)
    dx_want, *of_weights_want = torch.autograd.grad(want, theirs, dy.float())
    torch.testing.assert_close(dx.float(), dx_want, rtol=1e-2, atol=5e-2)
    for got, right in zip(of_weights, of_weights_want, strict=True):
        torch.testing.assert_close(got.float(), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("lengths", [[128], [300, 5], [1, 129, 256, 77]], ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(8, 1), (8, 8)])
def test_a_packed_scan_is_mamba_ssms(ops, lengths: list[int], heads: int, groups: int) -> None:
    from mamba_ssm.ops.triton.ssd_combined import ssd_chunk_scan_combined_ref

    shape, generator, total = SSDShape(heads, 64, groups, 128, 128), torch.Generator().manual_seed(1), sum(lengths)
    sizes = [heads * 64, groups * 128, groups * 128]
    bias = (0.5 * torch.randn(heads, generator=generator) - 2).to(BF16).to(DEVICE).requires_grad_()
    ours = [drawn(generator, total, sum(sizes)), drawn(generator, total, heads), drawn(generator, heads), bias]
    A = -torch.exp(1.4 * torch.rand(heads, generator=generator)).to(DEVICE)  # from -9 on its reference overflows before it masks
    y = ops.ssd_scan(ours[0], ours[1], A, ours[2], ours[3], None, Seqlens.of(lengths, lengths, DEVICE), shape)[0]
    theirs = [t.detach().cpu().double().requires_grad_() for t in ours]  # vLLM's batch-invariant bmm on the GPU knows no fp64
    xbc, dt, D, dt_bias = theirs
    pieces = []
    for rows, steps in zip(xbc.split(lengths), dt.split(lengths), strict=True):
        more = -len(rows) % shape.chunk  # it knows whole chunks only; rows at the end change none before them
        parts = F.pad(rows, (0, 0, 0, more)).split(sizes, dim=1)
        x, b, c = (part.unflatten(1, (n, -1))[None] for part, n in zip(parts, (heads, groups, groups), strict=True))
        steps = F.pad(steps, (0, 0, 0, more))[None]
        whole = ssd_chunk_scan_combined_ref(x, steps, A.cpu().double(), b, c, shape.chunk, D=D, dt_bias=dt_bias, dt_softplus=True)
        pieces.append(whole[0].flatten(1)[: len(rows)])
    want = torch.cat(pieces)
    assert relative_l2(y.detach().cpu(), want.detach()) < SCAN_LIMIT

    dy = drawn(generator, *y.shape).detach()
    found = torch.autograd.grad(y, ours, dy), torch.autograd.grad(want, theirs, dy.cpu().double())
    for leaf, got, right in zip(("xbc", "dt", "D", "dt_bias"), *found, strict=True):
        limit = 3 * SCAN_LIMIT if leaf.startswith("dt") else SCAN_LIMIT  # sums that nearly cancel
        assert relative_l2(got.cpu(), right) < limit, (leaf, relative_l2(got.cpu(), right))


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("channels", [2048, 4096])
def test_a_gated_norm_is_mamba_ssms(ops, channels: int, groups: int) -> None:
    from mamba_ssm.ops.triton.layernorm_gated import rms_norm_ref

    generator = torch.Generator().manual_seed(2)
    ours = [drawn(generator, 70, channels), drawn(generator, 70, channels), drawn(generator, channels)]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    out = ops.gated_rms_norm(*ours, groups, 1e-5)
    size = channels // groups
    want = rms_norm_ref(theirs[0], theirs[2], None, z=theirs[1], eps=1e-5, group_size=size, norm_before_gate=False, upcast=False)
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=3e-2)
    dy = drawn(generator, 70, channels).detach()
    for got, right in zip(torch.autograd.grad(out, ours, dy), torch.autograd.grad(want, theirs, dy.double()), strict=True):
        torch.testing.assert_close(got.double(), right.double(), rtol=1e-2, atol=5e-2)
