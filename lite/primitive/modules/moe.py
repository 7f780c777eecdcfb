"""Mixtures of experts: a router chooses k experts for each token; their outputs come back as one weighted sum, beside shared experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lite.errors import InputError
from lite.primitive.modules.linear import Linear
from lite.primitive.modules.mlp import MLP
from lite.primitive.ops.bridges import Ops


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """router "softmax": logits in the model dtype, the k most probable. "sigmoid": fp32 logits, chosen by score and a frozen bias, inside
    the topk_groups best of `groups` groups. activation: as `routed_experts` has it. scale: of the routed sum. shared: the intermediate size
    of the shared experts, None where there are none."""

    experts: int
    k: int
    intermediate: int
    router: Literal["softmax", "sigmoid"]
    activation: Literal["silu", "relu2_no_mul"]
    renormalize: bool
    groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0
    shared: int | None = None

    def __post_init__(self) -> None:
        if self.experts % self.groups or self.topk_groups > self.groups:
            raise InputError("config.json", f"{self.topk_groups} of {self.groups} groups of {self.experts} experts", "correct one of them")
        if self.groups > 1 and self.experts < 2 * self.groups:
            raise InputError("config.json", f"{self.experts} experts in {self.groups} groups: each needs two", "correct one of them")
        among = self.experts // self.groups * self.topk_groups
        if self.k > among:
            raise InputError("config.json", f"a token cannot have {self.k} of {among} experts", "correct num_experts_per_tok")

    @property
    def up_rows(self) -> int:
        """Rows of an expert's first projection: gate | up, or up alone."""
        return 2 * self.intermediate if self.activation == "silu" else self.intermediate


def replayed(routes: Tensor, live: Tensor) -> Tensor:
    """The experts to run, [T, k] int32: those recorded for a token (routes[T, k], any integer), the live choice where they are -1. The
    weights come from the live logits at these ids, by ordinary autograd, which reaches ids outside the live choice as well."""
    return torch.where(routes < 0, live, routes).int()


class SoftmaxRouter(Linear):
    """weight[E, H] in the model dtype, and so are the logits."""

    def __init__(self, hidden: int, config: MoEConfig, ops: Ops, dtype: torch.dtype):
        super().__init__(hidden, config.experts, ops, dtype)
        self.k, self.renormalize = config.k, config.renormalize

    def forward(self, x: Tensor, routes: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x[T, H] -> (weights[T, k] fp32, expert ids[T, k] int32). routes[T, k]: see `replayed`."""
        logits = super().forward(x)
        weights, ids = self.ops.topk_softmax(logits, self.k, self.renormalize)
        if routes is None:
            return weights, ids
        ids, z = replayed(routes, ids), logits.float()
        # renormalized, they are the softmax of the chosen logits alone: no 0/0, however improbable these are by now
        return (z.gather(1, ids.long()).softmax(-1) if self.renormalize else z.softmax(-1).gather(1, ids.long())), ids


class SigmoidRouter(nn.Module):
    """weight[E, H] in the model dtype, logits in fp32. bias[E] is fp32 in every model dtype and frozen: whoever balances the experts moves
    it, by steps of 1e-3 beside values of about 7, which bf16 would swallow."""

    def __init__(self, hidden: int, config: MoEConfig, ops: Ops, dtype: torch.dtype):
        super().__init__()
        self.ops, self.config = ops, config
        self.weight = nn.Parameter(torch.empty(config.experts, hidden, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(config.experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor, routes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x[T, H] -> (weights[T, k] fp32, expert ids[T, k] int32). routes[T, k]: see `replayed`."""
        c = self.config
        logits = self.ops.router_logits(x, self.weight, torch.float32)
        weights, ids = self.ops.grouped_topk(logits, self.bias, c.k, c.groups, c.topk_groups, c.renormalize)
        if routes is None:
            return weights, ids
        ids = replayed(routes, ids)
        scores = torch.sigmoid(logits.gather(1, ids.long()))
        return (scores / (scores.sum(-1, keepdim=True) + 1e-20) if c.renormalize else scores), ids

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """A cast of the model moves the bias to the device, and leaves its dtype."""
        return super()._apply(lambda t: t.to(fn(t).device) if t is self.bias else fn(t), recurse)


class Experts(nn.Module):
    """w13[E, G, H]: gate | up of each expert, or up alone. w2[E, H, F]."""

    def __init__(self, hidden: int, config: MoEConfig, ops: Ops, dtype: torch.dtype):
        super().__init__()
        self.ops, self.activation = ops, config.activation
        self.w13 = nn.Parameter(torch.empty(config.experts, config.up_rows, hidden, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(config.experts, hidden, config.intermediate, dtype=dtype))

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.ops.routed_experts(x, self.w13, self.w2, weights, ids, self.activation)


class MoE(nn.Module):
    """shared(x) + scale * experts(x): the routed sum is scaled and rounded, then added, as vLLM does it."""

    def __init__(self, hidden: int, config: MoEConfig, ops: Ops, dtype: torch.dtype):
        super().__init__()
        self.scale = config.scale
        router = {"softmax": SoftmaxRouter, "sigmoid": SigmoidRouter}[config.router]
        self.router: nn.Module = router(hidden, config, ops, dtype)
        self.experts = Experts(hidden, config, ops, dtype)
        self.shared = None if config.shared is None else MLP(hidden, config.shared, ops, dtype)

    def forward(self, x: Tensor, routes: Tensor | None = None) -> Tensor:
        """x[T, H] -> [T, H]. routes[T, k]: experts to take in place of the router's choice, -1 in a token's row for that."""
        routed = self.experts(x, *self.router(x, routes))
        if self.scale != 1.0:
            routed = routed * self.scale
        return routed if self.shared is None else self.shared(x) + routed
