"""What a decode step moves between pages and the scan, by the fused kernels, interpreted: the bits of the torch formulas, on pages that lie
apart in the engine's cache and hold NaN wherever nothing may be read."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lite.primitive.compare import bits
from lite.vllm_plugin import page_io
from tests.triton.hopper import errors_of

SLOTS = torch.tensor([3, 0, 5, 0])  # a page may be padding's, several times


def pages(*shape: int, pages: int = 7) -> Tensor:
    """A view of pages with a gap between them, full of NaN."""
    size = torch.Size(shape).numel()
    return torch.full((pages, size + 5), torch.nan)[:, 2 : 2 + size].unflatten(1, shape)


def filled(*shape: int) -> Tensor:
    held = pages(*shape)
    held.copy_(torch.randn(held.shape, generator=torch.Generator().manual_seed(0)))
    return held


@pytest.mark.parametrize("shape", [(8, 3), (5, 700), (130, 64)], ids=str)
def test_rows_up_to_the_last_are_read_and_zeros_after_them(shape: tuple[int, int]) -> None:
    held, last = filled(*shape), torch.tensor([0, shape[0] - 1, 2, 1])
    held[3, 1:], held[5, 3:] = torch.nan, torch.nan
    got = page_io.fused_read_rows(held, SLOTS, last)
    assert torch.equal(bits(got), bits(page_io.read_rows(held, SLOTS, last))) and got[2, :3].any() and not got[2, 3:].any()
    assert not torch.equal(bits(page_io.fused_read_rows(held, SLOTS, last + 1)), bits(got)), "a row too many must be noticed"


@pytest.mark.parametrize("shape", [(2, 3, 2), (3, 9), (8, 16, 40)], ids=str)
def test_states_are_read_where_they_count(shape: tuple[int, ...]) -> None:
    held, valid = filled(*shape), torch.tensor([True, False, True, False])
    held[0] = torch.nan
    got = page_io.fused_read_states(held, SLOTS, valid)
    assert torch.equal(bits(got), bits(page_io.read_states(held, SLOTS, valid))) and got[0].any() and not got[1].any()
    assert not torch.equal(bits(page_io.fused_read_states(held, SLOTS, ~valid)), bits(got)), "the others must be noticed"


@pytest.mark.parametrize("shape", [(2, 3, 2), (8, 16, 40)], ids=str)
def test_states_are_written_where_a_chunk_is_full_and_nowhere_else(shape: tuple[int, ...]) -> None:
    full, states = torch.tensor([True, False, False, False]), torch.randn(4, *shape)
    whole = pages(*shape)
    page_io.fused_write_states(whole, SLOTS, full, states)
    formula = pages(*shape)
    page_io.write_states(formula, SLOTS, full, states)
    assert torch.equal(bits(whole), bits(formula)) and torch.equal(whole[3], states[0])
    assert whole[[0, 1, 2, 4, 5, 6]].isnan().all()
    between = whole.untyped_storage().size() // 4 - whole.numel()
    assert int(torch.tensor([]).set_(whole.untyped_storage()).isnan().sum()) == between + whole[0].numel() * 6, "a gap was written"


COMPILED = """
from lite.vllm_plugin import page_io
k = page_io._kernels()

def rows(kind, rows, columns):
    scalars = dict.fromkeys(("page", "L", "C"), "i32")
    pointers = {"held": kind, "slots": "i64", "last": "i64", "out": kind}
    compiled(k.read_rows, pointers, scalars, {"ROWS": rows, "COLUMNS": columns}, 8)

def states(kind):
    sizes = dict.fromkeys(("page", "N"), "i32")
    compiled(k.read_states, {"held": kind, "slots": "i64", "valid": "i1", "out": kind}, sizes, {"BLOCK": page_io.TILE}, 8)
    compiled(k.write_states, {"held": kind, "slots": "i64", "full": "i1", "states": kind}, sizes, {"BLOCK": page_io.TILE}, 8)
"""


def test_the_kernels_compile_for_a_hopper_gpu(tmp_path: Path) -> None:
    ours = "rows('bf16', 8, 512), rows('bf16', 64, 64), rows('bf16', 1024, 4), states('fp32'), states('bf16')"
    assert errors_of(COMPILED + ours, tmp_path) == ""
    assert "power of 2" in errors_of(COMPILED + "rows('bf16', 3, 512)", tmp_path), "a tile cannot have three rows"
