"""Linear and embedding: parameters that one visible kernel reads."""

import torch
from torch import Tensor, nn

from lite.primitive.ops.bridges import Ops


class Linear(nn.Module):
    """y = x W^T + b. Fused projections (q|k|v, gate|up) are one Linear with their rows in that order."""

    def __init__(self, inputs: int, outputs: int, ops: Ops, dtype: torch.dtype, bias: bool = False):
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    def __init__(self, rows: int, size: int, ops: Ops, dtype: torch.dtype):
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(rows, size, dtype=dtype))

    def forward(self, ids: Tensor) -> Tensor:
        return self.ops.embedding(ids, self.weight)
