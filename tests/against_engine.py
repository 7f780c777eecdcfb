"""A sharded trainer and an engine in a process of its own: it is told of a policy by a checkpoint folder, and answers by a bundle."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lite.acceptance.bundle import load_bundle
from lite.acceptance.scoring import compare_path, pack_rollout
from lite.runtime.rollout.engine import Trajectory
from lite.runtime.runtime import Handle, Runtime

Generate = Callable[[Path, Path], None]
"""(checkpoint folder, bundle to write): what the first rank calls for each policy."""


def on_both_paths(runtime: Runtime, handle: Handle, trajectories: list[Trajectory]) -> dict[str, dict[str, Any]]:
    """The trajectories of this rank in one row: scored, and in a forward whose gradient is added. -> path -> its findings."""
    rollout = pack_rollout(trajectories, 1.0, 0, None, token_budget=1 << 20)
    loss = lambda scores, batch, step: (-scores.logprob[batch.loss_mask].mean() / step.ranks, {})
    score = runtime.forward_backward(handle, rollout.batches, forward_only=True)
    actor = runtime.forward_backward(handle, rollout.batches, loss)
    return {"score": compare_path(rollout, score.log_probs, any(score.requires_grad)),
            "actor": compare_path(rollout, actor.log_probs, all(actor.requires_grad))}  # fmt: skip


def follow_engine(runtime: Runtime, handle: Handle, scratch: Path, generate: Generate, updates: int) -> list[dict[str, dict[str, Any]]]:
    """-> this rank's findings of each policy, over its own half of the responses, and last those of the first policy's responses by the
    last policy's weights."""
    rank, found = dist.get_rank(), []
    for k in range(updates + 1):
        folder, bundle = scratch / f"theta{k}", scratch / f"theta{k}.safetensors"
        runtime.save_hf(handle, folder)
        if rank == 0:
            generate(folder, bundle)
        dist.barrier()
        trajectories, meta = load_bundle(bundle)
        assert meta["fingerprint"] == handle.weights.fingerprint()
        runtime.zero_grad(handle)
        found.append(on_both_paths(runtime, handle, trajectories[rank :: dist.get_world_size()]))
        if k < updates:
            done, norm, _ = runtime.optimizer_step(handle)
            assert done and norm > 0 and handle.weights.bytes_changed > 0
    stale, _ = load_bundle(scratch / "theta0.safetensors")
    return [*found, on_both_paths(runtime, handle, stale[rank :: dist.get_world_size()])]


def assert_exact(ranks: list[list[dict[str, dict[str, Any]]]]) -> int:
    """Every rank agrees with the engine at every policy on both paths, and not with a stale engine. -> valid tokens on each path."""
    for findings in ranks:
        for found in findings[:-1]:
            assert all(path["mismatch"] == path["nonfinite"] == 0 < path["valid_tokens"] for path in found.values()), found
            assert found["actor"]["requires_grad"] and not found["score"]["requires_grad"]
        assert all(path["mismatch"] > path["valid_tokens"] / 4 for path in findings[-1].values()), "a missed sync must be seen"
    return sum(found["score"]["valid_tokens"] for findings in ranks for found in findings[:-1])
