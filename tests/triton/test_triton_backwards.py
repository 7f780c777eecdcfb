"""The fused VJPs, interpreted in fp32, against torch.py's formulas at shapes that fit no tile."""

from pathlib import Path

import pytest
import torch

from lite.primitive.compare import bits
from lite.primitive.kernels.vjp import torch as formulas
from lite.primitive.kernels.vjp import triton as fused
from tests.gradients import relative_l2
from tests.triton.hopper import errors_of

LIMIT = 1e-5  # fp32 on both sides, sums of at most a thousand terms
NEEDS = frozenset({"x", "weight", "hidden", "gate_up"})


def normal(*shape: int, seed: int = 0, mean: float = 0.0) -> torch.Tensor:
    return mean + torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return relative_l2(got, want) < LIMIT


@pytest.mark.parametrize("shape", [(5, 48), (300, 40), (7, 3, 16), (1, 1000)], ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_a_norms_gradient_follows_the_formula(shape: tuple[int, ...], add: bool) -> None:
    x, dy, d_total, weight = normal(*shape), normal(*shape, seed=1), normal(*shape, seed=2), normal(shape[-1], mean=1.0)
    dx, d_weight = fused.rms_norm(x, weight, 1e-5, dy, d_total if add else None)
    if add:
        want = formulas.add_rms_norm({"total": x, "weight": weight, "eps": 1e-5}, NEEDS, {"y": dy, "total": d_total})
    else:
        want = formulas.rms_norm({"x": x, "weight": weight, "eps": 1e-5}, NEEDS, {"y": dy})
    wanted = want["weight"] if len(shape) == 2 else want["weight"].sum(0) if want["weight"].ndim > 1 else want["weight"]
    assert close(dx, want["x"]) and close(d_weight, wanted)
    assert not close(fused.rms_norm(x, weight, 1e-1, dy, d_total if add else None)[0], want["x"]), "another eps must be noticed"
    again = fused.rms_norm(x, weight, 1e-5, dy, d_total if add else None)
    assert torch.equal(bits(again[0]), bits(dx)) and torch.equal(bits(again[1]), bits(d_weight))


@pytest.mark.parametrize(("rows", "size"), [(1, 8), (9, 40), (3, 5000)])
def test_swiglus_gradient_follows_the_formula(rows: int, size: int) -> None:
    gate_up, dy = normal(rows, 2 * size), normal(rows, size, seed=1)
    want = formulas.swiglu({"gate_up": gate_up}, NEEDS, {"y": dy})["gate_up"]
    assert close(fused.swiglu(gate_up, dy), want)
    assert not close(fused.swiglu(gate_up.roll(size, 1), dy), want), "gate taken for up must be noticed"


@pytest.mark.parametrize("which", ["logprob", "entropy", "both"])
def test_the_heads_gradient_follows_the_formula_chunk_by_chunk(which: str) -> None:
    T, H, V = 11, 24, 50
    hidden, weight = normal(T, H), normal(V, H, seed=1)
    labels, temperature = torch.arange(T) * 5 % V, torch.linspace(0.5, 2.0, T)
    z = hidden @ weight.t() / temperature[:, None]
    log_z = torch.logsumexp(z, -1)
    p = torch.softmax(z, -1)
    entropy = log_z - (p * z).sum(-1)
    d = {"logprob": normal(T, seed=2) if which != "entropy" else None, "entropy": normal(T, seed=3) if which != "logprob" else None}
    values = {
        "hidden": hidden, "weight": weight, "labels": labels, "temperature": temperature, "vocab_size": V, "entropy": entropy,
        "max": z.amax(-1), "sum": torch.exp(z - z.amax(-1, keepdim=True)).sum(-1),
    }  # fmt: skip
    want = formulas.token_logprobs(values, NEEDS, d)
    dz = torch.cat([
        fused.logits_(hidden @ weight[start : start + 16].t(), labels, temperature, log_z, entropy, d["logprob"], d["entropy"], start)
        for start in range(0, V, 16)
    ], dim=1)  # fmt: skip
    assert close(dz @ weight, want["hidden"]) and close(dz.t() @ hidden, want["weight"])
    shifted = fused.logits_(hidden @ weight.t(), labels + 1, temperature, log_z, entropy, d["logprob"], d["entropy"], 0)
    assert close(shifted @ weight, want["hidden"]) is (which == "entropy"), "another label must be noticed"


COMPILED = """
from lite.primitive.kernels.vjp import triton as fused
k, TILE = fused._kernels(), fused.TILE

def norm(block, rows):
    pointers = dict.fromkeys(("x", "weight", "dy", "d_total", "dx"), "bf16") | {"d_weight": "fp32"}
    scalars = {"rows": "i32", "H": "i32", "eps": "fp32"}
    compiled(k.rms_norm, pointers, scalars, {"ADD": True, "R": rows, "BLOCK": block}, 8)
"""
OURS = """
norm(4096, 1), norm(128, 32)
compiled(k.swiglu, dict.fromkeys(("gate_up", "dy", "d_gate_up"), "bf16"), {"F": "i32"}, {"BLOCK": TILE}, 8)
pointers = dict.fromkeys(("temperature", "log_z", "entropy", "d_logprob", "d_entropy"), "fp32") | {"z": "bf16", "labels": "i64"}
for entropy in (True, False):
    compiled(k.logits, pointers, {"start": "i32", "C": "i32"}, {"LOGPROB": True, "ENTROPY": entropy, "BLOCK": TILE}, 8)
"""


def test_the_kernels_compile_for_a_hopper_gpu(tmp_path: Path) -> None:
    assert errors_of(COMPILED + OURS, tmp_path) == ""
    assert "power of 2" in errors_of(COMPILED + "norm(4096, 3)", tmp_path), "a tile cannot have three rows"
