"""What a layer does to each token by itself: down(silu(gate(x)) * up(x)), or down(relu(up(x))^2)."""

import torch
from torch import Tensor, nn

from lite.primitive.modules.linear import Linear
from lite.primitive.ops.bridges import Ops


class GatedMLP(nn.Module):
    """gate and up are one projection."""

    def __init__(self, hidden: int, intermediate: int, ops: Ops, dtype: torch.dtype, bias: bool = False):
        super().__init__()
        self.ops = ops
        self.gate_up = Linear(hidden, 2 * intermediate, ops, dtype, bias=bias)
        self.down = Linear(intermediate, hidden, ops, dtype, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.ops.swiglu(self.gate_up(x)))


class MLP(nn.Module):
    """The squared-relu MLP, without a gate."""

    def __init__(self, hidden: int, intermediate: int, ops: Ops, dtype: torch.dtype):
        super().__init__()
        self.ops = ops
        self.up = Linear(hidden, intermediate, ops, dtype)
        self.down = Linear(intermediate, hidden, ops, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.ops.relu2(self.up(x)))
