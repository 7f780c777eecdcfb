"""The reference GEMM: fp32, always called at one tile of rows, so that a row's bits cannot depend on the number of rows.

A BLAS picks its blocking by the shape of the call: on CPUs of today rows of a call with fewer than 8 rows differ in the last bit from
the same rows in a larger call. One fixed shape leaves it nothing to choose by. What remains to be true of the machine (a row's bits do
not depend on its place in the tile) is the probe's to check.
"""

import torch
from torch import Tensor

ROWS = 32


def gemm(x: Tensor, weight: Tensor) -> Tensor:
    """x[M, K] @ weight[N, K].T in fp32, in calls of exactly ROWS rows; the last tile is padded with zero rows."""
    M, K = x.shape
    tiles = -(-M // ROWS)
    padded = x if tiles * ROWS == M else torch.cat([x, x.new_zeros(tiles * ROWS - M, K)])
    padded = padded.contiguous()
    if padded.data_ptr() % 64:  # a BLAS may treat the ends of rows apart where they do not start on a cache line
        padded = padded.clone()
    out = x.new_empty(tiles * ROWS, weight.shape[0])
    weight_t = weight.t()
    for tile in range(0, tiles * ROWS, ROWS):
        torch.mm(padded[tile : tile + ROWS], weight_t, out=out[tile : tile + ROWS])
    return out[:M]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `VisibleKernels.linear`. bf16 operands are widened first: their products are exact in fp32."""
    y = gemm(x.float(), weight.float()).to(x.dtype)
    return y if bias is None else y + bias
