"""Agreement of two kernels that add the same numbers in another order."""

import torch
from torch import Tensor

# Set beforehand: fp32 rounds by up to 6e-8, and sums of a few thousand terms in another order differ by tens of roundings at most.
FP32_LIMIT = 1e-5


def row_error(got: Tensor, want: Tensor) -> float:
    """The largest difference within a row (last axis) over that row's largest value, in the worst row; infinity where a NaN is."""
    assert got.shape == want.shape and got.numel(), (got.shape, want.shape)
    error = (got.double() - want.double()).abs().amax(-1) / want.double().abs().amax(-1)
    return float(torch.nan_to_num(error, nan=torch.inf).max())


def agrees(got: Tensor, want: Tensor) -> bool:
    return row_error(got, want) <= FP32_LIMIT
