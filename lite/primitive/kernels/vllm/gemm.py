"""Linear as vLLM runs it in batch-invariant mode, and the faster kernel that stands in for it where both give the same bits.

vLLM's Triton matmul has one tile for any number of rows, which makes a row's bits independent of its company. cuBLASLt, held to the
one workspace that this mode allows it, cannot split a sum either. On an H200 it gave the same bits at every shape tried, and its kernels
took 1.1 to 7 times less time, most at few rows: there a tile of 128 rows is idle for the most part. So it stands in wherever
`differing_rows` has found no difference, in the trainer and, through the plugin, in the engine; see `_pays` for the exception.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lite.primitive.compare import bits

TILE, PROCESSORS = 128, 132  # rows and columns of the Triton kernel's tile; multiprocessors of an H200
FEW = (*range(1, 19), 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 511, 513, 777, 1023, 1024)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `VisibleKernels.linear`."""
    if x.is_cuda and _stands_in(x, weight) and _pays(x.shape[0], *weight.shape):
        y = F.linear(x, weight)
        return y if bias is None else y + bias
    return triton_linear(x, weight, bias)


def triton_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from vllm.model_executor.layers.batch_invariant import linear_batch_invariant

    return linear_batch_invariant(x, weight, bias)


def _stands_in(x: Tensor, weight: Tensor) -> bool:
    up_to = max(max(FEW), 1 << (x.shape[0] - 1).bit_length())
    return differing_rows(*weight.shape, x.dtype, x.device, up_to) is None


def _pays(rows: int, outputs: int, inputs: int) -> bool:
    """In a graph only the device's time counts. Outside, torch takes the host some 80 us to choose a cuBLASLt kernel, which is what
    the Triton kernel takes for 8,000 inputs in each of its rounds over the multiprocessors."""
    tiles = -(-rows // TILE) * -(-outputs // TILE)
    return torch.cuda.is_current_stream_capturing() or -(-tiles // PROCESSORS) * inputs >= 8000


@lru_cache(maxsize=1024)
def differing_rows(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, up_to: int) -> int | None:
    """The first number of rows at which cuBLASLt and the Triton kernel differ for weight[outputs, inputs], of FEW and of some in each
    doubling up to up_to; None where they agree. A property of the machine, found when first asked for (some ms) and kept."""
    if up_to > max(FEW) and (fewer := differing_rows(outputs, inputs, dtype, device, up_to // 2)) is not None:
        return fewer
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator, device=device, dtype=dtype).mul_(inputs**-0.5)
    # columns that differ in size, as a residual stream's do: they show another order of summation sooner than equal ones
    spread = torch.logspace(-1, 1, inputs, device=device).to(dtype)
    x = torch.randn(up_to, inputs, generator=generator, device=device, dtype=dtype).mul_(spread)
    for rows in FEW if up_to == max(FEW) else (up_to // 2 + 1, up_to * 3 // 4 + 1, up_to - 1, up_to):
        if (bits(F.linear(x[:rows], weight)) != bits(triton_linear(x[:rows], weight, None))).any():
            return rows
    return None
