"""The fused VJPs of Mamba-2, interpreted in fp32, against torch_mamba.py's formulas at shapes that fit no tile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lite.primitive.compare import bits
from lite.primitive.kernels.vjp import cuda, mamba, torch_mamba
from lite.primitive.kernels.vjp import triton_mamba as fused
from lite.primitive.parallel.packing import Seqlens
from tests.triton.hopper import errors_of
from tests.triton.test_triton_backwards import close, normal

NORM, CONV = frozenset({"x", "gate", "weight"}), frozenset({"weight", "bias"})
LENGTHS = {
    "one": [70],
    "several": [1, 2, 3, 57, 1, 1, 9],  # boundaries on both sides of a program's first row
    "single rows": [1] * 67,
    "at a program's edge": [64, 64, 1],
}


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few, so that each has several tiles."""
    monkeypatch.setattr(fused, "PROGRAMS", 7)


def apart(t: Tensor, before: int = 3, after: int = 6) -> Tensor:
    """The same values as columns of something wider, as a split projection gives them."""
    wide = torch.full((t.shape[0], before + t.shape[1] + after), 9.0)
    wide[:, before : before + t.shape[1]] = t
    return wide[:, before : before + t.shape[1]]


def all_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(close(*pair) for pair in zip(got, want, strict=True))


def same_bits(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


def norm_values(rows: int, size: int, groups: int) -> dict[str, Any]:
    x, gate, weight = normal(rows, size), normal(rows, size, seed=1), normal(size, mean=1.0)
    return {"x": x, "gate": gate, "weight": weight, "groups": groups, "eps": 1e-5}


def of_norm(backward: Any, values: dict[str, Any], dy: Tensor) -> tuple[Tensor, ...]:
    found = backward(values, NORM, {"y": dy})
    return tuple(found[name] for name in ("x", "gate", "weight"))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("rows", "size", "groups"), [(5, 48, 1), (700, 36, 3), (1, 8, 8), (6, 2600, 2), (530, 16, 2)])
def test_a_gated_norms_gradient_follows_the_formula(rows: int, size: int, groups: int) -> None:
    values, dy = norm_values(rows, size, groups), normal(rows, size, seed=2)
    want, got = of_norm(torch_mamba.gated_rms_norm, values, dy), of_norm(cuda.gated_rms_norm, values, dy)
    assert all_close(got, want) and same_bits(of_norm(cuda.gated_rms_norm, values, dy), got)
    for name, wrong in {"eps": 1e-1, "gate": values["x"], "weight": values["weight"].roll(1)}.items():
        assert not all_close(of_norm(cuda.gated_rms_norm, values | {name: wrong}, dy), want), f"another {name} must be noticed"
    other = 1 if groups > 1 else 2
    assert not all_close(of_norm(cuda.gated_rms_norm, values | {"groups": other}, dy), want), "other groups must be noticed"


@pytest.mark.parametrize("which", ["x", "gate", "dy"])
def test_a_gated_norm_takes_rows_that_lie_apart(which: str) -> None:
    tensors = {"x": normal(11, 40), "gate": normal(11, 40, seed=1), "dy": normal(11, 40, seed=2)}
    values = {"weight": normal(40, mean=1.0), "groups": 5, "eps": 1e-5}
    got = fused.gated_rms_norm(**values, **tensors)
    assert same_bits(fused.gated_rms_norm(**values, **tensors | {which: apart(tensors[which])}), got)
    wide = apart(tensors[which])
    wrong = torch.as_strided(wide, wide.shape, (40, 1), wide.storage_offset())
    assert not all_close(fused.gated_rms_norm(**values, **tensors | {which: wrong}), got), "rows read as if they touched must be noticed"
    turned = tensors[which].t().contiguous().t()
    assert same_bits(fused.gated_rms_norm(**values, **tensors | {which: turned}), got), "columns that lie apart"
    constant = torch.ones(1, 40).expand(11, 40)
    assert same_bits(*(fused.gated_rms_norm(**values, **tensors | {which: t}) for t in (constant, constant.contiguous()))), (
        "one row for all"
    )


def conv_values(lengths: list[int], channels: int, width: int, bias: bool) -> dict[str, Any]:
    x, weight, b = normal(sum(lengths), channels), normal(channels, width, seed=1), normal(channels, seed=2)
    return {"x": x, "weight": weight, "bias": b if bias else None, "history": None, "seqlens": Seqlens.of(lengths, lengths)}


def of_conv(backward: Any, values: dict[str, Any], dy: Tensor) -> tuple[Tensor, ...]:
    found = backward(values, CONV, {"y": dy})
    return found["weight"], found["bias"]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("channels", "width", "bias"), [(300, 4, True), (23, 4, False), (23, 3, True), (23, 2, False), (8, 1, True)])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_convolutions_parameters_follow_the_formula(name: str, channels: int, width: int, bias: bool) -> None:
    values = conv_values(LENGTHS[name], channels, width, bias)
    dy = normal(*values["x"].shape, seed=3)
    want, got = of_conv(torch_mamba.causal_conv1d, values, dy), of_conv(mamba.causal_conv1d, values, dy)
    assert got[0].is_contiguous() and got[0].dtype == got[1].dtype == torch.float32
    assert all_close(got, want) and same_bits(of_conv(mamba.causal_conv1d, values, dy), got)
    changed = {"bias": normal(len(got[1]), seed=4), "weight": values["weight"].roll(1, 0)}
    for which, wrong in changed.items():
        assert not all_close(of_conv(mamba.causal_conv1d, values | {which: wrong}, dy), want), f"another {which} must be noticed"
    if width > 1:
        whole = Seqlens.of([len(dy)], [len(dy)])
        across = all_close(of_conv(mamba.causal_conv1d, values | {"seqlens": whole}, dy), want)
        assert across is (name == "one"), "taps that read across a boundary must be noticed"
        turned = values | {"weight": values["weight"].flip(1)}
        assert not all_close(of_conv(mamba.causal_conv1d, turned, dy), want), "taps in another order must be noticed"
        found = got[0].clone()
        found[:, 0] = found[:, -1]
        assert not close(found, want[0]), "a tap's gradient in another's place must be noticed"


@pytest.mark.parametrize("place", [0, 1, 2, 61, 62, 63, 64, 65, 66, 67])
def test_a_tap_reads_no_row_of_another_sequence(place: int) -> None:
    """A sequence may begin at any place beside a program's first row: what is before it changes nothing there."""
    lengths = [place, 70 - place] if place else [70]
    values, dy = conv_values(lengths, 5, 4, True), torch.cat([torch.zeros(place, 5), normal(70 - place, 5)])
    got = of_conv(mamba.causal_conv1d, values, dy)
    before = torch.arange(70)[:, None] < place
    changed = values | {"x": values["x"] + before}
    assert same_bits(of_conv(mamba.causal_conv1d, changed, dy), got)
    whole = {"seqlens": Seqlens.of([70], [70])}
    leaks = not same_bits(of_conv(mamba.causal_conv1d, changed | whole, dy), of_conv(mamba.causal_conv1d, values | whole, dy))
    assert leaks is (place > 0), "a tap across the boundary must be noticed"


def test_a_convolution_takes_rows_that_lie_apart() -> None:
    values = conv_values(LENGTHS["several"], 40, 4, True)
    dy = normal(*values["x"].shape, seed=3)
    got = of_conv(mamba.causal_conv1d, values, dy)
    for t in (apart, lambda t: t.t().contiguous().t()):
        assert same_bits(of_conv(mamba.causal_conv1d, values | {"x": t(values["x"])}, t(dy)), got)
    wide = apart(values["x"])
    wrong = torch.as_strided(wide, wide.shape, (40, 1), wide.storage_offset())
    assert not all_close(of_conv(mamba.causal_conv1d, values | {"x": wrong}, dy), got), "rows read as if they touched must be noticed"


def test_only_what_is_asked_for_is_given() -> None:
    values = conv_values([7], 5, 4, True)
    for needs in (frozenset(), frozenset({"weight"}), frozenset({"bias"}), CONV):
        assert mamba.causal_conv1d(values, needs, {"y": normal(7, 5)}).keys() == needs


COMPILED = """
from lite.primitive.kernels.vjp import triton_mamba
k = triton_mamba._kernels()

def norm(kind, block, rows, warps, aligned):
    pointers = dict.fromkeys(("x", "gate", "weight", "dy", "dx", "d_gate"), kind) | {"d_weight": "fp32"}
    scalars = dict.fromkeys(("rows", "C", "size", "x_row", "gate_row", "dy_row"), "i32") | {"eps": "fp32"}
    compiled(k.gated_rms_norm, pointers, scalars, {"R": rows, "BLOCK": block}, warps, aligned)

def conv(kind, bias, width, aligned):
    pointers = dict.fromkeys(("x", "weight", "bias", "dy"), kind) | {"sequence": "i32", "sums": "fp32"}
    constants = {"BIAS": bias, "W": width, "R": triton_mamba.CONV_ROWS, "BLOCK": triton_mamba.CONV_COLUMNS}
    compiled(k.conv_parameters, pointers, dict.fromkeys(("rows", "C", "x_row", "dy_row"), "i32"), constants, 4, aligned)
"""
OURS = """
for kind, aligned in (("bf16", True), ("bf16", False), ("fp32", True)):
    for block, warps in ((512, 4), (4096, 16), (32, 4)):
        norm(kind, block, max(1, triton_mamba.TILE // block), warps, aligned)
    for bias, width in ((True, 4), (False, 2)):
        conv(kind, bias, width, aligned)
"""
PLANTED = 'norm("bf16", 512, 3, 4, True)'


def test_the_kernels_compile_for_a_hopper_gpu(tmp_path: Path) -> None:
    assert errors_of(COMPILED + OURS, tmp_path) == ""
    assert "power of 2" in errors_of(COMPILED + PLANTED, tmp_path), "a tile cannot have three rows"
