"""RMSNorm, alone or with the residual addition before it."""

import torch
from torch import Tensor, nn

from lite.primitive.ops.bridges import Ops


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, ops: Ops, dtype: torch.dtype):
        super().__init__()
        self.ops, self.eps = ops, eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x[..., size] normalised over its last axis."""
        return self.ops.rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view_as(x)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), both [T, size]; residual None: nothing comes before x."""
        if residual is None:
            return self(x), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)
