"""vLLM's Mamba-2 kernels: right, and a token's bits depend on its own sequence alone, however it came: packed, cut, or decoded.

The scan is the one that its autotuners' first configurations give: tiles of 32 rows and more, so a chunk of 64 has two of them.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lite.errors import InputError
from lite.primitive.compare import bits
from lite.primitive.kernels.visible import SSDShape
from lite.primitive.kernels.vllm import mamba, triton_set
from lite.primitive.parallel.packing import Seqlens, cumulative_lengths
from lite.vllm_plugin import replay
from tests.closeness import agrees, row_error
from tests.invariance import row_violations

L, W = 64, 4
SHAPE = SSDShape(heads=4, head_dim=16, groups=2, state=16, chunk=L)
INNER, STATES = SHAPE.heads * SHAPE.head_dim, SHAPE.groups * SHAPE.state
C = INNER + 2 * STATES
Weights = SimpleNamespace


@pytest.fixture(scope="module")
def weights() -> Weights:
    torch.manual_seed(1)
    return Weights(A=-torch.rand(SHAPE.heads) * 4 - 0.5, D=torch.randn(SHAPE.heads), dt_bias=torch.randn(SHAPE.heads) - 2,
                   conv=torch.randn(C, W) * 0.5, bias=torch.randn(C))  # fmt: skip


def scan(w: Weights, xbc: Tensor, dt: Tensor, queries: list[int], keys: list[int] | None = None, boundary: Tensor | None = None) -> Any:
    return triton_set.ssd_scan(xbc, dt, w.A, w.D, w.dt_bias, boundary, Seqlens.of(queries, keys or queries), SHAPE)


def recurrence(w: Weights, xbc: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    """A token at a time in fp64. -> (y, the state after the last full chunk)."""
    state = kept = torch.zeros(SHAPE.heads, SHAPE.head_dim, SHAPE.state, dtype=torch.float64)
    ys = []
    for t in range(len(xbc)):
        x, b, c = xbc[t].double().split([INNER, STATES, STATES])
        x = x.view(SHAPE.heads, -1)
        b, c = (g.view(SHAPE.groups, -1).repeat_interleave(SHAPE.heads // SHAPE.groups, 0) for g in (b, c))
        d = F.softplus(dt[t].double() + w.dt_bias.double())
        state = torch.exp(d * w.A.double())[:, None, None] * state + (d[:, None] * x)[..., None] * b[:, None, :]
        ys.append((torch.einsum("hpn,hn->hp", state, c) + w.D.double()[:, None] * x).flatten())
        kept = state if (t + 1) % L == 0 else kept
    return torch.stack(ys).float(), kept.float()


def rows(length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(length, C), torch.randn(length, SHAPE.heads)


# The scan.

LENGTHS = [1, 5, L - 1, L, L + 1, L + 3]


def test_the_scan_agrees_with_the_recurrence(weights: Weights) -> None:
    """fp32 in another order: chunks are summed as matrices, and softplus is the kernel's own."""
    xbc, dt = rows(sum(LENGTHS))
    y, boundary = scan(weights, xbc, dt, LENGTHS)
    cu = cumulative_lengths(LENGTHS).tolist()
    wants = [recurrence(weights, xbc[a:b], dt[a:b]) for a, b in pairwise(cu)]
    assert row_error(y, torch.cat([want for want, _ in wants])) < 1e-4
    states = torch.stack([state for _, state in wants])
    full = torch.tensor(LENGTHS) >= L
    assert row_error(boundary[full].flatten(1), states[full].flatten(1)) < 1e-4 and not boundary[~full].any()


def test_a_wrong_weight_sequence_or_row_is_noticed(weights: Weights) -> None:
    xbc, dt = rows(L + 9)
    want, _ = recurrence(weights, xbc, dt)
    plants = {
        "A": scan(Weights(**{**vars(weights), "A": weights.A * 1.01}), xbc, dt, [L + 9])[0],
        "dt_bias": scan(Weights(**{**vars(weights), "dt_bias": weights.dt_bias + 0.01}), xbc, dt, [L + 9])[0],
        "D": scan(Weights(**{**vars(weights), "D": weights.D.flip(0)}), xbc, dt, [L + 9])[0],
        "two sequences": scan(weights, xbc, dt, [L, 9])[0],
        "a row": scan(weights, torch.cat([xbc[:3], xbc[2:3], xbc[4:]]), dt, [L + 9])[0],
        "groups": scan(weights, torch.cat([xbc[:, :INNER], xbc[:, INNER:].unflatten(1, (4, -1)).flip(1).flatten(1)], 1), dt, [L + 9])[0],
    }
    for name, got in plants.items():
        assert row_error(got, want) > 1e-3, name


@pytest.mark.parametrize("companions", [[3, 1, 2], [5, 5]], ids=str)
def test_a_sequence_has_the_same_bits_in_any_pack(weights: Weights, companions: list[int]) -> None:
    every, lengths = [rows(n) for n in LENGTHS], [LENGTHS[i] for i in companions]
    xbc, dt = (torch.cat(t) for t in zip(*(every[i] for i in companions), strict=True))
    y, boundary = scan(weights, xbc, dt, lengths)
    cu = cumulative_lengths(lengths).tolist()
    for s, i in enumerate(companions):
        alone, state = scan(weights, *every[i], [LENGTHS[i]])
        assert torch.equal(bits(y[cu[s] : cu[s + 1]]), bits(alone)) and torch.equal(bits(boundary[s]), bits(state[0]))


TOTAL = 2 * L + 5
CUTS = [1, L - 1, L, L + 1, 2 * L]


def replayed(w: Weights, xbc: Tensor, dt: Tensor, cut: int, held: int, boundary: Tensor) -> Tensor:
    """The rows from cut on by a scan that begins `held` rows before it."""
    return scan(w, xbc[cut - held :], dt[cut - held :], [TOTAL - cut], [TOTAL - cut + held], boundary)[0]


@pytest.fixture(scope="module")
def whole(weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> (xbc, dt, y, boundary) of TOTAL rows."""
    torch.manual_seed(2)
    xbc, dt = rows(TOTAL)
    return xbc, dt, *scan(weights, xbc, dt, [TOTAL])


@pytest.mark.parametrize("cut", CUTS)
def test_a_scan_from_the_last_boundary_has_the_bits_of_the_whole(weights: Weights, whole: Any, cut: int) -> None:
    xbc, dt, y, _ = whole
    prefix, boundary = scan(weights, xbc[:cut], dt[:cut], [cut])
    assert torch.equal(bits(prefix), bits(y[:cut]))
    assert torch.equal(bits(replayed(weights, xbc, dt, cut, cut % L, boundary)), bits(y[cut:]))


@pytest.mark.parametrize("cut", [L // 2, L + 1])
def test_a_wrong_boundary_or_one_shifted_by_a_row_is_noticed(weights: Weights, whole: Any, cut: int) -> None:
    xbc, dt, y, _ = whole
    _, boundary = scan(weights, xbc[:cut], dt[:cut], [cut])
    _, one_ulp = scan(weights, xbc[:cut], dt[:cut], [cut])
    bits(one_ulp).add_(1)
    plants = {
        "a row too few": replayed(weights, xbc, dt, cut, cut % L - 1, boundary),
        "all held rows left out": replayed(weights, xbc, dt, cut, 0, boundary),
        "another boundary": replayed(weights, xbc, dt, cut, cut % L, boundary + 1),
    }
    if cut > L:
        plants["one ulp"] = replayed(weights, xbc, dt, cut, cut % L, one_ulp)
        plants["no boundary"] = replayed(weights, xbc, dt, cut, cut % L, None)
    for name, got in plants.items():
        assert not torch.equal(bits(got), bits(y[cut:])), name


# Convolution.


def formula(w: Weights, x: Tensor, history: Tensor) -> Tensor:
    padded = torch.cat([history, x]).double()
    taps = sum(padded[j : j + len(x)] * w.conv[:, j].double() for j in range(W))
    return F.silu(taps + w.bias.double()).float()


def test_the_convolution_agrees_with_the_formula_from_any_history(weights: Weights) -> None:
    lengths = [1, 2, 17, 9, 8]
    x, history, cu = torch.randn(sum(lengths), C), torch.randn(len(lengths), W - 1, C), cumulative_lengths(lengths).tolist()
    for given in (history, None):
        got = triton_set.causal_conv1d(x, weights.conv, weights.bias, given, Seqlens.of(lengths, lengths))
        before = torch.zeros_like(history) if given is None else history
        assert agrees(got, torch.cat([formula(weights, x[a:b], before[s]) for s, (a, b) in enumerate(pairwise(cu))]))
    assert not agrees(got, torch.cat([formula(weights, x[a:b], history[s]) for s, (a, b) in enumerate(pairwise(cu))]))


def test_a_convolved_row_has_the_same_bits_cut_anywhere_in_any_company_and_by_vllms_decode(weights: Weights) -> None:
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    x = torch.randn(19, C)
    conv = lambda rows, history, lengths: triton_set.causal_conv1d(rows, weights.conv, weights.bias, history, Seqlens.of(lengths, lengths))
    want, padded = conv(x, None, [19]), torch.cat([torch.zeros(W - 1, C), x])
    for cut in (1, 2, 7, 8, 9, 16):
        assert torch.equal(bits(conv(x[cut:], padded[None, cut : cut + W - 1], [19 - cut])), bits(want[cut:]))
    histories = torch.stack([padded[t : t + W - 1] for t in range(19)])
    assert torch.equal(bits(conv(x, histories, [1] * 19)), bits(want))
    state = torch.cat([torch.zeros(1, W - 1, C), histories]).transpose(1, 2)
    slots = torch.arange(1, 20, dtype=torch.int32)
    update = causal_conv1d_update(x.clone(), state, weights.conv, weights.bias, "silu", conv_state_indices=slots)
    assert torch.equal(bits(update), bits(want))


# The engine's steps with these kernels.


def mixer(w: Weights) -> replay.Mixer:
    return replay.Mixer(w.conv, w.bias, w.A, w.D, w.dt_bias, SHAPE)


def pages(count: int) -> replay.Pages:
    shapes = (W - 1, C), (SHAPE.heads, SHAPE.head_dim, SHAPE.state), (L, C), (L, SHAPE.heads)
    return replay.Pages(*(torch.full((count, *shape), torch.nan) for shape in shapes))


def prefilled(w: Weights, held: replay.Pages, slot: int, computed: int, xbc: Tensor, dt: Tensor) -> Tensor:
    pieces = replay.Pieces.of([computed], [len(xbc)], L, "cpu")
    return replay.prefill(triton_set, mixer(w), held, torch.tensor([slot]), pieces, xbc, dt)


@pytest.mark.parametrize("prompt", [0, L - 2, L])
def test_decode_steps_of_fixed_size_have_the_bits_of_the_prefill(weights: Weights, prompt: int) -> None:
    """Beside padding; three steps each, so that some fill a chunk."""
    xbc, dt = rows(prompt + 3)
    want, held = prefilled(weights, pages(2), 1, 0, xbc, dt), pages(3)
    got = [prefilled(weights, held, 2, 0, xbc[:prompt], dt[:prompt])] if prompt else []
    for t in range(prompt, prompt + 3):
        two = [torch.stack([r[t], torch.full_like(r[t], torch.nan)]) for r in (xbc, dt)]
        got.append(replay.decode(triton_set, mixer(weights), held, torch.tensor([2, 0]), torch.tensor([t, 0]), *two)[:1])
    assert torch.equal(bits(torch.cat(got)), bits(want))


def test_rows_after_the_new_one_that_are_not_zeros_do_not_change_its_bits(weights: Weights) -> None:
    """More than the engine relies on: it gives zeros."""
    xbc, dt = rows(L)
    whole = scan(weights, xbc, dt, [L])[0]
    xbc[40:], dt[40:] = torch.randn(L - 40, C), torch.randn(L - 40, SHAPE.heads)
    other = scan(weights, xbc, dt, [L])[0]
    assert torch.equal(bits(other[:40]), bits(whole[:40])) and not torch.equal(bits(other[40:]), bits(whole[40:]))


def test_a_prefill_in_pieces_has_the_bits_of_the_whole(weights: Weights) -> None:
    xbc, dt = rows(TOTAL)
    want, held, got = prefilled(weights, pages(2), 1, 0, xbc, dt), pages(2), []
    for start, stop in pairwise([0, 2, L - 1, L + 3, 2 * L, TOTAL]):
        got.append(prefilled(weights, held, 1, start, xbc[start:stop], dt[start:stop]))
    assert torch.equal(bits(torch.cat(got)), bits(want))


# Metadata.


@pytest.mark.parametrize("lengths", [[1], [L], [L] * 3, [L + 1], LENGTHS, [3, 3, 3], [5 * L, 1, L, 2]], ids=str)
def test_chunks_are_those_of_vllms_rule_and_some_empty_ones(lengths: list[int]) -> None:
    from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder

    cu = cumulative_lengths(lengths)
    starts, sequence, last = BaseMambaAttentionMetadataBuilder._compute_chunk_metadata(
        None, L, len(lengths), torch.zeros(len(lengths), dtype=torch.int32), cu
    )
    got = mamba.chunks_of(cu, max(lengths), sum(lengths), L)
    assert got.starts[: len(starts)].tolist() == starts and set(got.starts[len(starts) :].tolist()) <= {sum(lengths)}
    assert got.sequence[: len(sequence)].tolist() == sequence and set(got.sequence[len(sequence) :].tolist()) <= {len(lengths) - 1}
    assert got.last.tolist() == last and len(got.starts) == len(got.sequence) + 1 and {t.dtype for t in got} == {torch.int32}


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [8], [9], [1, 16, 17, 8, 3]], ids=str)
def test_programs_of_the_convolution_are_vllms(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import utils

    monkeypatch.setattr(utils, "PIN_MEMORY", False)
    monkeypatch.setattr(utils, "np_to_pinned_tensor", torch.from_numpy)
    seqlens = Seqlens.of(lengths, lengths)
    held, batch, offset = utils.compute_causal_conv1d_metadata(seqlens.cu_q, device=torch.device("cpu"))
    got, count = mamba._conv_programs(seqlens, sum(lengths)), held[8]["tot"]
    assert got.batch_ptr[:count].tolist() == batch[:count].tolist()
    assert got.token_chunk_offset_ptr[:count].tolist() == offset[:count].tolist()
    assert set(got.batch_ptr[count:].tolist()) <= {-1} and got.nums_dict[8]["tot"] == len(got.batch_ptr) >= count


# Norm, tiles.


@pytest.mark.parametrize("groups", [1, 4])
def test_the_gated_norm_agrees_with_the_formula(groups: int) -> None:
    x, gate, weight = torch.randn(7, 96), torch.randn(7, 96), 1 + 0.1 * torch.randn(96)
    gated = (x.double() * F.silu(gate.double())).unflatten(1, (groups, -1))
    want = (gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + 1e-5)).flatten(1).float() * weight
    assert agrees(triton_set.gated_rms_norm(x, gate, weight, groups, 1e-5), want)
    assert not agrees(triton_set.gated_rms_norm(x, gate, weight, 2, 1e-5), want)
    assert row_violations(lambda a, g: triton_set.gated_rms_norm(a, g, weight, groups, 1e-5), x, gate) == []


def test_every_kernel_of_the_scan_has_one_configuration() -> None:
    from importlib import import_module

    from triton.runtime.autotuner import Autotuner

    mamba.pin_autotuners()
    every = [import_module(f"vllm.model_executor.layers.mamba.ops.{name}") for name in (*mamba.SCAN_KERNELS, "ssd_combined")]
    tuned = {id(kernel): kernel for module in every for kernel in vars(module).values() if isinstance(kernel, Autotuner)}
    assert len(tuned) == 5 and all(len(kernel.configs) == 1 for kernel in tuned.values())


def test_tiles_that_were_chosen_by_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.mamba.ops.ssd_bmm import _bmm_chunk_fwd_kernel

    monkeypatch.setitem(_bmm_chunk_fwd_kernel.cache, ("a shape",), _bmm_chunk_fwd_kernel.configs[0])
    with pytest.raises(InputError, match="_bmm_chunk_fwd_kernel has chosen its tiles"):
        mamba.pin_autotuners.__wrapped__()
