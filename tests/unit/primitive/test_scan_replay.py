"""The replay rule: a token's bytes from the scan are the same in a prefill, in one cut anywhere, and in decode, alone and packed."""

import pytest
import torch
from torch import Tensor

from lite.primitive.compare import bits
from lite.primitive.kernels import reference
from lite.primitive.kernels.visible import SSDShape
from lite.primitive.parallel.packing import Seqlens
from tests.invariance import batch_violations
from tests.mamba import SMALL, Scan, ScanInputs, Served, serve, served

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = {
    "groups of heads": SMALL,
    "one group": SSDShape(4, 8, 1, 16, 16),
    "a group a head": SSDShape(3, 8, 3, 16, 16),
    "one head": SSDShape(1, 16, 1, 16, 16),
    "sizes of no tile": SSDShape(2, 6, 1, 10, 12),
}
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def wrong_cuts(inputs: ScanInputs, cuts: list[int], prompt: int, scan: Scan = reference.ssd_scan) -> list[int]:
    """Places to cut a prompt into two at which it, the tokens decoded after it or the boundary differ from the whole in one call."""
    T = len(inputs.xbc)
    y, boundary = inputs.scan([T])
    found = []
    for cut in cuts:
        again, end = served(inputs, [cut, prompt - cut, *[1] * (T - prompt)], scan)
        if not (same(again, y) and same(end, boundary[0])):
            found.append(cut)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("all_threads")
@both_dtypes
@every_shape
def test_a_prompt_cut_at_any_token_and_then_decoded(shape: SSDShape, dtype: torch.dtype) -> None:
    prompt = 2 * shape.chunk + 1
    assert wrong_cuts(ScanInputs.random(prompt + 3, shape, dtype), list(range(1, prompt)), prompt) == []


@both_dtypes
def test_a_prompt_cut_at_any_token_with_chunks_of_64(dtype: torch.dtype) -> None:
    shape = SSDShape(2, 16, 1, 32, 64)
    assert wrong_cuts(ScanInputs.random(131, shape, dtype), list(range(1, 129)), 129) == []


@both_dtypes
@every_shape
def test_decode_from_the_first_token_on_and_pieces_of_a_few(shape: SSDShape, dtype: torch.dtype) -> None:
    inputs = ScanInputs.random(3 * shape.chunk + 2, shape, dtype)
    y, boundary = inputs.scan([len(inputs.xbc)])
    for size in (1, 3, shape.chunk - 1, shape.chunk, shape.chunk + 1):
        pieces = [min(size, len(y) - at) for at in range(0, len(y), size)]
        again, end = served(inputs, pieces)
        assert same(again, y) and same(end, boundary[0]), size


@both_dtypes
def test_an_engine_serves_many_sequences_at_any_place_in_one_call(dtype: torch.dtype) -> None:
    """Steps that mix decode, prefill and pieces, as a scheduler makes them."""
    generator = torch.Generator().manual_seed(3)
    layer = ScanInputs.random(200, SMALL, dtype)
    lengths, starts = [1, 40, 16, 33, 17, 93], [0, 1, 41, 57, 90, 107]
    waiting = [Served.of(layer.rows(slice(a, a + n))) for a, n in zip(starts, lengths, strict=True)]
    got: list[list[Tensor]] = [[] for _ in waiting]
    while any(s.seen < n for s, n in zip(waiting, lengths, strict=True)):
        open_ = [i for i, s in enumerate(waiting) if s.seen < lengths[i] and torch.rand((), generator=generator) < 0.7]
        counts = [min(lengths[i] - waiting[i].seen, int(torch.randint(1, 20, (), generator=generator)) if i % 2 else 1) for i in open_]
        if open_:
            for i, y in zip(open_, serve([waiting[i] for i in open_], counts), strict=True):
                got[i].append(y)
    for s, parts in zip(waiting, got, strict=True):
        y, boundary = s.inputs.scan([len(s.inputs.xbc)])
        assert same(torch.cat(parts), y) and same(s.boundary, boundary[0])


@pytest.mark.usefixtures("all_threads")
@both_dtypes
@pytest.mark.parametrize("lengths", [[1, 2, 15, 16, 17, 33], [3, 1, 2], [1], [64, 1, 63]])
def test_packed_sequences_are_each_as_alone(lengths: list[int], dtype: torch.dtype) -> None:
    inputs = ScanInputs.random(sum(lengths), SMALL, dtype)
    scan = lambda xbc, dt, _, seqlens, __: reference.ssd_scan(xbc, dt, inputs.A, inputs.D, inputs.dt_bias, None, seqlens, SMALL)[0]
    assert batch_violations(scan, inputs.xbc, inputs.dt, inputs.dt, lengths, 1.0) == []


@both_dtypes
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65])
def test_lengths_at_which_a_chunk_of_64_pads(T: int, dtype: torch.dtype) -> None:
    shape = SSDShape(2, 16, 1, 32, 64)
    inputs = ScanInputs.random(65, shape, dtype)
    whole, part = inputs.scan([65]), inputs.rows(slice(T)).scan([T])
    assert same(part[0], whole[0][:T])
    assert same(part[1], whole[1]) if T >= 64 else not part[1].count_nonzero()


def test_a_token_changed_at_the_end_of_one_sequence_leaves_the_next_alone() -> None:
    inputs = ScanInputs.random(40, SMALL, torch.float32)
    y, boundary = inputs.scan([17, 23])
    inputs.xbc[16], inputs.dt[16] = 100.0, 5.0
    again, end = inputs.scan([17, 23])
    assert same(again[17:], y[17:]) and same(end[1], boundary[1]) and same(again[:16], y[:16])
    assert not same(again[16], y[16])


def test_what_comes_later_may_be_anything() -> None:
    """Of the same chunk and of later ones, huge numbers, too; the boundary before it stays."""
    inputs = ScanInputs.random(40, SMALL, torch.float32)
    y = inputs.scan([40])[0]
    inputs.xbc[20:], inputs.dt[20:] = 1e18, 50.0
    again = inputs.scan([40])[0]
    assert same(again[:20], y[:20])


def test_no_uninitialised_row_reaches_the_result(poisoned_memory: None) -> None:
    y, boundary = ScanInputs.random(19, SMALL, torch.float32).scan([1, 18])
    assert y.isfinite().all() and boundary.isfinite().all()


def test_a_boundary_that_was_given_is_not_written() -> None:
    inputs, boundary = ScanInputs.random(40, SMALL, torch.float32), torch.randn(1, 4, 8, 16)
    before = boundary.clone()
    after = inputs.scan([40], boundary)[1]
    assert same(boundary, before) and not same(after, before)
    kept = inputs.rows(slice(15)).scan([15], boundary)[1]
    assert same(kept, before) and kept.data_ptr() != boundary.data_ptr(), "no full chunk: the given one, and a tensor of its own"


def rounded_state(*args: object) -> tuple[Tensor, Tensor]:
    y, boundary = reference.ssd_scan(*args)
    return y, boundary.bfloat16().float()


def boundary_after_the_last_row(*args: object) -> tuple[Tensor, Tensor]:
    """The state that an engine without replay keeps."""
    *rest, shape = args
    return reference.ssd_scan(*args)[0], reference.ssd_scan(*rest, shape._replace(chunk=1))[1]


def no_boundary(*args: object) -> tuple[Tensor, Tensor]:
    *rest, _, seqlens, shape = args
    return reference.ssd_scan(*rest, None, seqlens, shape)


def decode_by_recurrence(xbc: Tensor, dt: Tensor, A: Tensor, D: Tensor, bias: Tensor, boundary: Tensor, seqlens: Seqlens, shape: SSDShape):
    """Right to fp32's precision: the last of the rows by the recurrence from the state before it."""
    y, end = reference.ssd_scan(xbc, dt, A, D, bias, boundary, seqlens, shape)
    if seqlens.max_q > 1:
        return y, end
    H, P, G, N, _ = shape
    state = boundary[0]
    for row, step in zip(xbc.float(), torch.nn.functional.softplus(dt.float() + bias.float()), strict=True):
        x, (B, C) = row[: H * P].view(H, P), (t.view(G, N).repeat_interleave(H // G, 0) for t in row[H * P :].chunk(2))
        state = torch.exp(step * A)[:, None, None] * state + (step[:, None] * x)[..., None] * B[:, None]
    return ((state * C[:, None]).sum(-1) + D.float()[:, None] * x).view(1, -1).to(xbc.dtype), end


@pytest.mark.parametrize("planted", [rounded_state, boundary_after_the_last_row, no_boundary, decode_by_recurrence])
def test_a_scan_that_breaks_the_rule_is_caught(planted: Scan) -> None:
    assert wrong_cuts(ScanInputs.random(36, SMALL, torch.float32), [5, 16, 20, 31], 33, planted)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_replay_from_a_wrong_row_is_caught(shift: int) -> None:
    inputs = ScanInputs.random(40, SMALL, torch.float32)
    sequence = Served.of(inputs)
    serve([sequence], [20])
    sequence.start += shift
    assert not same(serve([sequence], [20])[0], inputs.scan([40])[0][20:])


def test_a_scan_that_sees_across_sequences_is_caught() -> None:
    inputs, lengths = ScanInputs.random(14, SMALL, torch.float32), [5, 9]
    leaky = lambda xbc, dt, _, seqlens, __: reference.ssd_scan(
        xbc, dt, inputs.A, inputs.D, inputs.dt_bias, None, Seqlens.of([len(xbc)], [len(xbc)]), SMALL
    )[0]
    assert batch_violations(leaky, inputs.xbc, inputs.dt, inputs.dt, lengths, 1.0)


def test_a_tile_cut_to_the_rows_that_it_holds_is_caught() -> None:
    """A BLAS picks its blocking by the shape: why a chunk is padded."""

    def trimmed(*args: object) -> tuple[Tensor, Tensor]:
        *rest, seqlens, shape = args
        y = reference.ssd_scan(*rest, seqlens, shape._replace(chunk=min(shape.chunk, seqlens.max_k)))[0]
        return y, reference.ssd_scan(*args)[1]

    shape = SSDShape(2, 16, 1, 32, 64)
    if not wrong_cuts(ScanInputs.random(70, shape, torch.float32), [5, 7, 33], 65, trimmed):
        pytest.skip("on this CPU a product's rows happen not to depend on its shape, so it is no planted error here")
