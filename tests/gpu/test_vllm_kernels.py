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
from lite.primitive.parallel.packing import Seqlens
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
    T = sum(LENGTHS)
    packed, packed_gpu = Seqlens.of(LENGTHS, LENGTHS), Seqlens.of(LENGTHS, LENGTHS, "cuda")
    angles = torch.rand(1024, 64) * 6.28
    table = torch.cat([angles.cos(), angles.sin()], -1).to(BF16)
    positions = torch.randint(0, 1024, (97,))
    labels, warm = torch.randint(0, 1000, (61,)), 0.6 + torch.rand(61)
    table_gpu, positions_gpu, labels_gpu, warm_gpu = (t.cuda() for t in (table, positions, labels, warm))
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
        "attention": (lambda q, k, v: (ops.attention(q, k, v, packed_gpu, 128**-0.5),),
                      lambda q, k, v: (f.attention(q, k, v, packed, 128**-0.5, BF16)[0],),
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


# Mixtures of experts: Qwen3-30B-A3B's shapes.

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 600, 2048, 768, 128, 8


@pytest.fixture(scope="module")
def moe():
    """-> (x, w13, w2, weights, ids) of TOKENS tokens."""
    from lite.primitive.kernels.vllm.router import topk_softmax

    generator = torch.Generator("cuda").manual_seed(0)
    random = lambda *shape, scale=1.0: (torch.randn(*shape, generator=generator, device="cuda") * scale).to(BF16)
    x, gate = random(TOKENS, HIDDEN), random(EXPERTS, HIDDEN, scale=2 * HIDDEN**-0.5)
    w13 = random(EXPERTS, 2 * INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5)
    w2 = random(EXPERTS, HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5)
    return x, w13, w2, *topk_softmax(x @ gate.t(), TOP_K, True)


def test_experts_do_not_depend_on_company(ops, moe):
    from lite.primitive.kernels.vllm.experts import routed_experts

    x, w13, w2, weights, ids = moe
    whole = bits(routed_experts(x, w13, w2, weights, ids, "silu"))
    order = torch.arange(TOKENS - 1, -1, -1, device="cuda")
    for rows in (order[:1], order[3:5], order[10:27], order[100:400], order):
        assert torch.equal(bits(routed_experts(x[rows], w13, w2, weights[rows], ids[rows], "silu")), whole[rows])


def test_experts_follow_the_formula(ops, moe):
    from lite.primitive.kernels.vllm.experts import routed_experts

    x, w13, w2, weights, ids = (t[:40] if len(t) == TOKENS else t for t in moe)
    rows = []
    for t in range(len(x)):  # on the CPU: batch-invariant mode has replaced the GPU's products, and those know no fp64
        row, up_down = x[t].cpu().double(), [(w13[e].cpu().double(), w2[e].cpu().double()) for e in ids[t].tolist()]
        outs = [w2_e @ formulas.swiglu(formulas.rounded(w13_e @ row, BF16)[None], BF16)[0] for w13_e, w2_e in up_down]
        rows.append(sum(weight * out for weight, out in zip(weights[t].tolist(), outs, strict=True)))
    got, want = routed_experts(x, w13, w2, weights, ids, "silu").cpu().double(), torch.stack(rows)
    assert (got - want).norm() <= 1e-2 * want.norm()
    wrong = routed_experts(x, w13, w2, weights, ids.roll(1, dims=0), "silu").cpu().double()
    assert (wrong - want).norm() > 0.5 * want.norm(), "another token's experts would be seen"


def test_vllms_own_two_forms_of_the_experts_give_our_bits(ops, moe, record):
    """Few tokens (its form without alignment) and many; should a version differ, the plugin's one form still holds."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    from lite.primitive.kernels.vllm.experts import routed_experts

    x, w13, w2, weights, ids = moe
    equal = {}
    for rows in (1, 4, 16, TOKENS):
        ours = routed_experts(x[:rows], w13, w2, weights[:rows], ids[:rows], "silu")
        equal[rows] = bool(torch.equal(bits(ours), bits(fused_experts(x[:rows], w13, w2, weights[:rows], ids[:rows]))))
    record["fused_experts_give_our_bits_at_rows"] = equal
    assert equal[TOKENS]


@pytest.mark.parametrize("out_dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("hidden", "experts"), [(2048, 128), (2688, 128)])
def test_router_logits_do_not_depend_on_company(ops, hidden, experts, out_dtype):
    from lite.primitive.kernels.vllm.router import router_logits, topk_softmax

    x, gate = (torch.randn(n, hidden, device="cuda").to(BF16) for n in (3000, experts))
    gate *= hidden**-0.5
    whole = router_logits(x, gate, out_dtype)
    weights, ids = topk_softmax(whole, TOP_K, True)
    want, best = whole.float().softmax(-1).topk(TOP_K)
    assert (weights - want / want.sum(-1, keepdim=True)).abs().max() < 1e-5
    ties = want.diff(dim=-1).abs().amin(-1) < 1e-6  # bf16 logits may be equal; which of them comes first is nobody's promise
    assert torch.equal(ids[~ties].long(), best[~ties])
    for rows in (1, 2, 16, 17, 32, 33, 1024, 2999):
        part = router_logits(x[-rows:], gate, out_dtype)
        assert torch.equal(bits(part), bits(whole[-rows:]))
        assert all(torch.equal(a, b[-rows:]) for a, b in zip(topk_softmax(part, TOP_K, True), (weights, ids), strict=True))


# The stand-in for the Triton matmul.

LINEARS = {
    "SmolLM2": [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
    "Qwen3-8B": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)],
    "Qwen3-30B-A3B": [(5120, 2048), (2048, 4096), (128, 2048), (151936, 2048)],
}


@pytest.mark.parametrize("model", LINEARS)
def test_cublaslt_gives_the_triton_matmuls_bits_where_it_stands_in(ops, model, record):
    from lite.primitive.kernels.vllm import gemm

    device = torch.device("cuda", torch.cuda.current_device())
    for outputs, inputs in LINEARS[model]:
        up_to = 2048 if outputs > 100_000 else 16384
        record[f"linear {outputs}x{inputs} up to {up_to}: first differing rows"] = gemm.differing_rows(outputs, inputs, BF16, device, up_to)
    x = torch.randn(3001, LINEARS[model][0][1], device="cuda").to(BF16)
    weight = torch.randn(LINEARS[model][0], device="cuda").to(BF16)
    bias = torch.randn(len(weight), device="cuda").to(BF16)
    for b in (None, bias):
        many = gemm.linear(x, weight, b)
        assert torch.equal(bits(many), bits(gemm.triton_linear(x, weight, b)))
        assert torch.equal(bits(many[-1:]), bits(gemm.linear(x[-1:], weight, b)))


def test_a_stand_in_with_other_bits_would_not_stand_in(ops, monkeypatch):
    import torch.nn.functional as F

    from lite.primitive.kernels.vllm import gemm

    plain = F.linear
    device = torch.device("cuda", torch.cuda.current_device())
    for wrong in (17, 1023, 2048):
        monkeypatch.setattr(gemm.F, "linear", lambda x, w, wrong=wrong: plain(x, w) * (1 + 2**-7 * (x.shape[0] == wrong)))
        gemm.differing_rows.cache_clear()
        assert gemm.differing_rows(384, 512, BF16, device, 4096) == wrong
    gemm.differing_rows.cache_clear()
