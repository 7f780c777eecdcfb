"""Group-relative policy optimisation (Shao et al. 2024): advantages within a group, the clipped ratio, one gradient step a rollout."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lite.runtime.rollout.engine import Trajectory

CLIP = 0.2


def advantages(trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> list[float]:
    """(reward - group mean) / (group standard deviation + 1e-6), a group being the samples of one uid; 0 where all agree."""
    groups = defaultdict(list)
    for t, reward in zip(trajectories, rewards, strict=True):
        groups[t.uid].append(reward)

    def advantage(uid: str, reward: float) -> float:
        r = torch.tensor(groups[uid], dtype=torch.float64)
        spread = float(r.std(correction=0))
        return (reward - float(r.mean())) / (spread + 1e-6) if spread > 1e-9 else 0.0

    return [advantage(t.uid, reward) for t, reward in zip(trajectories, rewards, strict=True)]


def policy_loss(logprob: Tensor, old_logprob: Tensor, advantage: Tensor, tokens: int) -> Tensor:
    """-sum of min(ratio A, clip(ratio) A) over the rows, divided by the tokens of the whole batch. [n] each.

    old_logprob is the rollout's own: the ratio of the first step is then exactly 1, and shows the trainer's distance from the rollout.
    """
    ratio = torch.exp(logprob - old_logprob)
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum() / tokens


def reward_trend(means: Sequence[float]) -> dict[str, Any]:
    """The policies' mean rewards at both ends of a run: {"policies": n, "first": mean of the first n, "last": of the last n,
    "standard_errors": their difference in standard errors of it}. n is 40, or half the run where that is shorter; under 4 policies there
    is nothing to compare (n = 0)."""
    n = min(40, len(means) // 2)
    if n < 2:
        return {"policies": 0}
    first, last = torch.tensor(means[:n], dtype=torch.float64), torch.tensor(means[-n:], dtype=torch.float64)
    error = float(((first.var() + last.var()) / n).sqrt())
    change = float(last.mean() - first.mean())
    return {
        "policies": n, "first": float(first.mean()), "last": float(last.mean()), "standard_errors": change / error if error else None,
    }  # fmt: skip
