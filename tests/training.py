"""A small model under training, and what tests read off it."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lite.primitive.modules.head import TokenScores
from lite.runtime.batch import PackedBatch
from lite.runtime.config import OptimizerConfig
from lite.runtime.rollout.engine import Sampling
from lite.runtime.runtime import Handle, Runtime, StepContext
from tests.checkpoints import batch_of, checkpoint, engine, make_prompts, make_samples, same, trainer

BASE = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.0)
Opened = tuple[Runtime, Handle]


def opened(dtype: str = "bf16", name: str = "qwen2", **changes: Any) -> Opened:
    return trainer(checkpoint(name, dtype), dtype, dataclasses.replace(BASE, **changes))


def batch(seed: int = 0) -> PackedBatch:
    return PackedBatch.from_samples(make_samples([(4, 9), (1, 5), (12, 20)], seed))


def nll(scores: TokenScores, b: PackedBatch, step: StepContext) -> tuple[Tensor, dict[str, Any]]:
    """Mean negative logprob of `batch`'s 34 response tokens."""
    return -scores.logprob.sum() / 34, {}


def backward(o: Opened, data: PackedBatch | list[PackedBatch], loss: Callable = nll) -> dict[str, Tensor]:
    """-> the gradients by name."""
    o[0].zero_grad(o[1])
    o[0].forward_backward(o[1], data, loss)
    return {name: p.grad.clone() for name, p in o[1].module.named_parameters() if p.requires_grad}


def snapshot(handle: Handle) -> dict[str, Tensor]:
    """Everything a step may change, as copies."""
    o = handle.optimizer
    found = {f"master {name}": m for name, m in o.masters.items()} | {f"image {name}": p for name, p in handle.module.named_parameters()}
    for name, m in o.masters.items():
        found |= {f"{key} {name}": value for key, value in o.adamw.state.get(m, {}).items()}
    return {name: t.detach().clone() for name, t in found.items()}


def unchanged(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def image_is_rounded_masters(handle: Handle) -> bool:
    return all(same(p.detach(), handle.optimizer.masters[name].to(p.dtype)) for name, p in handle.module.named_parameters())


def digests(folder: Path, dtype: str, threads: int) -> list[str]:
    """sha256 of what an engine and a trainer compute on that many threads, one a line: the responses' logprobs, the trainer's logprobs and
    entropies, the tokens, and last the weights after one step. The longest prompt passes a tile of GEMM rows and one of keys."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        done = engine(folder, dtype, max_step_tokens=48).generate(make_prompts([1, 9, 70]), Sampling(n=2, max_tokens=4))
        runtime, handle = trainer(folder, dtype, BASE)
        result = runtime.forward_backward(handle, batch_of(done), nll)
        runtime.optimizer_step(handle)
    finally:
        torch.set_num_threads(before)
    parts = [t.logprobs.numpy().tobytes() for t in done] + [x.numpy().tobytes() for x in (*result.log_probs, *result.entropy)]
    parts += [str([t.response_ids for t in done]).encode()]
    return [hashlib.sha256(part).hexdigest() for part in parts] + [handle.weights.fingerprint()]
