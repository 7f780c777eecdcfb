"""Mamba-2's mixer: one projection to gate, scan input and time steps, a short convolution, the scan, a gated norm, a projection back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lite.errors import InputError
from lite.primitive.kernels.visible import SSDShape
from lite.primitive.modules.context import SequenceContext
from lite.primitive.modules.linear import Linear
from lite.primitive.ops.bridges import Ops


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    shape: SSDShape
    conv_width: int
    conv_bias: bool
    proj_bias: bool

    def __post_init__(self) -> None:
        if self.shape.heads % self.shape.groups:
            raise InputError(
                "config.json", f"{self.shape.heads} Mamba heads cannot share {self.shape.groups} groups", "correct one of them"
            )

    @property
    def inner(self) -> int:
        """Channels of the gate, and of x in the scan."""
        return self.shape.heads * self.shape.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x | B | C."""
        return self.inner + 2 * self.shape.groups * self.shape.state


class Decay(nn.Module):
    """A_log[heads] is fp32 in every model dtype, as inference holds A: a checkpoint may keep it so, and bf16 would swallow small steps."""

    def __init__(self, heads: int, ops: Ops):
        super().__init__()
        self.ops = ops
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))

    def forward(self) -> Tensor:
        """-> A[heads] fp32."""
        return self.ops.ssm_decay(self.A_log)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """A cast of the model moves it to the device, and leaves its dtype."""
        return super()._apply(lambda t: t.to(fn(t).device), recurse)


class Mamba2Mixer(nn.Module):
    """layer: the index under which the sequence context keeps this layer's convolution and scan."""

    def __init__(self, layer: int, hidden: int, config: Mamba2Config, norm_eps: float, ops: Ops, dtype: torch.dtype):
        super().__init__()
        c = self.config = config
        self.layer, self.ops, self.norm_eps = layer, ops, norm_eps

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype))

        self.in_proj = Linear(hidden, c.inner + c.channels + c.shape.heads, ops, dtype, bias=c.proj_bias)  # gate | x|B|C | dt
        self.conv_weight = parameter(c.channels, c.conv_width)
        self.conv_bias = parameter(c.channels) if c.conv_bias else None
        self.decay = Decay(c.shape.heads, ops)
        self.D, self.dt_bias = parameter(c.shape.heads), parameter(c.shape.heads)
        self.norm_weight = parameter(c.inner)
        self.out_proj = Linear(c.inner, hidden, ops, dtype, bias=c.proj_bias)

    def forward(self, x: Tensor, context: SequenceContext, cos_sin: Tensor | None) -> Tensor:
        """x[T, hidden] -> [T, hidden]. Positions play no part."""
        c, ops = self.config, self.ops
        gate, xbc, dt = self.in_proj(x).split([c.inner, c.channels, c.shape.heads], dim=-1)
        history = context.conv_history(self.layer, xbc, c.conv_width)
        xbc = ops.causal_conv1d(xbc, self.conv_weight, self.conv_bias, history, context.seqlens)
        xbc, dt, before, seqlens = context.extend_scan(self.layer, xbc, dt, c.shape.chunk)
        y, boundary = ops.ssd_scan(xbc, dt, self.decay(), self.D, self.dt_bias, before, seqlens, c.shape)
        context.keep_boundary(self.layer, boundary)
        return self.out_proj(ops.gated_rms_norm(y, gate, self.norm_weight, c.shape.groups, self.norm_eps))
