"""vLLM's unified attention over pages agrees with the reference, and a query's bits depend on nothing but its own sequence."""

import pytest
import torch
from torch import Tensor

from lite.primitive.compare import bits
from lite.primitive.kernels import reference
from lite.primitive.kernels.vllm import triton_set
from lite.primitive.kernels.vllm.attention import paged
from lite.primitive.parallel.packing import Seqlens
from tests.closeness import agrees
from tests.invariance import batch_violations, cut_violations

HEADS = [(4, 2, 64), (6, 2, 16), (2, 2, 96)]  # query heads, key heads, head size; 96 is padded to 128 in the kernel
# a whole prefill, a decode step, a chunk over cached keys, another decode step, a first token, a sequence of one whole page
QUERIES, KEYS = [11, 1, 9, 1, 1, 16], [11, 50, 42, 17, 1, 16]


def qkv(queries: int, keys: int, heads: int, kv_heads: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(queries, heads, D), torch.randn(keys, kv_heads, D), torch.randn(keys, kv_heads, D)


def mixed(heads: int, kv_heads: int, D: int) -> tuple[Tensor, Tensor, Tensor, Seqlens, float]:
    return *qkv(sum(QUERIES), sum(KEYS), heads, kv_heads, D), Seqlens.of(QUERIES, KEYS), D**-0.5


def run(*args) -> Tensor:
    return triton_set.attention(*args)[0]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_mixed_prefill_chunk_and_decode_agree_with_the_reference(heads: tuple[int, int, int]) -> None:
    args = mixed(*heads)
    assert agrees(run(*args).flatten(1), reference.attention(*args)[0].flatten(1))


def test_a_wrong_mask_sequence_head_or_scale_is_noticed() -> None:
    lengths, (q, k, v) = [9, 6], qkv(15, 16, 4, 2, 64)
    packed, scale = Seqlens.of(lengths, lengths), 0.125
    want = reference.attention(q, k[:15], v[:15], packed, scale)[0].flatten(1)
    assert agrees(run(q, k[:15], v[:15], packed, scale).flatten(1), want)
    plants = {
        "the last sequence's queries see one key too many": (q, k, v, Seqlens.of(lengths, [9, 7]), scale),
        "and one too few, the first sequence's too many": (q, k[:15], v[:15], Seqlens.of(lengths, [10, 5]), scale),
        "one query in the other sequence": (q, k[:15], v[:15], Seqlens.of([8, 7], lengths), scale),
        "one sequence": (q, k[:15], v[:15], Seqlens.of([15], [15]), scale),
        "key heads in another order": (q, k[:15].flip(1), v[:15].flip(1), packed, scale),
        "scale": (q, k[:15], v[:15], packed, scale * 1.001),
    }
    for name, args in plants.items():
        assert not agrees(run(*args).flatten(1), want), name


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_chunks_and_decode_have_the_bits_of_the_prefill(heads: tuple[int, int, int]) -> None:
    """Cut inside and at the ends of a page of 16 and of a tile of 32 keys."""
    assert cut_violations(run, *qkv(36, 36, *heads), [15, 16, 33], heads[2] ** -0.5) == []


@pytest.mark.parametrize("heads", HEADS[:2], ids=str)
def test_a_sequence_has_the_same_bits_in_any_batch(heads: tuple[int, int, int]) -> None:
    lengths = [1, 17, 7]
    assert batch_violations(run, *qkv(sum(lengths), sum(lengths), *heads), lengths, heads[2] ** -0.5) == []


def test_the_page_size_does_not_change_the_bits() -> None:
    args = mixed(4, 2, 64)
    want = bits(triton_set.paged_attention(*args, 16)[0])
    for page in (8, 64):
        assert torch.equal(bits(triton_set.paged_attention(*args, page)[0]), want), page


def unified(q: Tensor, cache: tuple[Tensor, Tensor, Tensor, Tensor], cu_q: Tensor, scale: float, **split: object) -> Tensor:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    keys, values, table, lengths = cache
    out = torch.full_like(q, torch.nan)
    unified_attention(
        q, keys, values, out, cu_q, int(cu_q.diff().max()), lengths, int(lengths.max()), scale, True, (-1, -1), table,
        0.0, None, None, None, **split,
    )  # fmt: skip
    return out


def scattered(cache: tuple[Tensor, Tensor, Tensor, Tensor], stale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same keys in pages at other places of a larger cache; what no sequence wrote holds `stale`."""
    keys, values, table, lengths = cache
    page = keys.shape[1]
    place = torch.randperm(2 * len(keys))[: len(keys)]
    new_keys, new_values = (torch.full((2 * len(keys), *t.shape[1:]), stale) for t in (keys, values))
    for sequence, length in enumerate(lengths.tolist()):
        for i in range(-(-length // page)):
            old, filled = table[sequence, i], min(page, length - i * page)
            new_keys[place[old], :filled], new_values[place[old], :filled] = keys[old, :filled], values[old, :filled]
    return new_keys, new_values, place[table.long()].int(), lengths


@pytest.mark.parametrize("stale", [1e30, float("nan")])
def test_the_places_of_pages_and_what_lies_past_a_sequence_do_not_change_the_bits(stale: float) -> None:
    """The wrapper lays pages out in order and clears them; the engine does neither."""
    q, k, v, seqlens, scale = mixed(4, 2, 64)
    cache, cu_q = paged(k, v, seqlens, 16), seqlens.cu_q
    want = bits(run(q, k, v, seqlens, scale))
    keys, values, table, lengths = scattered(cache, stale)
    assert torch.equal(bits(unified(q, (keys, values, table, lengths), cu_q, scale)), want)
    table[2, [0, 1]] = table[2, [1, 0]]
    assert not torch.equal(bits(unified(q, (keys, values, table, lengths), cu_q, scale)), want), "two exchanged pages must be noticed"


def split_decode(q: Tensor, k: Tensor, v: Tensor, seqlens: Seqlens, scale: float) -> Tensor:
    """What vLLM does outside batch-invariant mode: in a batch of decode steps the keys are split into segments that are merged."""
    segments, batch, heads, D = 4, len(seqlens.cu_q) - 1, q.shape[1], q.shape[2]
    buffers = {name: torch.zeros(batch, heads, segments) for name in ("softmax_segm_max", "softmax_segm_expsum")}
    buffers["softmax_segm_output"] = torch.zeros(batch, heads, segments, D)
    return unified(q, paged(k, v, seqlens, 16), seqlens.cu_q, scale, seq_threshold_3D=8, num_par_softmax_segments=segments, **buffers)


def test_batch_invariant_mode_forbids_splitting_the_keys_of_a_decode_step() -> None:
    assert cut_violations(split_decode, *qkv(70, 70, 4, 2, 64), [64], 0.125) == []


@pytest.mark.usefixtures("split_keys_allowed")
def test_a_decode_step_with_split_keys_is_caught() -> None:
    q, k, v = qkv(70, 70, 4, 2, 64)
    decode = q[-1:], k, v, Seqlens.of([1], [70]), 0.125
    assert agrees(split_decode(*decode).flatten(1), reference.attention(*decode)[0].flatten(1)), "right, but in another order"
    assert cut_violations(split_decode, q, k, v, [64], 0.125) == ["decode at 64"]
