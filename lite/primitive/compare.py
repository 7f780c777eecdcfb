"""Byte comparison of logprobs. Everyone who claims equality claims it through this file."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lite.errors import InputError


@dataclass(frozen=True)
class Comparison:
    """mismatch: valid tokens whose bytes differ. nonfinite: valid tokens that are NaN or Inf on either side (a failure even where both
    agree). max_abs: largest difference among the finite ones. first: index of the first failing token, None where there is none."""

    dtype: str
    valid_tokens: int
    mismatch: int
    nonfinite: int
    max_abs: float
    first: int | None

    @property
    def exact(self) -> bool:
        return self.mismatch == 0 and self.nonfinite == 0 and self.valid_tokens > 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bits(x: Tensor) -> Tensor:
    """The bytes as integers of the same width: -0 is not +0, and a NaN equals itself."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def compare_bytes(rollout: Tensor, trainer: Tensor) -> Comparison:
    """Two runs of logprobs of the same valid tokens, [n] each. InputError for nothing to compare or unequal dtypes and shapes."""
    if rollout.dtype != trainer.dtype:
        raise InputError("comparison", f"dtypes differ: {rollout.dtype} and {trainer.dtype}", "compare the original dtypes")
    if rollout.shape != trainer.shape:
        raise InputError("comparison", f"{tuple(rollout.shape)} tokens against {tuple(trainer.shape)}", "compare the same valid tokens")
    if rollout.numel() == 0:
        raise InputError("comparison", "no valid token", "check the mask: an empty comparison proves nothing")
    differ = bits(rollout) != bits(trainer)
    nonfinite = ~(torch.isfinite(rollout) & torch.isfinite(trainer))
    failing = (differ | nonfinite).nonzero()[:, 0]
    distance = (rollout.double() - trainer.double()).abs()[~nonfinite]
    return Comparison(
        dtype=str(rollout.dtype).removeprefix("torch."),
        valid_tokens=rollout.numel(),
        mismatch=int(differ.sum()),
        nonfinite=int(nonfinite.sum()),
        max_abs=float(distance.max()) if distance.numel() else float("nan"),
        first=int(failing[0]) if len(failing) else None,
    )
