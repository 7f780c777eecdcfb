"""A small trainer on however many ranks there are, and what tests read off it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lite.runtime.batch import PackedBatch
from lite.runtime.config import FsdpConfig, MegatronLiteConfig, OptimizerConfig, RuntimeConfig
from lite.runtime.runtime import Handle, Runtime
from tests.checkpoints import checkpoint, make_samples, same

Opened = tuple[Runtime, Handle]
Tensors = dict[str, Tensor]


def opened(dtype: str = "bf16", family: str = "qwen2", **fsdp: Any) -> Opened:
    backend = MegatronLiteConfig(
        dtype=dtype, device="cpu", fsdp=FsdpConfig(**fsdp), optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0)
    )  # type: ignore[arg-type]
    runtime = Runtime(RuntimeConfig(checkpoint(family, dtype), backend_cfg=backend))
    return runtime, runtime.build_model()


def batches(step: int = 0, count: int = 4) -> list[PackedBatch]:
    """This rank's part of the step's micro-batches."""
    made = [PackedBatch.from_samples(make_samples([(4, 9), (1, 5), (12, 20)], seed=10 * step + i)) for i in range(count)]
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return made[rank * count // ranks : (rank + 1) * count // ranks]


def nll(scores: Any, batch: PackedBatch, step: Any) -> tuple[Tensor, dict[str, Any]]:
    return -scores.logprob.sum() / (34 * step.num_microbatches * step.ranks), {}


def whole(tensors: dict[str, Any]) -> Tensors:
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors.items()}


def gradients(o: Opened) -> Tensors:
    return whole({name: p.grad for name, p in o[1].weights.parameters.items() if p.requires_grad})


def update(o: Opened, data: list[PackedBatch], loss: Callable = nll) -> dict[str, Any]:
    """One step and what can be read off it."""
    runtime, handle = o
    runtime.zero_grad(handle)
    result = runtime.forward_backward(handle, data, loss)
    found = {"log_probs": result.log_probs, "losses": result.losses, "gradients": gradients(o)}
    done, norm, zeros = runtime.optimizer_step(handle)
    assert done and handle.optimizer is not None
    return found | {
        "norm": norm, "zeros": zeros, "changed": handle.weights.bytes_changed, "masters": whole(handle.optimizer.masters),
        "fingerprint": handle.weights.fingerprint(), "export": {name: t.clone() for name, t in runtime.export_weights(handle)},
    }  # fmt: skip


def train(dtype: str, steps: int, family: str = "qwen2", **fsdp: Any) -> list[dict[str, Any]]:
    o = opened(dtype, family, **fsdp)
    assert o[1].optimizer is not None
    return [{"masters": whole(o[1].optimizer.masters)}] + [update(o, batches(step)) for step in range(steps)]


def distance(a: Tensors, b: Tensors, scale: Tensors) -> float:
    """|a - b| / |scale|, over all tensors as one."""
    assert a.keys() == b.keys() == scale.keys()
    return float(torch.cat([(a[n] - b[n]).flatten() for n in a]).norm() / torch.cat([scale[n].flatten() for n in a]).norm())


def off(a: dict[str, Any], b: dict[str, Any]) -> float:
    return distance(a["gradients"], b["gradients"], b["gradients"])


def equal(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
