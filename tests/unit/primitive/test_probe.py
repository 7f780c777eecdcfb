"""The probe refuses kernels that break a promise, and names the kernel, the shape and the first differing row."""

import re
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from lite.errors import ProbeError
from lite.primitive.kernels import reference
from lite.primitive.kernels.probe import ModelShapes, probe_kernels
from lite.runtime import runtime as runtime_module

SHAPES = ModelShapes(linears=((96, 64),), norms=(64,), attention=(4, 2, 16), swiglu=(96,), head=(512, 64))
CPU = torch.device("cpu")


def kernels(**replaced):
    """The reference set with some kernels replaced; a kernel set is a module."""
    planted = ModuleType("planted")
    vars(planted).update({name: vars(reference)[name] for name in reference.__all__} | {"NAME": "planted"} | replaced)
    return planted


def by_rows(fn):
    """A kernel that computes row r differently in calls of few rows."""
    return lambda x, *rest: fn(x, *rest) + (1e-3 if x.shape[0] < 8 else 0.0)


def attention_of_another_backend(q, k, v, seqlens, scale, page):
    """Decode by another formula than prefill, as engines have it."""
    out, lse = reference.attention(q, k, v, seqlens, scale)
    decoding = torch.repeat_interleave(seqlens.cu_q.diff() == 1, seqlens.cu_q.diff().long())
    return torch.where(decoding[:, None, None], out * (1 + 2**-20), out), lse


def attention_by_the_longest_query(q, k, v, seqlens, scale, page):
    """FlashAttention 3 at head size 64: another kernel where every sequence of a call of several has one query."""
    out, lse = reference.attention(q, k, v, seqlens, scale)
    return (out * (1 + 2**-20), lse) if len(seqlens.cu_q) > 2 and seqlens.max_q == 1 else (out, lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_set_keeps_its_promises_here(dtype):
    probes = probe_kernels(kernels(), SHAPES, dtype, CPU)
    assert {p.kernel for p in probes} == {"linear", "rms_norm", "add_rms_norm", "rotary", "swiglu", "attention", "token_logprobs"}
    assert all(p.ok for p in probes)


@pytest.mark.parametrize(
    ("name", "planted", "check"),
    [
        ("linear", {"linear": by_rows(reference.linear)}, "row invariance"),
        ("rms_norm", {"rms_norm": by_rows(reference.rms_norm)}, "row invariance"),
        ("swiglu", {"swiglu": by_rows(reference.swiglu)}, "row invariance"),
        ("attention", {"paged_attention": attention_of_another_backend}, "decode equals prefill"),
        ("attention", {"paged_attention": attention_by_the_longest_query}, "decode equals prefill"),
        ("rotary", {"rotary": lambda q, *rest: tuple(t + (q.shape[0] < 8) for t in reference.rotary(q, *rest))}, "row invariance"),
        ("add_rms_norm", {"add_rms_norm": lambda x, *rest: (reference.add_rms_norm(x, *rest)[0] + (len(x) < 8), x)}, "row invariance"),
        ("token_logprobs", {"sampler_logprobs": lambda *args: reference.sampler_logprobs(*args) + 1e-6}, "equals the sampler's"),
    ],
)
def test_a_broken_kernel_is_named_with_shape_and_row(name, planted, check):
    with pytest.raises(ProbeError) as error:
        probe_kernels(kernels(**planted), SHAPES, torch.float32, CPU)
    assert re.search(rf"planted\.{name}: {check} broken at shape \(.*\) in torch.float32 on cpu: first differing row \d+", str(error.value))


def test_atens_silu_is_caught_where_its_tail_rounds_otherwise():
    """Not a made-up fault: F.silu computes the last elements of a buffer by another formula than the rest."""
    x = torch.randn(1000, 7, generator=torch.Generator().manual_seed(0)) * 3
    if torch.equal(F.silu(x), torch.stack([F.silu(row.clone()) for row in x])):
        pytest.skip("this processor's silu treats a buffer's tail like its body")
    planted = kernels(swiglu=lambda gate_up: F.silu(gate_up.chunk(2, -1)[0].contiguous()) * gate_up.chunk(2, -1)[1])
    with pytest.raises(ProbeError, match="swiglu"):
        probe_kernels(planted, ModelShapes((), (), None, (7,), (512, 64)), torch.float32, CPU)


def test_a_dependence_on_the_number_of_threads_is_reported_and_not_refused():
    planted = kernels(linear=lambda x, w, b: reference.linear(x, w, b) + (1e-3 if torch.get_num_threads() == 1 else 0.0))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        probes = probe_kernels(planted, SHAPES, torch.float32, CPU)
    finally:
        torch.set_num_threads(threads)
    assert [p.ok for p in probes if p.check == "threads"] == [False]


def test_a_failed_probe_ends_a_proof_inconclusive(tmp_path, monkeypatch):
    from lite.acceptance.prove import prove
    from lite.acceptance.sides import ProveConfig
    from tests.unit.acceptance.test_rewards import Silent

    def broken(*args):
        raise ProbeError("kernel planted.linear: row invariance broken at shape (96, 64): first differing row 3")

    monkeypatch.setattr(runtime_module, "probe_kernels", broken)
    receipt = prove(ProveConfig(out=tmp_path / "run", proxy="llama"), ["test"], Silent())
    assert receipt["status"] == "inconclusive" and "planted.linear" in receipt["reason"] and "row 3" in receipt["reason"]


def test_the_probe_is_made_again_for_another_number_of_threads():
    """A result at one number of threads says nothing of another."""
    calls = []
    planted = kernels(swiglu=lambda x: calls.append(torch.get_num_threads()) or reference.swiglu(x))
    threads = torch.get_num_threads()
    try:
        for n in (1, 1, 2):
            torch.set_num_threads(n)
            probe_kernels(planted, SHAPES, torch.float32, CPU)
    finally:
        torch.set_num_threads(threads)
    assert set(calls) == {1, 2} and calls.count(1) == calls.count(2)


def test_a_tile_that_starts_off_a_cache_line_gives_the_same_bytes():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 100, generator=generator), torch.randn(98, 100, generator=generator)
    wanted = reference.linear(x, weight, None)
    for offset in range(1, 16):
        shifted = torch.cat([torch.zeros(offset), x.view(-1)])[offset:].view(64, 100)
        assert torch.equal(reference.linear(shifted, weight, None), wanted), offset
