"""The router of a mixture of experts: logits at one tier for any number of tokens, and vLLM's own top-k.

vLLM's `GateLinear` chooses among six kernels by the number of rows and by what is installed (cuteDSL below 17 rows, for one); the plugin
makes it call `router_logits`. Families whose router is an ordinary linear layer (Qwen3-MoE) never reach it.
"""

import torch
from torch import Tensor

from lite.primitive.kernels.vllm.gemm import linear


def router_logits(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """x[T, H] @ weight[E, H].T -> [T, E] in out_dtype. fp32 of bf16 operands: one product accumulated and kept in fp32 (cuBLASLt under
    batch-invariant mode); the model dtype: `linear`."""
    if out_dtype == torch.float32 and weight.dtype == torch.bfloat16:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return linear(x.to(weight.dtype), weight, None).to(out_dtype)


def topk_softmax(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The k largest of softmax(logits[T, E]) -> (weights[T, k] fp32, expert ids[T, k] int32), largest first; renormalize divides the
    weights by their sum."""
    from vllm import _custom_ops as ops

    shape = (logits.shape[0], k)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids, rows = (torch.empty(shape, dtype=torch.int32, device=logits.device) for _ in range(2))
    ops.topk_softmax(weights, ids, rows, logits, renormalize)
    return weights, ids


def grouped_topk(logits: Tensor, bias: Tensor, k: int, groups: int, topk_groups: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """See `VisibleKernels.grouped_topk`: vLLM's fused kernel, which applies the sigmoid itself. vLLM chooses its ungrouped kernel where the
    experts cannot be grouped and for one group of weights that are not renormalized, and so it is here."""
    from vllm import _custom_ops as ops

    experts, one_group = logits.shape[1], groups <= 1 and topk_groups <= 1
    if experts > groups and experts % groups == 0 and (renormalize or not one_group):
        sigmoid = 1
        return ops.grouped_topk(logits, groups, topk_groups, k, renormalize, 1.0, bias, sigmoid)
    shape = (logits.shape[0], k)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids, rows = (torch.empty(shape, dtype=torch.int32, device=logits.device) for _ in range(2))
    ops.topk_sigmoid(weights, ids, rows, logits, renormalize, bias, 1.0)
    return weights, ids
