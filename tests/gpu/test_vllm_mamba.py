"""On a Hopper GPU: Mamba-2's kernels and the router and experts beside them keep the contract at Nemotron-H's geometry, and their backwards
the fp64 formula.

    python -m pytest tests/gpu/test_vllm_mamba.py -m gpu        # with vLLM 0.26, mamba-ssm and causal-conv1d installed

Limits on relative L2 errors, set before any result was seen: 1e-2, as in test_vllm_kernels.py, and 3e-2 for the gradients of dt, A and
dt_bias, since they are sums of terms that nearly cancel, each of products of operands in bf16.
"""

import importlib.util
import os

import pytest
import torch

from lite.primitive.compare import bits
from lite.primitive.kernels.visible import SSDShape
from lite.primitive.parallel.packing import Seqlens
from tests import formulas
from tests.gradients import assert_gradient, relative_l2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or any(importlib.util.find_spec(name) is None for name in ("vllm", "mamba_ssm", "causal_conv1d")),
        reason="needs a Hopper GPU, vLLM 0.26, mamba-ssm and causal-conv1d: run `python -m pytest tests/gpu/test_vllm_mamba.py -m gpu`",
    ),
]

BF16, LIMIT, CANCELLING = torch.bfloat16, 1e-2, 3e-2
NEMOTRON, SMALL = SSDShape(64, 64, 8, 128, 128), SSDShape(8, 64, 2, 128, 128)
WIDTH, L = 4, 128


def channels(shape):
    return shape.heads * shape.head_dim + 2 * shape.groups * shape.state


@pytest.fixture(scope="module")
def ops():
    os.environ.update(VLLM_BATCH_INVARIANT="1", VLLM_LOGGING_LEVEL="ERROR")
    from vllm.model_executor.layers.batch_invariant import init_batch_invariance

    from lite.primitive.ops.bridges import vllm_ops

    init_batch_invariance()
    return vllm_ops("FLASH_ATTN")


def normal(*shape, std=1.0, mean=0.0, seed=0, dtype=BF16):
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (mean + std * torch.randn(*shape, generator=generator, device="cuda")).to(dtype)


def weights(shape):
    """As trained models have them: A of -1 to -16, steps of about 0.02 to 0.5."""
    uniform = lambda low, high: (low + (high - low) * torch.rand(shape.heads, generator=torch.Generator().manual_seed(5))).cuda()
    return {"A_log": uniform(0.0, 2.8).to(BF16), "D": normal(shape.heads, std=0.1, mean=1.0), "dt_bias": uniform(-3.0, -1.0).to(BF16)}


def scan(ops, xbc, dt, queries, keys=None, boundary=None, shape=NEMOTRON):
    w = weights(shape)
    seqlens = Seqlens.of(queries, keys or queries, "cuda")
    return ops.visible.ssd_scan(xbc, dt, ops.ssm_decay(w["A_log"]), w["D"], w["dt_bias"], boundary, seqlens, shape)


def rows(count, shape=NEMOTRON, seed=0):
    return normal(count, channels(shape), seed=seed), normal(count, shape.heads, seed=seed)


# Bits, at the real geometry.


def test_the_probe_passes_at_the_models_shapes(ops, record):
    """Convolution, scan, gated norm, router and experts, as it runs before a model is built."""
    from lite.primitive.kernels.probe import ModelShapes, probe_kernels

    shapes = ModelShapes(linears=((10304, 2688),), norms=(2688,), attention=None, swiglu=(), head=(1024, 2688), relu2=(3712,),
                         mamba=(NEMOTRON, WIDTH, 8), moe=(128, 6, 2688, 1856, "relu2_no_mul"))  # fmt: skip
    found = probe_kernels(ops.visible, shapes, BF16, torch.device("cuda:0"))
    record["probe"] = [probe.as_dict() for probe in found]
    assert {"causal_conv1d", "ssd_scan", "gated_rms_norm", "grouped_topk", "routed_experts", "relu2"} <= {p.kernel for p in found}


@pytest.fixture(scope="module")
def whole(ops):
    """-> (xbc, dt, y, boundary) of 900 tokens."""
    xbc, dt = rows(900)
    return xbc, dt, *scan(ops, xbc, dt, [900])


@pytest.mark.parametrize("cut", [1, 5, 64, 127, 128, 129, 200, 255, 256, 300, 511, 640, 767, 768, 899])
def test_a_prefix_and_what_follows_it_from_the_boundary_have_the_bits_of_the_whole(ops, whole, cut):
    xbc, dt, y, _ = whole
    prefix, boundary = scan(ops, xbc[:cut], dt[:cut], [cut])
    held = cut % L
    rest, _ = scan(ops, xbc[cut - held :], dt[cut - held :], [900 - cut], [900 - cut + held], boundary)
    assert torch.equal(bits(prefix), bits(y[:cut])) and torch.equal(bits(rest), bits(y[cut:]))
    if held:
        shifted, _ = scan(ops, xbc[cut - held + 1 :], dt[cut - held + 1 :], [900 - cut], [900 - cut + held - 1], boundary)
        assert not torch.equal(bits(shifted), bits(y[cut:])), "a boundary that is shifted by one row must be noticed"


def test_a_sequence_has_the_same_bits_in_any_pack(ops):
    lengths = [1, 5, 130, 300, 700, 128, 256]
    every = [rows(n, seed=i) for i, n in enumerate(lengths)]
    for chosen in (range(7), range(6, -1, -1), [4, 0, 0, 4], [2, 5]):
        xbc, dt = (torch.cat([every[i][k] for i in chosen]) for k in range(2))
        y, boundary = scan(ops, xbc, dt, [lengths[i] for i in chosen])
        for i, part, state in zip(chosen, y.split([lengths[i] for i in chosen]), boundary, strict=True):
            alone, last = scan(ops, *every[i], [lengths[i]])
            assert torch.equal(bits(part), bits(alone)) and torch.equal(bits(state), bits(last[0])), (list(chosen), i)


def engine_side(ops):
    """-> (mixer, pages of 80 requests that hold NaN), as the plugin makes them."""
    from lite.vllm_plugin import replay

    w, C = weights(NEMOTRON), channels(NEMOTRON)
    conv = normal(C, WIDTH, std=0.5), normal(C, std=0.1)
    mixer = replay.Mixer(*conv, ops.ssm_decay(w["A_log"]), w["D"], w["dt_bias"], NEMOTRON)
    shapes = {(WIDTH - 1, C): BF16, (64, 64, 128): torch.float32, (L, C): BF16, (L, 64): BF16}
    return mixer, replay.Pages(*(torch.full((80, *shape), torch.nan, dtype=dtype, device="cuda") for shape, dtype in shapes.items()))


@pytest.mark.parametrize("graph", [False, True])
def test_decode_steps_of_fixed_size_have_the_bits_of_the_prefill(ops, graph):
    """70 requests, more than are scanned at once, with prompts of 0 to 345 tokens; 135 steps, so that each fills a chunk."""
    from lite.vllm_plugin import replay

    mixer, pages = engine_side(ops)
    prompts, steps = [5 * i for i in range(70)], 135
    every = [rows(n + steps, seed=i) for i, n in enumerate(prompts)]
    slots = torch.arange(1, 71, device="cuda")
    prefill = lambda slots, lengths, parts: replay.prefill(
        ops.visible, mixer, pages, slots, replay.Pieces.of([0] * len(lengths), lengths, L, "cuda"),
        *(torch.cat([part[k] for part in parts]) for k in range(2)),
    )  # fmt: skip
    wants = [prefill(slots[:1], [n + steps], [part]) for n, part in zip(prompts, every, strict=True)]
    for page in pages:
        page.fill_(torch.nan)
    prefill(slots[1:], prompts[1:], [[t[:n] for t in part] for n, part in zip(prompts[1:], every[1:], strict=True)])

    computed, xbc, dt = torch.tensor(prompts, device="cuda"), *(torch.empty(70, *t.shape[1:], dtype=BF16, device="cuda") for t in every[0])
    step = lambda: replay.decode(ops.visible, mixer, pages, slots, computed, xbc, dt)
    run = step
    if graph:
        held = [page.clone() for page in pages]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # compiles
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            y = step()
        for page, was in zip(pages, held, strict=True):
            page.copy_(was)
        run = lambda: (captured.replay(), y)[1]
    for t in range(steps):
        xbc.copy_(torch.stack([part[0][n + t] for n, part in zip(prompts, every, strict=True)]))
        dt.copy_(torch.stack([part[1][n + t] for n, part in zip(prompts, every, strict=True)]))
        got, want = run(), torch.stack([w[n + t] for n, w in zip(prompts, wants, strict=True)])
        wrong = (bits(got) != bits(want)).any(1).nonzero().flatten().tolist()
        assert not wrong, f"step {t}: requests {wrong}"
        computed += 1


def test_vllms_decode_convolution_and_gated_norm_give_our_bits(ops, record):
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    x, weight, bias = normal(300, channels(NEMOTRON)), normal(channels(NEMOTRON), WIDTH, std=0.5), normal(channels(NEMOTRON), std=0.1)
    ours = ops.visible.causal_conv1d(x, weight, bias, None, Seqlens.of([300], [300], "cuda"))
    histories = torch.cat([x.new_zeros(WIDTH - 1, x.shape[1]), x]).unfold(0, WIDTH - 1, 1)[:300].contiguous()
    state = torch.cat([torch.zeros_like(histories[:1]), histories])
    slots = torch.arange(1, 301, dtype=torch.int32, device="cuda")
    theirs = causal_conv1d_update(x.clone(), state, weight, bias, "silu", conv_state_indices=slots)
    record["causal_conv1d_update gives our bits"] = bool(torch.equal(bits(theirs), bits(ours)))

    y, gate, norm = normal(300, 4096), normal(300, 4096, std=2.0, seed=1), normal(4096, std=0.1, mean=1.0)
    gated = (y * torch.nn.functional.silu(gate.float())).view(300, 8, 512)
    native = norm * (gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + 1e-5)).view(300, 4096).to(BF16)
    assert torch.equal(bits(ops.visible.gated_rms_norm(y, gate, norm, 8, 1e-5)), bits(native))


def test_every_kernel_of_the_scan_has_one_configuration(ops):
    from importlib import import_module

    from triton.runtime.autotuner import Autotuner

    from lite.primitive.kernels.vllm.mamba import SCAN_KERNELS

    scan(ops, *rows(3), [3])
    modules = [import_module(f"vllm.model_executor.layers.mamba.ops.{name}") for name in SCAN_KERNELS]
    tuned = [kernel for module in modules for kernel in vars(module).values() if isinstance(kernel, Autotuner)]
    assert len(tuned) == 5 and all(len(kernel.configs) == 1 and not kernel.cache for kernel in tuned)


# Values and gradients.


def test_values_follow_the_formula_at_the_real_geometry(ops, record):
    lengths = [3, 140]
    (xbc, dt), w = rows(143), weights(NEMOTRON)
    y, boundary = scan(ops, xbc, dt, lengths)
    wide = [t.cpu().double() for t in (xbc, dt, -torch.exp(w["A_log"].float()), w["D"], w["dt_bias"])]
    want, last = formulas.ssd_scan(*wide, None, lengths, NEMOTRON, BF16)
    record["scan values, relative L2"] = [relative_l2(y.cpu(), want), relative_l2(boundary[1].cpu(), last[1])]
    assert relative_l2(y.cpu(), want) < LIMIT and relative_l2(boundary[1].cpu(), last[1]) < LIMIT and not boundary[0].any()
    wrong, _ = formulas.ssd_scan(*wide, None, [143], NEMOTRON, BF16)
    assert relative_l2(y.cpu(), wrong) > LIMIT, "two sequences taken for one must be noticed"


LENGTHS = [1, 5, 130, 300]
T, SEQLENS = sum(LENGTHS), Seqlens.of(LENGTHS, LENGTHS)
IDS = torch.rand(97, 7, generator=torch.Generator().manual_seed(0)).argsort(-1)[:, :3].int()  # the last of 8 experts has no row


def cases(ops):
    """name -> (ours on the GPU, the fp64 formula on the CPU, inputs, the limit of each input's gradient)."""
    w, C, seqlens = weights(SMALL), channels(SMALL), Seqlens.of(LENGTHS, LENGTHS, "cuda")
    f, gate = formulas, [normal(97, 512), normal(97, 512, std=2.0, seed=1), normal(512, std=0.1, mean=1.0)]
    return {
        "conv": (lambda x, weight, bias: ops.causal_conv1d(x, weight, bias, None, seqlens),
                 lambda x, weight, bias: f.causal_conv1d(x, weight, bias, None, LENGTHS, BF16),
                 [normal(T, C), normal(C, WIDTH, std=0.5), normal(C, std=0.1)], [LIMIT] * 3),
        "conv without bias": (lambda x, weight: ops.causal_conv1d(x, weight, None, None, seqlens),
                              lambda x, weight: f.causal_conv1d(x, weight, None, None, LENGTHS, BF16),
                              [normal(T, C), normal(C, WIDTH, std=0.5)], [LIMIT] * 2),
        "scan": (lambda xbc, dt, a, D, bias: ops.ssd_scan(xbc, dt, ops.ssm_decay(a), D, bias, None, seqlens, SMALL)[0],
                 lambda xbc, dt, a, D, bias: f.ssd_scan(xbc, dt, -a.exp(), D, bias, None, LENGTHS, SMALL, BF16)[0],
                 [*rows(T, SMALL), w["A_log"], w["D"], w["dt_bias"]], [LIMIT, CANCELLING, CANCELLING, LIMIT, CANCELLING]),
        "gated norm": (lambda x, g, weight: ops.gated_rms_norm(x, g, weight, 8, 1e-5),
                       lambda x, g, weight: f.gated_rms_norm(x, g, weight, 8, 1e-5, BF16), gate, [LIMIT] * 3),
        "gated norm of one group": (lambda x, g, weight: ops.gated_rms_norm(x, g, weight, 1, 1e-5),
                                    lambda x, g, weight: f.gated_rms_norm(x, g, weight, 1, 1e-5, BF16), gate, [LIMIT] * 3),
        "relu2": (lambda x: ops.relu2(x), lambda x: f.relu2(x, BF16), [normal(97, 512)], [LIMIT]),
        **{f"experts, {activation}": (lambda *t, a=activation: ops.routed_experts(*t, IDS.cuda(), a),
                                      lambda *t, a=activation: f.routed_experts(*t, IDS, a, BF16),
                                      [normal(97, 256), normal(8, up, 256, std=256**-0.5), normal(8, 256, 192, std=192**-0.5),
                                       normal(97, 3, dtype=torch.float32).abs()], [LIMIT] * 4)
           for activation, up in (("silu", 384), ("relu2_no_mul", 192))},
    }  # fmt: skip


NAMES = ["conv", "conv without bias", "scan", "gated norm", "gated norm of one group", "relu2", "experts, silu", "experts, relu2_no_mul"]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_follow_the_formula_and_two_backwards_have_the_same_bits(ops, record, name):
    ours, formula, inputs, limits = cases(ops)[name]
    inputs = [t.requires_grad_() for t in inputs]
    wide = [t.detach().cpu().double().requires_grad_() for t in inputs]
    out, want = ours(*inputs), formula(*wide)
    assert relative_l2(out.detach().cpu(), want.detach()) < LIMIT
    dy = normal(*out.shape, seed=3)
    gots, again = (torch.autograd.grad(out, inputs, dy, retain_graph=True) for _ in range(2))
    expected = torch.autograd.grad(want, wide, dy.cpu().double())
    record[f"{name}: gradients, relative L2"] = [relative_l2(got.cpu(), w) for got, w in zip(gots, expected, strict=True)]
    for i, (got, twice, right, limit) in enumerate(zip(gots, again, expected, limits, strict=True)):
        assert torch.equal(bits(got), bits(twice)), f"input {i}: two backwards differ"
        assert_gradient(got.cpu(), right, limit, f"{name} input {i}")


# Router and experts of this family.


def test_grouped_choice_follows_the_formula_and_vllms_router(ops):
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import fused_grouped_topk

    logits, bias = normal(500, 128, dtype=torch.float32), normal(128, std=0.1, dtype=torch.float32)
    for k, groups, topk_groups, renormalize in [(6, 1, 1, True), (6, 1, 1, False), (8, 8, 4, True), (6, 128, 1, True)]:
        weight, ids = ops.visible.grouped_topk(logits, bias, k, groups, topk_groups, renormalize)
        assert weight.dtype == torch.float32 and ids.dtype == torch.int32
        grouped = (groups, topk_groups) if groups < 128 else (1, 1)
        want, chosen = formulas.grouped_topk(logits.cpu().double(), bias.cpu().double(), k, *grouped, renormalize)
        order, want_order = ids.cpu().long().sort(-1), chosen.sort(-1)
        assert torch.equal(order.values, want_order.values)
        assert (weight.cpu().gather(1, order.indices) - want.gather(1, want_order.indices)).abs().max() < 1e-5
    theirs = fused_grouped_topk(logits, logits, 6, True, bias, 1, 1, "sigmoid", 1.0)
    for ours, their in zip(ops.visible.grouped_topk(logits, bias, 6, 1, 1, True), theirs, strict=True):
        assert torch.equal(ours, their)


def test_experts_without_a_gate_follow_the_formula(ops):
    x, logits = normal(40, 2688), normal(40, 16, dtype=torch.float32)
    w13, w2 = normal(16, 1856, 2688, std=2688**-0.5), normal(16, 2688, 1856, std=1856**-0.5)
    weight, ids = ops.visible.grouped_topk(logits, torch.zeros(16, device="cuda"), 6, 1, 1, True)
    got = ops.visible.routed_experts(x, w13, w2, weight, ids, "relu2_no_mul").cpu()
    wide = [t.cpu().double() for t in (x, w13, w2, weight)]
    want = formulas.routed_experts(*wide, ids.cpu(), "relu2_no_mul", BF16)
    assert relative_l2(got, want) < LIMIT
    assert relative_l2(got, formulas.routed_experts(*wide, ids.cpu().roll(1, 0), "relu2_no_mul", BF16)) > 0.1
