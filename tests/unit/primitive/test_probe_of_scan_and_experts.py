"""The probe refuses a scan, a convolution, a gated norm, a router or experts that break a promise."""

import re

import pytest
import torch

from lite.errors import ProbeError
from lite.primitive.kernels import reference
from lite.primitive.kernels.probe import ModelShapes, probe_kernels
from lite.primitive.kernels.visible import SSDShape
from lite.primitive.parallel.packing import Seqlens
from tests.unit.primitive.test_probe import CPU, by_rows, kernels

SCAN = SSDShape(4, 8, 2, 16, 32)
SHAPES = ModelShapes((), (), None, (), (512, 64), mamba=(SCAN, 4, 2), moe=(8, 2, 64, 32, "silu"), relu2=(96,))
NEW = {
    "relu2",
    "router_logits",
    "topk_softmax",
    "grouped_topk",
    "routed_experts",
    "gated_rms_norm",
    "causal_conv1d",
    "ssd_scan",
    "token_logprobs",
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
def test_the_reference_set_keeps_its_promises_here(activation, dtype):
    for chunk in (32, 256):
        mamba, moe = (SCAN._replace(chunk=chunk), 4, 2), (8, 2, 64, 32, activation)
        probes = probe_kernels(kernels(), ModelShapes((), (), None, (), (512, 64), mamba=mamba, moe=moe, relu2=(96,)), dtype, CPU)
        assert {p.kernel for p in probes} == NEW and all(p.ok for p in probes)


def test_a_token_with_one_expert_is_probed_too():
    probe_kernels(kernels(), ModelShapes((), (), None, (), (512, 64), moe=(8, 1, 64, 32, "silu")), torch.float32, CPU)


def scan_with(change):
    """The reference scan, its outputs changed by change(y, boundary, seqlens)."""
    return lambda *args: change(*reference.ssd_scan(*args), args[-2])


def first_differs(by):
    """A pair whose first tensor is moved a little in calls of few rows."""
    return lambda x, *rest: (by(x, *rest)[0] + (1e-3 if len(x) < 8 else 0.0), by(x, *rest)[1])


def forgotten_history(x, weight, bias, history, seqlens):
    return reference.causal_conv1d(x, weight, bias, None, seqlens)


def leaky_scan(*args):
    *rest, seqlens, shape = args
    one = Seqlens.of([int(seqlens.cu_q[-1])], [int(seqlens.cu_k[-1])])
    y, _ = reference.ssd_scan(*rest[:-1], None if rest[-1] is None else rest[-1][:1], one, shape)
    return y, reference.ssd_scan(*args)[1]


def decoding(seqlens):
    return torch.repeat_interleave(seqlens.cu_q.diff() == 1, seqlens.cu_q.diff().long())[:, None]


another_decode = scan_with(lambda y, end, seqlens: (torch.where(decoding(seqlens), y * (1 + 2**-20), y), end))
by_the_longest = scan_with(lambda y, end, seqlens: (y * (1 + 2**-20) if len(seqlens.cu_q) > 2 and seqlens.max_q == 1 else y, end))
of_short_pieces = scan_with(lambda y, end, seqlens: (y * (1 + 2**-20) if 1 < seqlens.max_q < 32 else y, end))
rounded_state = scan_with(lambda y, end, seqlens: (y, end.bfloat16().float() if seqlens.max_q < 32 else end))


@pytest.mark.parametrize(
    ("name", "planted", "check"),
    [
        ("relu2", by_rows(reference.relu2), "row invariance"),
        ("router_logits", by_rows(reference.router_logits), "row invariance"),
        ("topk_softmax", first_differs(reference.topk_softmax), "row invariance"),
        ("grouped_topk", first_differs(reference.grouped_topk), "row invariance"),
        ("routed_experts", by_rows(reference.routed_experts), "row invariance"),
        ("gated_rms_norm", by_rows(reference.gated_rms_norm), "row invariance"),
        ("causal_conv1d", by_rows(reference.causal_conv1d), "row invariance"),
        ("causal_conv1d", forgotten_history, "decode equals prefill"),
        ("ssd_scan", leaky_scan, "packed equals alone"),
        ("ssd_scan", of_short_pieces, "cut prefill equals prefill"),
        ("ssd_scan", another_decode, "decode equals prefill"),
        ("ssd_scan", by_the_longest, "decode equals prefill"),
        ("ssd_scan", rounded_state, "decode equals prefill"),
    ],
)
def test_a_broken_kernel_is_named_with_its_check_and_row(name, planted, check):
    with pytest.raises(ProbeError) as error:
        probe_kernels(kernels(**{name: planted}), SHAPES, torch.float32, CPU)
    found = str(error.value)
    assert re.search(rf"planted\.{name}: {check} broken at shape .* in torch.float32 on cpu: first differing row \d+", found), found


def test_an_expert_that_depends_on_how_many_chose_it_is_refused():
    def by_load(x, w13, w2, weights, ids, activation):
        y = reference.routed_experts(x, w13, w2, weights, ids, activation)
        load = ids.flatten().bincount(minlength=len(w13))[ids.long()].float()
        return y * (1 + 2**-20 * (load.sum(1, keepdim=True) > 60))

    with pytest.raises(ProbeError, match="routed_experts"):
        probe_kernels(kernels(routed_experts=by_load), SHAPES, torch.float32, CPU)
