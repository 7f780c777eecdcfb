"""The gated MLP: down(silu(gate(x)) * up(x)), gate and up as one projection."""

import torch
from torch import Tensor, nn

from lite.primitive.modules.linear import Linear
from lite.primitive.ops.bridges import Ops


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int, ops: Ops, dtype: torch.dtype, bias: bool = False):
        super().__init__()
        self.ops = ops
        self.gate_up = Linear(hidden, 2 * intermediate, ops, dtype, bias=bias)
        self.down = Linear(intermediate, hidden, ops, dtype, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.ops.swiglu(self.gate_up(x)))
