"""Linear as vLLM runs it in batch-invariant mode, and the faster kernel that stands in for it where both give the same bits.

vLLM's Triton matmul has one tile for any number of rows, which makes a row's bits independent of its company. cuBLASLt, held to the
one workspace that this mode allows it, cannot split a sum either; it gave the same bits at every shape tried on an H200 and is faster
where there are many rows. So it stands in there, if `differing_rows` has found no difference at this shape: in the trainer and, through
the plugin, in the engine.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lite.primitive.compare import bits

MANY = 1024  # rows from which the stand-in is the faster one


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `VisibleKernels.linear`."""
    rows = x.shape[0]
    if rows >= MANY and differing_rows(*weight.shape, x.dtype, x.device, up_to=1 << (rows - 1).bit_length()) is None:
        y = F.linear(x, weight)
        return y if bias is None else y + bias
    return triton_linear(x, weight, bias)


def triton_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from vllm.model_executor.layers.batch_invariant import linear_batch_invariant

    return linear_batch_invariant(x, weight, bias)


@lru_cache(maxsize=256)
def differing_rows(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, up_to: int) -> int | None:
    """The first number of rows, of some from MANY to up_to, at which cuBLASLt and the Triton kernel differ for weight[outputs, inputs];
    None where they agree. A property of the machine, found when first asked for (some ms) and kept."""
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator, device=device, dtype=dtype).mul_(inputs**-0.5)
    # columns that differ in size, as a residual stream's do: they show another order of summation sooner than equal ones
    spread = torch.logspace(-1, 1, inputs, device=device).to(dtype)
    x = torch.randn(up_to, inputs, generator=generator, device=device, dtype=dtype).mul_(spread)
    for rows in sorted({MANY, MANY + 1, up_to * 3 // 4 + 1, up_to - 1, up_to}):
        if (bits(F.linear(x[:rows], weight)) != bits(triton_linear(x[:rows], weight, None))).any():
            return rows
    return None
