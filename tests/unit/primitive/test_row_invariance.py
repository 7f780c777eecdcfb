"""A token's bytes do not depend on its company: alone, batched, permuted, cut into chunks, decoded; and the check can fail."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lite.primitive.kernels import reference
from lite.primitive.kernels.reference.pointwise import tree_sum
from lite.primitive.parallel.packing import Seqlens
from tests.invariance import batch_violations, cut_violations, row_violations

DTYPES = [torch.float32, torch.bfloat16]
HEADS = [(4, 2), (9, 3), (2, 2), (3, 1)]  # grouped, and each query head with its own or the only key head
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.usefixtures("all_threads")
@both_dtypes
@pytest.mark.parametrize("K", [64, 257])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype: torch.dtype, K: int, bias: bool) -> None:
    x, weight = torch.randn(40, K, dtype=dtype), torch.randn(75, K).mul(K**-0.5).to(dtype)
    b = torch.randn(75).to(dtype) if bias else None
    assert row_violations(lambda rows: reference.linear(rows, weight, b), x) == []


@pytest.mark.usefixtures("all_threads")
@both_dtypes
@pytest.mark.parametrize("H", [32, 83, 128])
def test_norms(dtype: torch.dtype, H: int) -> None:
    x, residual, weight = torch.randn(40, H, dtype=dtype), torch.randn(40, H, dtype=dtype), (1 + 0.1 * torch.randn(H)).to(dtype)
    assert row_violations(lambda rows: reference.rms_norm(rows, weight, 1e-5), x) == []
    assert row_violations(lambda a, b: reference.add_rms_norm(a, b, weight, 1e-5), x, residual) == []


@pytest.mark.slow
@pytest.mark.usefixtures("all_threads")
def test_sums_over_rows_long_enough_to_be_split_over_threads() -> None:
    """From 32,768 elements on, ATen splits the sum of a lone row; of two rows it gives each thread one."""
    x, weight = torch.randn(16, 33_000), torch.ones(33_000)
    assert row_violations(tree_sum, x) == []
    assert row_violations(lambda rows: reference.rms_norm(rows, weight, 1e-5), x) == []
    expect_caught(row_violations(lambda rows: rows.sum(-1), x), "sum")


@both_dtypes
@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("D", [16, 64, 128])
def test_rotary(dtype: torch.dtype, heads: int, kv_heads: int, D: int) -> None:
    q, k, positions = torch.randn(19, heads, D, dtype=dtype), torch.randn(19, kv_heads, D, dtype=dtype), torch.randint(0, 64, (19,))
    angles = torch.rand(64, D // 2) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
    assert row_violations(lambda *rows: reference.rotary(*rows, cos_sin), q, k, positions) == []


@pytest.mark.usefixtures("all_threads")
@both_dtypes
@pytest.mark.parametrize("size", [7, 19, 48, 100])
def test_swiglu(dtype: torch.dtype, size: int) -> None:
    assert row_violations(reference.swiglu, torch.randn(40, 2 * size, dtype=dtype) * 2) == []


@both_dtypes
def test_embedding(dtype: torch.dtype) -> None:
    weight = torch.randn(50, 24).to(dtype)
    assert row_violations(lambda ids: reference.embedding(ids, weight), torch.randint(0, 50, (40,))) == []


@pytest.mark.usefixtures("all_threads")
@both_dtypes
def test_token_logprobs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference.head, "VOCAB_CHUNK", 128)
    weight = torch.randn(300, 48).mul(48**-0.5 * 3).to(dtype)
    rows = torch.randn(40, 48, dtype=dtype), torch.randint(0, 290, (40,)), 0.5 + torch.rand(40)
    assert row_violations(lambda x, labels, t: reference.token_logprobs(x, weight, labels, t, 290, True), *rows) == []


def qkv(n: int, heads: int, kv_heads: int, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(n, heads, D, dtype=dtype), torch.randn(n, kv_heads, D, dtype=dtype), torch.randn(n, kv_heads, D, dtype=dtype)


@both_dtypes
@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("D", [16, *(pytest.param(D, marks=pytest.mark.slow) for D in (64, 128))])
def test_attention_cut_at_every_place(dtype: torch.dtype, heads: int, kv_heads: int, D: int) -> None:
    """70 tokens: past one tile of 64 keys."""
    assert cut_violations(reference.attention, *qkv(70, heads, kv_heads, D, dtype), list(range(1, 70)), D**-0.5) == []


@both_dtypes
def test_attention_cut_around_its_tiles(dtype: torch.dtype) -> None:
    """Four tiles of keys, cut around the multiples of the tile sizes, where an off-by-one would show."""
    cuts = sorted({c + d for c in (8, 64, 128, 192) for d in (-1, 0, 1)} | {199})
    assert cut_violations(reference.attention, *qkv(200, 4, 2, 16, dtype), cuts, 0.25) == []


@pytest.mark.usefixtures("all_threads")
@both_dtypes
@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_attention_of_packed_sequences(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    lengths = [1, 7, 8, 9, 64, 65, 130, 1]
    assert batch_violations(reference.attention, *qkv(sum(lengths), heads, kv_heads, 16, dtype), lengths, 0.25) == []


def test_attention_ignores_what_its_mask_hides() -> None:
    """Later keys and other sequences may hold anything, huge numbers too; a query's bytes stay."""
    q, k, v = qkv(40, 4, 2, 16, torch.float32)
    seqlens = Seqlens.of([40], [40])
    before = reference.attention(q, k, v, seqlens, 0.25)[0][:20]
    k[20:], v[20:] = 1e30, -1e30
    after = reference.attention(q, k, v, seqlens, 0.25)[0][:20]
    assert torch.equal(before, after)


def expect_caught(violations: list[str], what: str) -> None:
    if not violations:
        pytest.skip(f"on this CPU {what} happens to be row-invariant, so it is no planted error here")
    assert violations


def test_a_plain_matrix_product_is_caught() -> None:
    """F.linear picks its blocking by the number of rows."""
    x, weight = torch.randn(32, 256), torch.randn(100, 256) / 16
    found = row_violations(lambda rows: F.linear(rows, weight), x)
    expect_caught([name for name in found if name in ("row 0 alone", "first 3", "first 5", "first 7")], "F.linear")


@pytest.mark.parametrize("size", [7, 19, 33, 100])
def test_a_plain_silu_is_caught(size: int) -> None:
    """F.silu has another formula for the elements that do not fill a vector register (sizes that are no multiple of 16)."""
    expect_caught(row_violations(F.silu, torch.randn(200, size)), "F.silu")


def test_a_plain_mean_norm_is_caught() -> None:
    """Not of rows but of companies: a norm over the batch makes every row depend on the others."""
    assert row_violations(lambda x: x * torch.rsqrt(x.square().mean()), torch.randn(20, 32))


def untiled_attention(q: Tensor, k: Tensor, v: Tensor, seqlens: Seqlens, scale: float) -> tuple[Tensor, ...]:
    """Right, and of the shape of its call."""
    out, (cu_q, cu_k, *_) = [], seqlens
    for i in range(len(cu_q) - 1):
        q_i, k_i, v_i = q[cu_q[i] : cu_q[i + 1]], k[cu_k[i] : cu_k[i + 1]], v[cu_k[i] : cu_k[i + 1]]
        group = q.shape[1] // k.shape[1]
        k_i, v_i = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (k_i, v_i))
        mask = torch.ones(len(q_i), k_i.shape[1], dtype=torch.bool).tril(k_i.shape[1] - len(q_i))
        out.append(F.scaled_dot_product_attention(q_i.transpose(0, 1), k_i, v_i, attn_mask=mask, scale=scale).transpose(0, 1))
    return (torch.cat(out),)


def test_an_attention_without_fixed_tiles_is_caught() -> None:
    q, k, v = qkv(70, 4, 2, 64, torch.float32)
    seqlens = Seqlens.of([70], [70])
    torch.testing.assert_close(untiled_attention(q, k, v, seqlens, 0.125)[0], reference.attention(q, k, v, seqlens, 0.125)[0])
    expect_caught(cut_violations(untiled_attention, q, k, v, list(range(1, 70)), 0.125), "scaled_dot_product_attention")


def test_an_attention_that_sees_across_sequences_is_caught() -> None:
    def leaky(q: Tensor, k: Tensor, v: Tensor, seqlens: Seqlens, scale: float) -> tuple[Tensor, ...]:
        return reference.attention(q, k, v, Seqlens.of([len(q)], [len(k)]), scale)

    assert batch_violations(leaky, *qkv(14, 4, 2, 16, torch.float32), [5, 9], 0.25)
