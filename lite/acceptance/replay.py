"""A kept rollout bundle, scored again by a trainer of the policy's weights: under another packing, micro-batch budget or kernel set."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lite.acceptance.bundle import load_bundle
from lite.acceptance.first_layers import first_layers
from lite.acceptance.receipt import SCHEMA, closure, environment, git_state
from lite.acceptance.scoring import TOKEN_BUDGET, PackedRollout, compare_path, pack_rollout
from lite.errors import InputError
from lite.primitive.compare import bits
from lite.primitive.modules.head import TokenScores
from lite.primitive.ops.bridges import Ops, reference_ops, vllm_ops
from lite.runtime.batch import PackedBatch
from lite.runtime.config import MegatronLiteConfig, OptimizerConfig, RuntimeConfig
from lite.runtime.runtime import Handle, Runtime, StepContext

KERNELS = ("reference", "FLASH_ATTN", "TRITON_ATTN")


@dataclass(frozen=True)
class ReplayConfig:
    """bundle: a file that `mlite prove` wrote under rollout/. model: the checkpoint folder of its run. checkpoint: of the trainer at the
    bundle's policy, where that is not the model's own (a folder step-N, or one that holds them). layers: of the run, where it took fewer.
    seed: of the packing."""

    bundle: Path
    model: Path
    checkpoint: Path | None = None
    layers: int | None = None
    kernels: str = "reference"
    token_budget: int = TOKEN_BUDGET
    seed: int = 0
    dtype: str = "bf16"


def replay(c: ReplayConfig) -> dict[str, Any]:
    """-> the result: status, both paths as in a receipt, and what differs by UID. "inconclusive" where the trainer holds other weights than
    those that the bundle was sampled from: then equal bytes would be a wonder, and unequal ones no error."""
    if c.bundle.is_dir():
        raise InputError(c.bundle, "is a folder", "name one of its bundles, rollout/thetaK.safetensors")
    trajectories, facts = load_bundle(c.bundle)
    if c.token_budget < 1:
        raise InputError("--token-budget", f"{c.token_budget} is not positive", "raise it")
    runtime, handle = _trainer(c)
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "bundle": {name: facts[name] for name in ("fingerprint", "temperature")} | {"policy_version": int(facts["policy_version"])},
        "trainer": {"fingerprint": handle.weights.fingerprint(), "kernels": c.kernels, "token_budget": c.token_budget, "seed": c.seed},
    }
    if found["trainer"]["fingerprint"] != facts["fingerprint"]:
        held = f"{c.checkpoint or c.model} (policy {handle.weights.version}, {c.dtype})"
        reason = f"{held} holds other weights than policy {facts['policy_version']} had: give its checkpoint and --dtype"
        return found | {"status": "inconclusive", "reason": reason}
    rollout = pack_rollout(trajectories, float(facts["temperature"]), c.seed, None, c.token_budget)
    score = runtime.forward_backward(handle, rollout.batches, forward_only=True)
    actor = runtime.forward_backward(handle, rollout.batches, _any_loss)
    paths = {
        "score": compare_path(rollout, score.log_probs, any(score.requires_grad)),
        "actor": compare_path(rollout, actor.log_probs, all(actor.requires_grad)),
    }
    exact = all(path["mismatch"] == path["nonfinite"] == 0 for path in paths.values())
    tokens, differing = paths["score"]["valid_tokens"], max(path["mismatch"] for path in paths.values())
    return found | {
        "status": "pass" if exact else "fail",
        "reason": f"{tokens} tokens have the same bytes on both paths" if exact else f"{differing} of {tokens} tokens differ",
        "packed_rows": len(rollout.batches),
        **paths,
        "differing": _differing(rollout, score.log_probs),
        "environment": environment(handle.device, {name: str(value) for name, value in vars(c).items()}),
        "git": git_state(),
        "closure": closure(),
    }


def _trainer(c: ReplayConfig) -> tuple[Runtime, Handle]:
    # moments have a place in a checkpoint, so a trainer that is to read one has an optimizer
    optimizer = OptimizerConfig() if c.checkpoint else None
    override = first_layers(c.model, c.layers)
    backend = MegatronLiteConfig(dtype=c.dtype, optimizer=optimizer, override=override)  # type: ignore[arg-type]
    runtime = Runtime(RuntimeConfig(hf_path=str(c.model), backend_cfg=backend))
    handle = runtime.build_model(_ops(c.kernels))
    runtime.train_mode(handle)
    if c.checkpoint is not None and runtime.load_checkpoint(handle, c.checkpoint) is None:
        raise InputError("--checkpoint", f"{c.checkpoint} holds no checkpoint", "give a folder step-N, or one that holds them")
    return runtime, handle


def _ops(kernels: str) -> Ops:
    if kernels == "reference":
        return reference_ops()
    from lite.primitive.kernels.vllm import enter_batch_invariance

    enter_batch_invariance()
    return vllm_ops(kernels)


def _any_loss(scores: TokenScores, batch: PackedBatch, step: StepContext) -> tuple[Tensor, dict[str, Any]]:
    """The forward that training differentiates; what is made of its gradient is not looked at."""
    return -scores.logprob[batch.loss_mask].mean(), {}


def _differing(rollout: PackedRollout, logprobs: list[Tensor]) -> list[dict[str, Any]]:
    """Each response with a differing token: its UID and sample, how many differ, the first of them."""
    found = []
    for t, own in zip(rollout.trajectories, rollout.by_trajectory(logprobs), strict=True):
        differs = (bits(t.logprobs) != bits(own)).nonzero()[:, 0]
        if len(differs):
            first = int(differs[0])
            values = {"rollout": float(t.logprobs[first]), "trainer": float(own[first])}
            found.append({"uid": t.uid, "sample": t.sample, "mismatch": len(differs), "first": first, **values})
    return found
