"""Mamba-2 and mixtures of experts in `train_step`: the native baseline computes what the reference does, their work is counted by the
kind of layer, and the program runs."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import train_step, train_worker
from benchmarks.native_ops import NativeOps
from benchmarks.packed import packed_batch, step_flops
from benchmarks.report import model_config
from lite.acceptance.proxy import write_proxy
from lite.errors import InputError
from lite.model.registry import family
from lite.primitive.kernels import reference
from lite.primitive.kernels.visible import SSDShape
from lite.primitive.ops.bridges import reference_ops
from lite.primitive.parallel.packing import Seqlens
from tests.mamba import SMALL, ScanInputs

LENGTHS = (2, 1, 37, 16, 5)  # shorter than the convolution, one chunk, several
T = sum(LENGTHS)
SEQLENS = Seqlens.of(LENGTHS, LENGTHS)
WIDE = SMALL.heads * SMALL.head_dim + 2 * SMALL.groups * SMALL.state
HEADS = (SMALL.heads,)
EXPERTS = 6


def scanned(ops, xbc, dt, A_log, D, dt_bias):
    return ops.ssd_scan(xbc, dt, ops.ssm_decay(A_log), D, dt_bias - 2.0, None, SEQLENS, SMALL)[0]


def grouped(ops, logits, renormalize=True):
    """Placed by expert: in what order the chosen ones come says nothing."""
    weights, ids = ops.grouped_topk(logits, torch.linspace(-0.3, 0.3, EXPERTS), 2, 3, 2, renormalize)
    return torch.zeros(T, EXPERTS).scatter(1, ids.long(), weights)


def softmaxed(ops, logits, renormalize=True):
    weights, ids = ops.topk_softmax(logits, 3, renormalize)
    return torch.zeros(T, EXPERTS).scatter(1, ids.long(), weights)


def mixed(activation):
    """Expert 4 gets no token."""

    def call(ops, x, w13, w2, weights):
        ids = torch.stack([torch.arange(T) % 4, torch.where(torch.arange(T) % 3 == 0, 5, (torch.arange(T) + 1) % 4)], 1).int()
        return ops.routed_experts(x, w13, w2, weights, ids, activation)

    return call


CALLS = {
    "relu2": (lambda ops, x: ops.relu2(x), [(T, 32)]),
    "causal_conv1d": (lambda ops, x, w, b: ops.causal_conv1d(x, w, b, None, SEQLENS), [(T, WIDE), (WIDE, 4), (WIDE,)]),
    "causal_conv1d without bias": (lambda ops, x, w: ops.causal_conv1d(x, w, None, None, SEQLENS), [(T, WIDE), (WIDE, 4)]),
    "ssd_scan": (scanned, [(T, WIDE), (T, *HEADS), HEADS, HEADS, HEADS]),
    "gated_rms_norm": (lambda ops, x, gate, w: ops.gated_rms_norm(x, gate, w, 3, 1e-5), [(T, 48), (T, 48), (48,)]),
    "router_logits": (lambda ops, x, w: ops.router_logits(x, w, torch.float32), [(T, 32), (EXPERTS, 32)]),
    "topk_softmax": (softmaxed, [(T, EXPERTS)]),
    "topk_softmax as it is": (lambda ops, x: softmaxed(ops, x, renormalize=False), [(T, EXPERTS)]),
    "grouped_topk": (grouped, [(T, EXPERTS)]),
    "grouped_topk as it is": (lambda ops, x: grouped(ops, x, renormalize=False), [(T, EXPERTS)]),
    "routed_experts silu": (mixed("silu"), [(T, 32), (EXPERTS, 48, 32), (EXPERTS, 32, 24), (T, 2)]),
    "routed_experts relu2": (mixed("relu2_no_mul"), [(T, 32), (EXPERTS, 24, 32), (EXPERTS, 32, 24), (T, 2)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_native_operations_and_their_gradients_are_the_references(name):
    call, shapes = CALLS[name]
    leaves = [(0.7 * torch.randn(shape)).requires_grad_() for shape in shapes]
    found = []
    for ops in (reference_ops(), NativeOps()):
        value = call(ops, *leaves)
        weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
        found.append((value, torch.autograd.grad((value * weights).sum(), leaves)))
    (value, grads), (native, native_grads) = found
    torch.testing.assert_close(native, value, rtol=2e-5, atol=2e-5)
    for ours, theirs in zip(native_grads, grads, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)


def test_the_work_of_a_hybrid_is_counted_by_kind_of_layer():
    """By hand, for Mamba-2, experts, attention, an MLP and Mamba-2 again; sequences of 20 and 5 tokens in chunks of 16."""
    protocol = family("nemotron_h")
    flops = step_flops(protocol.build_model_config(protocol.proxy_config("tiny", 5)), [20, 5], 7)
    mamba = 96 * (96 + (96 + 2 * 2 * 16) + 6) + 96 * 96  # gate, x|B|C and steps of 6 heads of 16; back
    experts = 96 * 8 + 2 * (96 * 64 + 64 * 96) + (96 * 96 + 96 * 96)  # router, 2 chosen ones, the shared one
    attention = 96 * (4 + 2 + 2) * 32 + 4 * 32 * 96
    mlp = 96 * 256 + 256 * 96
    assert flops["layers"] == 6 * (2 * mamba + experts + attention + mlp) * 25
    assert flops["attention"] == 12 * 4 * 32 * (210 + 15)
    assert flops["scan"] == 2 * 6 * ((2 * 16 + 96) * (136 + 10 + 15) + 2 * 96 * 16 * 25)
    assert flops["head"] == 6 * 512 * 96 * 7
    assert flops["total"] == sum(flops[part] for part in ("layers", "attention", "scan", "head"))


def test_the_scans_formula_agrees_with_torchs_counter():
    """The reference's forward multiplies whole squares; in chunks of one token they hold no more than the pairs."""
    protocol = family("nemotron_h")
    config = protocol.build_model_config(protocol.proxy_config("tiny", 1) | {"chunk_size": 1})
    shape = SSDShape(6, 16, 2, 16, 1)
    assert config.mamba.shape == shape
    with FlopCounterMode(display=False) as counter:
        ScanInputs.random(24, shape, torch.float32).scan([24], scan=reference.ssd_scan)
    assert 3 * counter.get_total_flops() == step_flops(config, [24], 0)["scan"]


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3_moe"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    write_proxy(request.param, path, geometry="tiny", layers=None, dtype=torch.float32, seed=0)
    return path


def test_a_mixture_of_experts_multiplies_what_torch_counts(tmp_path):
    """As for the dense decoder: transformers computes the whole square of attention, and each expert for its own tokens alone."""
    write_proxy("qwen3_moe", tmp_path, geometry="tiny", layers=3, dtype=torch.float32, seed=0)
    config = model_config(tmp_path)
    spec = {"folder": str(tmp_path), "dtype": "fp32", "device": "cpu", "attention": "sdpa"}
    model, loss = train_worker.transformers(spec)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    batch = packed_batch(200, 4096, config.vocab_size, 0)
    with FlopCounterMode(display=False) as counter:
        loss(train_worker.Inputs(batch, "cpu")).backward()
    flops = step_flops(config, batch.seq_lens, int(batch.loss_mask.sum()))
    assert counter.get_total_flops() == pytest.approx(flops["total"] + flops["attention"], rel=0.02)


def test_arms_have_one_loss_and_native_the_references_gradients(folder):
    """On a CPU in fp32, several sequences in the row, the last one shorter than the convolution."""
    spec = {"folder": str(folder), "dtype": "fp32", "device": "cpu", "kernels": "reference"}
    config = model_config(folder)
    batch = packed_batch(65, 32, config.vocab_size, 10)
    assert batch.seq_lens[-1] == 2
    x = train_worker.Inputs(batch, "cpu")
    exact, exact_loss = train_worker.exact(spec)
    native, native_loss = train_worker.native(spec)
    losses = [exact_loss(x), native_loss(x)]
    for value in losses:
        value.backward()
    if config.mamba is None:
        losses += [train_worker.transformers(spec | {"attention": attention})[1](x) for attention in ("flash", "sdpa")]
    for value in losses[1:]:
        torch.testing.assert_close(value, losses[0], rtol=1e-5, atol=1e-5)
    for (name, ours), theirs in zip(exact.named_parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-3, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_transformers_mamba_is_refused_where_it_would_mix_sequences(tmp_path, monkeypatch):
    """Its torch path has our loss for one sequence and another one for several."""
    write_proxy("nemotron_h", tmp_path, geometry="tiny", layers=None, dtype=torch.float32, seed=0)
    spec = {"folder": str(tmp_path), "dtype": "fp32", "device": "cpu", "attention": "sdpa"}
    with pytest.raises(InputError, match="mamba_ssm"):
        train_worker.transformers(spec)
    monkeypatch.setattr(train_worker, "find_spec", lambda name: name)
    theirs, ours = train_worker.transformers(spec)[1], train_worker.native(spec)[1]
    one, several = (train_worker.Inputs(packed_batch(65, longest, 512, 0), "cpu") for longest in (4096, 32))
    torch.testing.assert_close(theirs(one), ours(one), rtol=1e-6, atol=1e-6)
    assert (theirs(several) - ours(several)).abs() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "against"), [("nemotron_h", ["native"]), ("qwen3_moe", ["native", "transformers"])])
def test_the_program_runs_on_a_cpu(name: str, against: list[str], tmp_path: Path):
    out = tmp_path / "t.json"
    tiny = f"--device cpu --geometry tiny --family {name} --layers 4 --tokens 64 --longest 32 --steps 1 --warmup 1 --pairs 1 --out {out}"
    assert train_step.main([*tiny.split(), "--against", *against]) == 0
    found = json.loads(out.read_text())
    assert found["finished"] and found["complete"] and len(found["legs"]) == 2 * len(against)
    losses = {leg["loss"] for leg in found["legs"]}
    assert max(losses) == pytest.approx(min(losses), rel=1e-5)
    assert all((leg["flops"]["scan"] > 0) == (name == "nemotron_h") for leg in found["legs"])
