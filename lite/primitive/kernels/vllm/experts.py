"""Routed experts as both processes compute them: vLLM's two grouped Triton GEMMs, always over aligned tokens, and its sum.

vLLM itself takes a second form, a block a token, where a batch has few tokens for its experts. Here every batch is aligned, so the form
does not depend on the batch; the plugin makes the engine call this function. The tile is the one that batch-invariant mode fixes.
"""

from typing import Any

import torch
from torch import Tensor


def routed_experts(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, activation: str) -> Tensor:
    """sum over k of weights[T, k] * expert[ids[T, k]](x[T, H]) -> [T, H].

    w13[E, G, H] and w2[E, H, F]: G = 2F and gate | up for "silu", G = F for "relu2_no_mul". Each product is accumulated in fp32 and rounded
    to the model dtype; the second is multiplied by its weight before it is rounded; the k results are added in the order of k.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
    from vllm.model_executor.layers.fused_moe.fused_moe import get_default_config
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    (tokens, hidden), (experts, up_size, _), k = x.shape, w13.shape, ids.shape[1]
    config = get_default_config(tokens, experts, w2.shape[2], hidden, k, None)
    blocks = moe_align_block_size(ids, config["BLOCK_SIZE_M"], experts, None)

    up = x.new_empty(tokens, k, up_size)
    _grouped_gemm(x, w13, up, None, blocks, k, config)
    active = x.new_empty(tokens * k, w2.shape[2])
    apply_moe_activation(MoEActivation.from_str(activation), active, up.view(tokens * k, up_size))
    down = x.new_empty(tokens, k, hidden)
    _grouped_gemm(active, w2, down, weights, blocks, 1, config)
    out = torch.empty_like(x)
    ops.moe_sum(down, out)
    return out


def _grouped_gemm(a: Tensor, w: Tensor, out: Tensor, weights: Tensor | None, blocks: Any, k: int, config: dict[str, int]) -> None:
    """Row i of a times w[expert of its block].T into out, times its weight where weights are given; k rows of out share a row of a."""
    from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel
    from vllm.triton_utils import tl

    sorted_ids, expert_ids, padded = blocks
    invoke_fused_moe_triton_kernel(
        a, w, out, None, None, weights, sorted_ids, expert_ids, padded, weights is not None, k, config,
        compute_type={torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[a.dtype], use_fp8_w8a8=False, use_int8_w8a8=False,
        use_int8_w8a16=False, use_int4_w4a16=False, per_channel_quant=False,
    )  # fmt: skip
