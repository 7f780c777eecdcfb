"""Embedding, rotary and SwiGLU as vLLM runs them in batch-invariant mode.

Rotary is vLLM's CUDA kernel, in place there and on copies here; it rounds products to the model dtype as that kernel does.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(ids, weight)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    from vllm import _custom_ops as ops

    q_out, k_out = (t.flatten(1).clone() for t in (q, k))
    ops.rotary_embedding(positions, q_out, k_out, q.shape[-1], cos_sin, True)
    return q_out.view(q.shape), k_out.view(k.shape)


def swiglu(gate_up: Tensor) -> Tensor:
    import vllm._custom_ops  # noqa: F401  (registers torch.ops._C)

    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    torch.ops._C.silu_and_mul(out, gate_up)
    return out
