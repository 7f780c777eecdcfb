"""Reference router and routed experts.

The tokens of each expert are put into blocks of ROWS rows, padded with zero rows, and a block is one product of a fixed shape, as a tile
of `gemm` is: a row's bits depend on its own data and its expert's, not on how many tokens chose that expert nor on where they stand.

Ties: of equal scores the lower expert (and the lower group) comes first, as in vLLM's kernels; `topk` of ATen promises no order.
"""

import torch
from torch import Tensor

from lite.primitive.kernels.reference.gemm import ROWS, gemm
from lite.primitive.kernels.reference.pointwise import relu2, swiglu, tree_sum


def router_logits(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    return gemm(x.float(), weight.float()).to(out_dtype)


def topk_softmax(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    z = logits.float()
    weights = torch.exp(z - z.amax(-1, keepdim=True))
    weights = weights / tree_sum(weights)[:, None]
    ids = _largest(z, k)
    chosen = weights.gather(1, ids)
    if renormalize:
        chosen = chosen / tree_sum(chosen)[:, None]
    return chosen, ids.int()


def grouped_topk(logits: Tensor, bias: Tensor, k: int, groups: int, topk_groups: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    scores = 1.0 / (1.0 + torch.exp(-logits))
    biased = (scores + bias).unflatten(1, (groups, -1))
    best_two = biased.gather(2, _largest(biased, 2))
    outside = torch.ones(logits.shape[0], groups, dtype=torch.bool, device=logits.device)
    outside.scatter_(1, _largest(best_two[..., 0] + best_two[..., 1], topk_groups), False)
    ids = _largest(biased.masked_fill(outside[..., None], -torch.inf).flatten(1), k)
    chosen = scores.gather(1, ids)
    if renormalize:
        chosen = chosen / (tree_sum(chosen) + 1e-20)[:, None]
    return chosen, ids.int()


def _largest(x: Tensor, k: int) -> Tensor:
    """Places of the k largest along the last axis, largest first, the lower place first where values are equal."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def routed_experts(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, activation: str) -> Tensor:
    (T, H), k = x.shape, ids.shape[1]
    row, expert = _expert_blocks(ids, w13.shape[0])
    token = torch.where(row < T * k, row // k, T)
    act = {"silu": swiglu, "relu2_no_mul": relu2}[activation]

    x_pad = torch.cat([x, x.new_zeros(1, H)])
    active = act(_blockwise(x_pad[token], w13, expert).to(x.dtype))
    down = _blockwise(active, w2, expert)
    results = down.new_empty(T * k + 1, H)  # the last one takes what pads the blocks
    results[row] = down
    weighted = (results[:-1] * weights.view(-1, 1)).to(x.dtype).float().view(T, k, H)
    total = weighted[:, 0]
    for i in range(1, k):
        total = total + weighted[:, i]
    return total.to(x.dtype)


def _expert_blocks(ids: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """ids[T, k] -> the (token, choice) pairs, numbered T * k, by expert in blocks of ROWS [blocks * ROWS] (T * k where a block is
    padded) and each block's expert."""
    flat = ids.reshape(-1).long()
    order = flat.sort(stable=True).indices
    count = (flat == torch.arange(experts, device=ids.device)[:, None]).sum(1)
    blocks = (count + ROWS - 1) // ROWS
    expert = torch.repeat_interleave(torch.arange(experts, device=ids.device), blocks)
    index_in_expert = torch.arange(len(expert), device=ids.device) - (blocks.cumsum(0) - blocks)[expert]
    offset = index_in_expert[:, None] * ROWS + torch.arange(ROWS, device=ids.device)
    place = (count.cumsum(0) - count)[expert, None] + offset
    row = torch.where(offset < count[expert, None], order[place.clamp(max=len(flat) - 1)], len(flat))
    return row.view(-1), expert.tolist()


def _blockwise(x: Tensor, w: Tensor, expert: list[int]) -> Tensor:
    """x[blocks * ROWS, K], block by block, @ w[expert of the block].T -> [blocks * ROWS, N] in fp32. A loop over blocks, as `gemm` has
    one over tiles: one batched product would need a copy of its expert's weights for each block."""
    x = x.float()
    out = x.new_empty(x.shape[0], w.shape[1])
    widened: tuple[int, Tensor] = (-1, x)
    for block, e in enumerate(expert):
        if e != widened[0]:  # blocks come expert by expert
            widened = (e, w[e].float().t())
        rows = slice(block * ROWS, (block + 1) * ROWS)
        torch.mm(x[rows], widened[1], out=out[rows])
    return out
