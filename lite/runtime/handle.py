"""A built model and what passes between the trainer and its caller in a step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lite.model.protocol import ModelBundle
from lite.primitive.ckpt.hf_weights import LoadReport
from lite.primitive.kernels.probe import Probe
from lite.primitive.modules.decoder import Decoder
from lite.primitive.modules.head import TokenScores
from lite.primitive.optimizer.master import MasterAdamW
from lite.runtime.batch import PackedBatch
from lite.runtime.weights import DeployedWeights


@dataclass(frozen=True)
class StepContext:
    """What a loss function may want to know: which micro-batch of how many this is, and on how many ranks as many are run. Losses add up
    over all of them."""

    index: int
    num_microbatches: int
    forward_only: bool
    ranks: int = 1


LossFn = Callable[[TokenScores, PackedBatch, StepContext], tuple[Tensor, dict[str, Any]]]


@dataclass
class ForwardResult:
    """One entry a micro-batch, in the order given. log_probs and entropy [T] fp32, detached; rows that were not scored are 0."""

    weights_version: int
    log_probs: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Handle:
    """A built model and what trains it."""

    bundle: ModelBundle
    weights: DeployedWeights
    load_report: LoadReport
    probes: tuple[Probe, ...]
    device: torch.device
    optimizer: MasterAdamW | None = None
    schedule: torch.optim.lr_scheduler.LambdaLR | None = None

    @property
    def module(self) -> Decoder:
        return self.bundle.module
