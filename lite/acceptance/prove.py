"""The proof: rollout, score, update, again; every token's logprob compared by bytes on both of the trainer's paths."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from lite.acceptance.bundle import rollout_sha256, save_bundle
from lite.acceptance.grpo import advantages
from lite.acceptance.plants import Plant, find_plant
from lite.acceptance.receipt import SCHEMA, closure, environment, git_state, kernel_sources, verdict, weights_sha256, write_json
from lite.acceptance.result_folder import RECEIPT, ROLLOUT, SCORES, claimed
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
from lite.acceptance.sides import ProveConfig, build_sides, check_choice
from lite.errors import InputError, ProbeError
from lite.primitive.optimizer.master import update_norm
from lite.runtime.rollout.engine import Trajectory

REDRAWS = 5


class Progress(Protocol):
    """Told what goes on; the command line draws it."""

    def phase(self, name: str, total: int) -> None: ...

    def advance(self, amount: int) -> None: ...

    def note(self, text: str) -> None: ...


def prove(config: ProveConfig, command: Sequence[str], progress: Progress) -> dict[str, Any]:
    """-> the receipt, also written to out/receipt.json.

    What goes wrong once the folder is there (a bad checkpoint, a failed probe) gives status "inconclusive" and its reason; a choice that
    can be refused before raises InputError and writes nothing.
    """
    plant = find_plant(config.plant) if config.plant else None
    check_choice(config)
    with claimed(config.out):
        return _prove(config, plant, command, progress)


def _prove(config: ProveConfig, plant: Plant | None, command: Sequence[str], progress: Progress) -> dict[str, Any]:
    receipt: dict[str, Any] = {
        "schema": SCHEMA, "status": "inconclusive", "reason": "did not finish", "command": list(command), "plant": config.plant,
    }  # fmt: skip
    write_json(config.out / RECEIPT, receipt)
    try:
        receipt |= _Proof(config, plant, progress).run()
    except (InputError, ProbeError) as error:
        receipt["reason"] = str(error)
    except Exception as error:
        receipt["reason"] = f"unexpected {type(error).__name__}: {error}"
        write_json(config.out / RECEIPT, receipt)
        raise
    receipt |= {"git": git_state(), "closure": closure()}
    write_json(config.out / RECEIPT, receipt)
    return receipt


class _Proof:
    """One run: the two sides, and what has been found so far."""

    def __init__(self, config: ProveConfig, plant: Plant | None, progress: Progress):
        self.config, self.plant, self.progress = config, plant, progress
        progress.phase("build and probe", 1)
        self.sides = build_sides(config, plant)
        progress.advance(1)
        self.policies: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []
        self.prompt_lengths: list[int] = []
        self.response_lengths: list[int] = []
        self.mixer_ratios: list[float] = []
        self.mlp_ratios: list[float] = []
        # positions mean nothing to a model without rotary; a sequence's end does
        self.control = find_plant("packing-leak" if self.sides.trainer.bundle.module.cos_sin is None else "position-shift")
        self.control_mismatch: int | None = None
        self.idle_experts: dict[str, list[int]] = {}
        self.seconds: dict[str, float] = {}
        self.round = 0
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
        for k in range(self.config.updates + 1):
            if k:
                self._sync(k)
            drawn = self._rollout(k)
            if drawn is None:
                self.stopped = f"theta{k}: {REDRAWS} rounds of prompts gave no advantage to learn from"
                break
            trajectories, rewards, advantage = drawn
            self._score(k, trajectories, rewards, advantage)
            if k < self.config.updates and not self._update(k, trajectories, advantage):
                break
            self.sides.runtime.zero_grad(self.sides.trainer)

    def _sync(self, k: int) -> None:
        if self.plant and self.plant.skip_sync:
            return
        s = self.sides
        with self._timed(f"theta{k} sync", 1):
            s.engine.update_weights(s.runtime.export_weights(s.trainer), s.trainer.weights.require())

    def _rollout(self, k: int) -> tuple[list[Trajectory], list[float], list[float]] | None:
        """Responses of the next prompts, with rewards and advantages; the bundle is on disk before anything is scored. A batch without
        one non-zero advantage is no update: the next prompts are drawn instead. None where that goes on."""
        s, c = self.sides, self.config
        for _ in range(REDRAWS):
            prompts = s.task.prompts(self.round)
            self.round += 1
            with self._timed(f"theta{k} rollout", c.groups * c.samples * c.response_tokens):
                trajectories = s.engine.generate(prompts, s.sampling, self.progress.advance)
            self.prompt_lengths += [len(p.ids) for p in prompts]
            self.response_lengths += [len(t.response_ids) for t in trajectories]
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
        with self._timed(f"theta{k} score", 1), BranchMagnitude(s.trainer) as magnitude:
            score = s.runtime.forward_backward(s.trainer, rollout.batches, forward_only=True)
        if k == 0:
            self.mixer_ratios, self.mlp_ratios = magnitude.ratios(magnitude.mixer), magnitude.ratios(magnitude.mlp)
            self._control(trajectories)
        with self._timed(f"theta{k} actor", 1), RoutedGradients(s.trainer) as routed:
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
        with self._timed("theta0 control", 1):
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
        with self._timed(f"theta{k} update", 1):
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
    def _timed(self, name: str, total: int) -> Iterator[None]:
        """Tells the progress and keeps the time of one phase."""
        self.progress.phase(name, total)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 3)
        if total == 1:
            self.progress.advance(1)

    def _findings(self) -> dict[str, Any]:
        s, c = self.sides, self.config
        status, reason = verdict(
            self.policies, self.updates, self.mixer_ratios + self.mlp_ratios, c.proxy is not None, self.control_mismatch, self.stopped
        )
        return {
            "status": status,
            "reason": reason,
            "subject": {
                "family": s.runtime.family,
                "weights": "random" if c.proxy else "trained",
                "weights_sha256": weights_sha256(s.folder),
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
                "prompt": [min(self.prompt_lengths), max(self.prompt_lengths)],
                "response": [min(self.response_lengths), max(self.response_lengths)],
                **asdict(s.engine.counters),
            },
            "policies": self.policies,
            "updates": self.updates,
            "seconds": self.seconds,
            "environment": environment(s.trainer.device, {name: str(value) for name, value in asdict(c).items()}),
        }  # fmt: skip

