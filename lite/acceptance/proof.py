"""One run of the proof: policy after policy, rolled out, scored on both paths, updated; and what was found."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from safetensors.torch import save_file

from lite.acceptance.bundle import rollout_sha256, save_bundle
from lite.acceptance.grpo import advantages, reward_trend
from lite.acceptance.plants import Plant, find_plant
from lite.acceptance.progress import Progress
from lite.acceptance.receipt import environment, kernel_sources, verdict, weights_sha256
from lite.acceptance.result_folder import FAILING, ROLLOUT, SCORES
from lite.acceptance.resumption import load, save
from lite.acceptance.scoring import (
    BranchMagnitude,
    PackedRollout,
    RoutedGradients,
    compare_path,
    distinct_samples,
    gradient_coverage,
    grpo_loss,
    pack_rollout,
)
from lite.acceptance.sides import ProveConfig, build_sides
from lite.errors import InputError, ProbeError
from lite.primitive.optimizer.master import update_norm
from lite.runtime.rollout.engine import Trajectory

REDRAWS = 5


class Proof:
    """One run: the two sides, and what has been found so far."""

    KEPT = (
        "policies", "updates", "prompt_lengths", "response_lengths", "longest", "mixer_ratios", "mlp_ratios", "control_mismatch", "seconds",
        "round",
    )  # fmt: skip
    """What a checkpoint of the run holds beside the trainer's state."""

    def __init__(self, config: ProveConfig, plant: Plant | None, progress: Progress, rolling: Callable[[dict[str, Any]], None]):
        self.config, self.plant, self.progress, self.rolling = config, plant, progress, rolling
        progress.phase("build and probe", 1)
        self.sides = build_sides(config, plant)
        progress.advance(1)
        self.policies: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []
        self.prompt_lengths: list[int] = []
        self.response_lengths: list[int] = []
        self.longest = 0  # sequence
        self.mixer_ratios: list[float] = []
        self.mlp_ratios: list[float] = []
        # positions mean nothing to a model without rotary; a sequence's end does
        self.control = find_plant("packing-leak" if self.sides.trainer.bundle.module.cos_sin is None else "position-shift")
        self.control_mismatch: int | None = None
        self.idle_experts: dict[str, list[int]] = {}
        self.seconds: dict[str, float] = {}
        self.round = 0
        self.weights_sha256 = weights_sha256(self.sides.folder)
        self.loss = 0.0
        self.engine_fingerprint = self.rollout_sha256 = ""
        self.stopped: str | None = None

    def run(self) -> dict[str, Any]:
        """What was found stays found: an error on the way ends the run, and the verdict still speaks of the policies before it."""
        try:
            self._policies()
        except (InputError, ProbeError) as error:
            if not self.policies:
                raise
            self.stopped = str(error)
        return self._findings()

    def _policies(self) -> None:
        first = self._resumed() if self.config.resume else 0
        for k in range(first, self.config.updates + 1):
            self.progress.overall(k, self.config.updates + 1)
            if k:
                self._sync(k)
            drawn = self._rollout(k)
            if drawn is None:
                self.stopped = f"theta{k}: {REDRAWS} rounds of prompts gave no advantage to learn from"
                break
            trajectories, rewards, advantage = drawn
            self._score(k, trajectories, rewards, advantage)
            if self._must_stop(k) or (k < self.config.updates and not self._update(k, trajectories, advantage)):
                break
            self.sides.runtime.zero_grad(self.sides.trainer)
            if k < self.config.updates:
                self._keep(k + 1)
                so_far = f"{k + 1} of {self.config.updates + 1} policies so far"
                self.rolling(self._findings() | {"status": "inconclusive", "reason": so_far})

    def _resumed(self) -> int:
        """Takes up the latest checkpoint of an earlier call. -> the policy to go on with, 0 where there is none yet."""
        held = load(self.sides, self.config.out, self.weights_sha256)
        if held is None:
            self.progress.note("no checkpoint to resume from: starting at theta0")
            return 0
        vars(self).update(held["found"])
        vars(self.sides.engine.counters).update(held["counters"])
        version = self.sides.trainer.weights.require()
        self.progress.note(f"resumed at theta{version}")
        return version

    def _keep(self, version: int) -> None:
        """A checkpoint of trainer and findings every save_every updates."""
        if version % self.config.save_every:
            return
        found = {name: vars(self)[name] for name in self.KEPT}
        with self._timed("checkpoint", 1):
            save(self.sides, self.config.out, self.weights_sha256, found)

    def _must_stop(self, k: int) -> bool:
        """At the first mismatch that nobody planted or asked for. The policy is kept: its rollout can be replayed."""
        paths = [self.policies[-1][path] for path in ("score", "actor")]
        if self.plant or not self.config.plugin or not any(path["mismatch"] or path["nonfinite"] for path in paths):
            return False
        s, out = self.sides, self.config.out
        self.rolling(self._findings())  # known from here on, whatever happens next
        s.runtime.save_hf(s.trainer, out / FAILING)
        self.progress.note(f"theta{k}: stopping; mlite replay {out / ROLLOUT / f'theta{k}.safetensors'} --model {out / FAILING}")
        return True

    def _sync(self, k: int) -> None:
        if self.plant and self.plant.skip_sync:
            return
        s = self.sides
        with self._timed("sync", 1, k):
            s.engine.update_weights(s.runtime.export_weights(s.trainer), s.trainer.weights.require())

    def _rollout(self, k: int) -> tuple[list[Trajectory], list[float], list[float]] | None:
        """Responses of the next prompts, with rewards and advantages; the bundle is on disk before anything is scored. A batch without
        one non-zero advantage is no update: the next prompts are drawn instead. None where that goes on."""
        s, c = self.sides, self.config
        for _ in range(REDRAWS):
            prompts = s.task.prompts(self.round)
            self.round += 1
            with self._timed("rollout", c.groups * c.samples * c.response_tokens, k):
                trajectories = s.engine.generate(prompts, s.sampling, self.progress.advance)
            self.prompt_lengths = _range([*self.prompt_lengths, *(len(p.ids) for p in prompts)])
            self.response_lengths = _range([*self.response_lengths, *(len(t.response_ids) for t in trajectories)])
            self.longest = max(self.longest, *(len(t.prompt_ids) + len(t.response_ids) for t in trajectories))
            rewards = [s.task.reward(t.uid, t.response_ids) for t in trajectories]
            advantage = advantages(trajectories, rewards)
            if self.plant:
                trajectories = self.plant.rollout(trajectories)
            self.engine_fingerprint = s.engine.fingerprint()
            save_bundle(c.out / ROLLOUT / f"theta{k}.safetensors", trajectories, rewards, self.engine_fingerprint, c.temperature)
            self.rollout_sha256 = rollout_sha256(trajectories)
            if any(advantage) or k == c.updates:
                return trajectories, rewards, advantage
            self.progress.note(f"theta{k}: no advantage in {len(prompts)} groups, drawing the next prompts")
        return None

    def _score(self, k: int, trajectories: list[Trajectory], rewards: list[float], advantage: list[float]) -> None:
        """Both paths on the same packed rollout: old logprobs without gradient, then the forward that training differentiates, its
        logprobs taken before the loss. The gradient stays for the update."""
        s, c = self.sides, self.config
        rollout = pack_rollout(trajectories, c.temperature, c.seed + k, self.plant)
        with self._timed("score", 1, k), BranchMagnitude(s.trainer) as magnitude:
            score = s.runtime.forward_backward(s.trainer, rollout.batches, forward_only=True)
        if k == 0:
            self.mixer_ratios, self.mlp_ratios = magnitude.ratios(magnitude.mixer), magnitude.ratios(magnitude.mlp)
            self._control(trajectories)
        with self._timed("actor", 1, k), RoutedGradients(s.trainer) as routed:
            actor = s.runtime.forward_backward(s.trainer, rollout.batches, grpo_loss(rollout, advantage))
        self.loss = float(torch.stack(actor.losses).sum())
        self.idle_experts = routed.idle()
        self._keep_scores(k, rollout, score.log_probs, actor.log_probs)
        groups, collapsed, distinct = distinct_samples(trajectories)
        self.policies.append({
            "policy": f"theta{k}",
            "groups": groups,
            "collapsed_groups": collapsed,
            "distinct_samples": distinct,
            "packed_rows": len(rollout.batches),
            "rollout_sha256": self.rollout_sha256,
            "version": {"engine": trajectories[0].policy_version, "trainer": score.weights_version},
            "fingerprint": {"engine": self.engine_fingerprint, "trainer": s.trainer.weights.fingerprint()},
            "reward_mean": sum(rewards) / len(rewards),
            "score": compare_path(rollout, score.log_probs, any(score.requires_grad)),
            "actor": compare_path(rollout, actor.log_probs, all(actor.requires_grad)),
        })  # fmt: skip
        found = self.policies[-1]
        self.progress.note(
            f"theta{k}: {found['score']['valid_tokens']} tokens, mismatch {found['score']['mismatch']} score, "
            f"{found['actor']['mismatch']} actor, reward {found['reward_mean']:.3f}"
        )

    def _control(self, trajectories: list[Trajectory]) -> None:
        """The same comparison over a trainer that is known to be wrong: it must differ, or it could not have."""
        s, c = self.sides, self.config
        wrong = pack_rollout(trajectories, c.temperature, c.seed, self.control)
        with self._timed("control", 1, 0):
            control = s.runtime.forward_backward(s.trainer, wrong.batches, forward_only=True)
        self.control_mismatch = compare_path(wrong, control.log_probs, False)["mismatch"]

    def _keep_scores(self, k: int, rollout: PackedRollout, score: Sequence[torch.Tensor], actor: Sequence[torch.Tensor]) -> None:
        """The trainer's logprobs in the bundle's order, beside it."""
        path = self.config.out / SCORES / f"theta{k}.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_file({name: torch.cat(rollout.by_trajectory(rows)) for name, rows in (("score", score), ("actor", actor))}, path)

    def _update(self, k: int, trajectories: list[Trajectory], advantage: list[float]) -> bool:
        """Steps and deploys. False where the gradient is not finite: then nothing was stepped."""
        s = self.sides
        expected, with_grad, without = gradient_coverage(s.trainer, self.idle_experts)
        optimizer = s.trainer.optimizer
        assert optimizer is not None
        before = {name: master.clone() for name, master in optimizer.masters.items()}
        with self._timed("update", 1, k):
            done, norm, _ = s.runtime.optimizer_step(s.trainer)
        if not done:
            self.stopped = f"update {k + 1}: the gradient norm is {norm}; the rollout bundle is kept"
            return False
        s.runtime.lr_scheduler_step(s.trainer)
        by_group: dict[str, bool] = {}
        for t, a in zip(trajectories, advantage, strict=True):
            by_group[t.uid] = by_group.get(t.uid, False) or a != 0
        self.updates.append({
            "step": k + 1,
            "loss": self.loss,
            "grad_norm": norm,
            "master_update_norm": update_norm(before, optimizer.masters),
            "deployed_bytes_changed": s.trainer.weights.bytes_changed,
            "nonzero_advantages": sum(a != 0 for a in advantage),
            **{key: self.policies[k][key] for key in ("groups", "collapsed_groups", "distinct_samples")},
            "zero_advantage_groups": sum(not any_advantage for any_advantage in by_group.values()),
            "samples": len(trajectories),
            "parameters_expected": expected,
            "parameters_with_grad": with_grad,
            "without_grad": without,
            "idle_experts": sum(map(len, self.idle_experts.values())),
        })  # fmt: skip
        return True

    @contextmanager
    def _timed(self, name: str, total: int, policy: int | None = None) -> Iterator[None]:
        """Tells the progress and adds up the time of a phase over the policies."""
        self.progress.phase(name if policy is None else f"theta{policy} {name}", total)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 3)
        if total == 1:
            self.progress.advance(1)

    def _unmet(self) -> str | None:
        """What no sequence met that the family is proven by."""
        mamba = self.sides.trainer.bundle.config.mamba
        if mamba is None or self.longest > mamba.shape.chunk:
            return None
        return f"vacuous: no sequence is longer than a chunk of {mamba.shape.chunk}, so no state was carried: raise --prompt-tokens"

    def _findings(self) -> dict[str, Any]:
        s, c = self.sides, self.config
        status, reason = verdict(
            self.policies, self.updates, self.mixer_ratios + self.mlp_ratios, c.proxy is not None, self.control_mismatch,
            self.stopped or self._unmet(),
        )  # fmt: skip
        if self.plant and status == "pass":
            status, reason = "inconclusive", f"the planted {self.plant.kind} changed no logprob that was compared: {reason}"
        return {
            "status": status,
            "reason": reason,
            "subject": {
                "family": s.runtime.family,
                "weights": "random" if c.proxy else "trained",
                "weights_sha256": self.weights_sha256,
                "geometry": s.runtime.hf_config,
                "layers": s.trainer.bundle.layers,
                "parameters": sum(p.numel() for p in s.trainer.module.parameters()),
                "dtype": c.dtype,
                "mixer_to_residual_rms": self.mixer_ratios,
                "mlp_to_residual_rms": self.mlp_ratios,
                "skipped": s.trainer.load_report.skipped,
                "converted": s.trainer.load_report.converted,
            },
            "engine": s.engine.facts(),
            "kernels": {
                "set": s.ops.visible.NAME, "sources": kernel_sources(s.ops.visible), "probes": [p.as_dict() for p in s.trainer.probes],
            },
            "task": s.task.reward_rule,
            "control": {"plant": self.control.kind, "mismatch": self.control_mismatch},
            "lengths": {
                "prompt": self.prompt_lengths,
                "response": self.response_lengths,
                **asdict(s.engine.counters),
            },
            "policies": self.policies,
            "updates": self.updates,
            "reward": reward_trend([p["reward_mean"] for p in self.policies]),
            "seconds": self.seconds,
            "environment": environment(s.trainer.device, {name: str(value) for name, value in asdict(c).items()}),
        }  # fmt: skip


def _range(lengths: Sequence[int]) -> list[int]:
    return [min(lengths), max(lengths)]
