"""The trainer's two paths over a rollout, and the byte comparison of each with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from lite.acceptance.grpo import policy_loss
from lite.acceptance.plants import Plant
from lite.errors import InputError
from lite.primitive.ckpt.spec import parts
from lite.primitive.compare import compare_bytes
from lite.primitive.modules.head import TokenScores
from lite.primitive.modules.moe import Experts
from lite.primitive.parallel.packing import micro_batches
from lite.runtime.batch import PackedBatch
from lite.runtime.rollout.engine import Trajectory
from lite.runtime.runtime import Handle, LossFn, StepContext

TOKEN_BUDGET = 2048


@dataclass(frozen=True)
class PackedRollout:
    """A rollout as the trainer sees it: which trajectories stand in which micro-batch, in which order."""

    trajectories: list[Trajectory]
    members: list[list[int]]
    batches: list[PackedBatch]

    def by_trajectory(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """The scored rows of each micro-batch ([T] each), handed back to their trajectories."""
        found: dict[int, Tensor] = {}
        for members, batch, values in zip(self.members, self.batches, rows, strict=True):
            assert batch.loss_mask is not None
            scored = values[batch.loss_mask.to(values.device)].cpu()
            lengths = [len(self.trajectories[i].response_ids) for i in members]
            found.update(zip(members, scored.split(lengths), strict=True))
        return [found[i] for i in range(len(self.trajectories))]


def pack_rollout(
    trajectories: list[Trajectory], temperature: float, seed: int, plant: Plant | None, token_budget: int = TOKEN_BUDGET
) -> PackedRollout:
    """Packs in an order of its own: short and long in turn, shuffled by seed, so that no trajectory keeps its rollout neighbours and
    rows hold unequal lengths. A row has token_budget tokens, or room for the two longest."""
    lengths = [len(t.prompt_ids) + len(t.response_ids) for t in trajectories]
    by_length = sorted(torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist(), key=lambda i: lengths[i])
    half = (len(by_length) + 1) // 2
    order = [i for pair in zip_longest(by_length[:half], reversed(by_length[half:])) for i in pair if i is not None]
    token_budget = max(token_budget, 2 * max(lengths))
    members = [[order[i] for i in batch] for batch in micro_batches([lengths[i] for i in order], token_budget)]
    if not any(len({lengths[i] for i in batch}) > 1 for batch in members):
        raise InputError("trainer's packing", "no row holds two sequences of unequal length, so it proves nothing about packing",
                         "raise --groups or spread --prompt-tokens")  # fmt: skip
    batches = []
    for batch in members:
        packed = PackedBatch.from_samples([(trajectories[i].prompt_ids, trajectories[i].response_ids) for i in batch], temperature)
        batches.append(plant.batch(packed) if plant else packed)
    return PackedRollout(trajectories, members, batches)


def grpo_loss(rollout: PackedRollout, advantages: Sequence[float]) -> LossFn:
    """The loss of each micro-batch, found by its index; rows in packed order."""
    tokens = sum(len(t.response_ids) for t in rollout.trajectories)

    def loss(scores: TokenScores, batch: PackedBatch, ctx: StepContext) -> tuple[Tensor, dict[str, Any]]:
        members = rollout.members[ctx.index]
        old = torch.cat([rollout.trajectories[i].logprobs for i in members]).to(scores.logprob.device)
        advantage = torch.cat([torch.full((len(rollout.trajectories[i].response_ids),), advantages[i]) for i in members]).to(old.device)
        own = scores.logprob[batch.loss_mask]
        return policy_loss(own, old, advantage, tokens), {}

    return loss


def compare_path(rollout: PackedRollout, logprobs: Sequence[Tensor], with_grad: bool) -> dict[str, Any]:
    """One PATH entry of the receipt. logprobs: [T] of each micro-batch. with_grad: whether the path's outputs required a gradient."""
    trainer = rollout.by_trajectory(logprobs)
    result = compare_bytes(torch.cat([t.logprobs for t in rollout.trajectories]), torch.cat(trainer))
    first = None
    if result.first is not None:
        index = result.first
        for t, own in zip(rollout.trajectories, trainer, strict=True):
            if index < len(own):
                first = {"uid": t.uid, "sample": t.sample, "position": index,
                         "rollout": _json(t.logprobs[index]), "trainer": _json(own[index])}  # fmt: skip
                break
            index -= len(own)
    return {
        "grad_mode": "grad" if with_grad else "no_grad",
        "requires_grad": with_grad,
        "dtype": result.dtype,
        "valid_tokens": result.valid_tokens,
        "mismatch": result.mismatch,
        "nonfinite": result.nonfinite,
        "max_abs": result.max_abs if result.max_abs == result.max_abs else None,
        "first_mismatch": first,
    }


def _json(value: Tensor) -> float | str:
    """A float, or its name where JSON has none."""
    number = float(value)
    return number if torch.isfinite(value) else str(number)


class BranchMagnitude:
    """Forward hooks that measure, layer by layer, what a mixer and an MLP add to the residual stream: rms(added) / rms(residual).
    mixer, mlp: by layer, where it has one."""

    def __init__(self, handle: Handle):
        layers = dict(enumerate(handle.bundle.module.layers))
        self.mixer = {i: [0.0, 0.0] for i, kind in enumerate(handle.bundle.config.mixers) if kind}
        self.mlp = {i: [0.0, 0.0] for i, kind in enumerate(handle.bundle.config.mlps) if kind}
        self.mixed: dict[int, Tensor] = {}
        self.hooks = []
        for i, layer in layers.items():
            if i in self.mixer:
                mixer = layer.get_submodule("mixer")
                self.hooks.append(mixer.register_forward_hook(lambda m, args, out, i=i: self.mixed.__setitem__(i, out.detach().double())))
            self.hooks.append(layer.register_forward_hook(lambda m, args, out, i=i: self._add(i, *(t.detach().double() for t in out))))

    def _add(self, i: int, last: Tensor, residual: Tensor) -> None:
        """last: the output of the layer's last block. residual: the stream before it."""
        if i in self.mixer:
            mixed = self.mixed.pop(i)
            self._sum(self.mixer[i], mixed, residual - mixed if i in self.mlp else residual)
        if i in self.mlp:
            self._sum(self.mlp[i], last, residual)

    @staticmethod
    def _sum(sums: list[float], added: Tensor, before: Tensor) -> None:
        sums[0] += float(added.square().sum())
        sums[1] += float(before.square().sum())

    def __enter__(self) -> "BranchMagnitude":
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    @staticmethod
    def ratios(sums: dict[int, list[float]]) -> list[float]:
        """0 where the residual itself is 0: nothing can be told apart there."""
        return [(added / residual) ** 0.5 if residual else 0.0 for added, residual in sums.values()]


class RoutedGradients:
    """Hooks that count, for each expert, the tokens that chose it and whose result received a gradient. An expert without one has none."""

    def __init__(self, handle: Handle):
        self.tokens: dict[str, Tensor] = {}  # the experts' name in the model -> [E]
        self.hooks = []
        for name, module in handle.bundle.module.named_modules():
            if isinstance(module, Experts):
                self.tokens[name] = torch.zeros(len(module.w13), dtype=torch.int64, device=module.w13.device)
                self.hooks.append(module.register_forward_hook(lambda m, args, out, name=name: self._watch(name, args[2], out)))

    def _watch(self, name: str, ids: Tensor, out: Tensor) -> None:
        def count(grad: Tensor) -> None:
            chosen = ids[grad.any(1)].flatten().long()
            self.tokens[name] += torch.bincount(chosen, minlength=len(self.tokens[name]))

        out.register_hook(count)

    def __enter__(self) -> "RoutedGradients":
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def idle(self) -> dict[str, list[int]]:
        """The experts without such a token, by name."""
        return {name: (tokens == 0).nonzero()[:, 0].tolist() for name, tokens in self.tokens.items()}


def distinct_samples(trajectories: Sequence[Trajectory]) -> tuple[int, int, int]:
    """-> (groups, groups with fewer than two distinct samples, distinct samples over all groups)."""
    groups: dict[str, set[tuple[int, ...]]] = {}
    for t in trajectories:
        groups.setdefault(t.uid, set()).add(t.response_ids)
    return len(groups), sum(len(g) < 2 for g in groups.values()), sum(len(g) for g in groups.values())


def gradient_coverage(handle: Handle, idle: Mapping[str, Sequence[int]]) -> tuple[int, int, dict[str, str | None]]:
    """By checkpoint tensor name: (expected, with a finite non-zero gradient, those without and why that is right; None where it is not).

    idle: see `RoutedGradients`.
    """
    b = handle.bundle
    named = dict(b.module.named_parameters())
    without: dict[str, str | None] = {}
    expected = parts(b.weights, b.config, b.layers)
    for part in expected:
        parameter = named[part.native]
        rows = None if parameter.grad is None else part.of(parameter.grad)
        if rows is not None and bool(torch.isfinite(rows).all()) and bool(rows.any()):
            continue
        reason = None
        if not parameter.requires_grad:
            reason = "frozen"
        elif rows is not None and not rows.any() and parameter.ndim == 3:
            expert = part.start // parameter.shape[1]
            reason = "no token with a gradient chose this expert" if expert in idle[part.native.rpartition(".")[0]] else None
        without[part.hf] = reason
    return len(expected), len(expected) - len(without), without
