"""On a Hopper GPU: vLLM's kernels keep the contract, and their backwards the formula.

    python -m pytest tests/gpu -m gpu        # with vLLM 0.26 installed

Limits on the relative L2 error of gradients, set before any result was seen: 1e-2, as for bf16 on a CPU (test_vjp.py): one rounding is
worth up to 2^-8 = 3.9e-3, and tensor cores read operands that were rounded once more.
"""

import importlib.util
import os

import pytest
import torch

from lite.primitive.compare import bits
from tests import formulas
from tests.gradients import assert_gradient

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None,
        reason="needs a Hopper GPU and vLLM 0.26: run `python -m pytest tests/gpu -m gpu` there",
    ),
]

BF16, LIMIT = torch.bfloat16, 1e-2
LENGTHS = (1, 5, 130, 300, 700)


@pytest.fixture(scope="module", params=["FLASH_ATTN", "TRITON_ATTN"])
def ops(request):
    os.environ.update(VLLM_BATCH_INVARIANT="1", VLLM_LOGGING_LEVEL="ERROR")
    from vllm.model_executor.layers.batch_invariant import init_batch_invariance

    from lite.primitive.ops.bridges import vllm_ops

    init_batch_invariance()
    return vllm_ops(request.param)


def leaf(*shape, scale=1.0, mean=0.0):
    return (mean + scale * torch.randn(*shape, device="cuda")).to(BF16).requires_grad_()


def cases(ops):
    """name -> (ours on the GPU, the fp64 formula on the CPU, whose autograd batch-invariant mode has not touched; inputs)."""
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    T = int(cu[-1])
    angles = torch.rand(1024, 64) * 6.28
    table = torch.cat([angles.cos(), angles.sin()], -1).to(BF16)
    positions = torch.randint(0, 1024, (97,))
    labels, warm = torch.randint(0, 1000, (61,)), 0.6 + torch.rand(61)
    cu_gpu, table_gpu, positions_gpu, labels_gpu, warm_gpu = (t.cuda() for t in (cu, table, positions, labels, warm))
    f = formulas
    return {
        "linear": (lambda x, w, b: (ops.linear(x, w, b),), lambda x, w, b: (f.linear(x, w, b, BF16),),
                   [leaf(97, 512), leaf(384, 512, scale=512**-0.5), leaf(384)]),
        "rms_norm": (lambda x, w: (ops.rms_norm(x, w, 1e-5),), lambda x, w: (f.rms_norm(x, w, 1e-5, BF16),),
                     [leaf(97, 512), leaf(512, scale=0.1, mean=1.0)]),
        "add_rms_norm": (lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-5), lambda x, r, w: f.add_rms_norm(x, r, w, 1e-5, BF16),
                         [leaf(97, 512), leaf(97, 512), leaf(512, scale=0.1, mean=1.0)]),
        "rotary": (lambda q, k: ops.rotary(q, k, positions_gpu, table_gpu),
                   lambda q, k: tuple(f.turned(t, positions, table.double(), BF16) for t in (q, k)),
                   [leaf(97, 8, 128), leaf(97, 2, 128)]),
        "swiglu": (lambda x: (ops.swiglu(x),), lambda x: (f.swiglu(x, BF16),), [leaf(97, 768)]),
        "attention": (lambda q, k, v: (ops.attention(q, k, v, cu_gpu, cu_gpu, 128**-0.5),),
                      lambda q, k, v: (f.attention(q, k, v, cu, cu, 128**-0.5, BF16)[0],),
                      [leaf(T, 8, 128), leaf(T, 2, 128), leaf(T, 2, 128)]),
        "token_logprobs": (lambda x, w: ops.token_logprobs(x, w, labels_gpu, warm_gpu, 1000, True),
                           lambda x, w: f.token_logprobs(x, w, labels, warm.double(), 1000, BF16),
                           [leaf(61, 256), leaf(1024, 256, scale=3 * 256**-0.5)]),
    }  # fmt: skip


NAMES = ["linear", "rms_norm", "add_rms_norm", "rotary", "swiglu", "attention", "token_logprobs"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sparse", [False, True])
def test_values_and_gradients_follow_the_formula(ops, name, sparse):
    torch.manual_seed(0)
    ours, formula, inputs = cases(ops)[name]
    outs = ours(*inputs)
    wide = [t.detach().cpu().double().requires_grad_() for t in inputs]
    wants = formula(*wide)
    for out, want in zip(outs, wants, strict=True):
        ulp = 2.0**-7 if out.dtype == BF16 else 2e-2  # bf16 logits: their rounding moves a logprob by up to 2^-8 of a logit of about 10
        assert (out.double().cpu() - want).abs().max() <= ulp * want.abs().clamp(min=1).max()
    dys = [torch.randn_like(out) * ((torch.rand_like(out) < 0.02) if sparse else 1) for out in outs]
    gots = torch.autograd.grad(outs, inputs, dys, retain_graph=True)
    again = torch.autograd.grad(outs, inputs, dys)
    expected = torch.autograd.grad(wants, wide, [dy.double().cpu() for dy in dys])
    for i, (got, twice, want) in enumerate(zip(gots, again, expected, strict=True)):
        assert torch.equal(bits(got), bits(twice)), f"input {i}: two backwards differ"
        assert_gradient(got.cpu(), want, LIMIT, f"{name} input {i}")


def test_flash_attention_is_refused_at_head_size_64_by_kernel_shape_and_row(ops):
    """It decodes unlike it prefills there, from row 128 on; calls whose decode steps stand beside a longer query do not show it."""
    from lite.errors import ProbeError
    from lite.primitive.kernels.probe import ModelShapes, probe_kernels

    shapes = ModelShapes(linears=(), norms=(), attention=(9, 3, 64), swiglu=(), head=(1024, 64))
    if ops.visible.NAME == "vllm/TRITON_ATTN":
        assert all(p.ok for p in probe_kernels(ops.visible, shapes, BF16, torch.device("cuda:0")))
    else:
        with pytest.raises(ProbeError, match=r"FLASH_ATTN\.attention: decode equals prefill broken at shape \(9, 3, 64\).*row \d+"):
            probe_kernels(ops.visible, shapes, BF16, torch.device("cuda:0"))
