"""A worker of `train_step` that takes whole training steps through the Runtime, on one rank or several: plain, recomputed, offloaded.

It builds one trainer after another as it is told to, because its processes take longer to start than a trainer to build. Every rank runs a
packed row of the same number of tokens, of its own; seconds are the slowest rank's, bytes the largest rank's.
"""

import gc
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.legs import described, serve
from benchmarks.packed import packed_batch
from benchmarks.profiles import synchronize
from benchmarks.train_worker import exact_kernels
from lite.primitive.ops.bridges import Ops
from lite.runtime.config import FsdpConfig, MegatronLiteConfig, OptimizerConfig, RuntimeConfig
from lite.runtime.runtime import Runtime

Leg = Callable[..., dict[str, Any]]


def trainer(spec: dict[str, Any], fsdp: dict[str, Any], ops: Ops) -> Leg:
    """Builds this rank's share of the model. -> what measures it; in a group, on every rank at once."""
    device, grouped = spec["device"], dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    optimizer = OptimizerConfig(lr=1e-30)  # all of a step's work, and weights that stay: losses compare after any number of steps
    backend = MegatronLiteConfig(dtype=spec["dtype"], device=device, fsdp=FsdpConfig(**fsdp), optimizer=optimizer)
    runtime = Runtime(RuntimeConfig(spec["folder"], backend_cfg=backend))
    handle = runtime.build_model(ops)

    def steps(batch: Any, count: int) -> float:
        rows = batch.loss_mask.sum() * ranks
        for _ in range(count):
            runtime.zero_grad(handle)
            result = runtime.forward_backward(handle, batch, lambda scores, *_: (-scores.logprob.sum() / rows, {}))
            runtime.optimizer_step(handle)
        return float(result.losses[0]) * ranks

    def leg(tokens: int, count: int, warmup: int) -> dict[str, Any]:
        batch = packed_batch(tokens, spec["longest"], spec["vocab_size"], spec["seed"] + rank).to(handle.device)
        if device == "cuda":
            resident = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        steps(batch, warmup)
        synchronize(device)
        started = time.perf_counter()
        loss = steps(batch, count)
        synchronize(device)
        found = {"seconds": (time.perf_counter() - started) / count, "loss": loss, "rows_scored": int(batch.loss_mask.sum())}
        if device == "cuda":
            found |= {"peak_bytes": torch.cuda.max_memory_allocated(), "resident_bytes": resident}
        everyone: list[Any] = [found] * ranks
        if grouped:
            dist.all_gather_object(everyone, found)
        worst = {key: max(one[key] for one in everyone) for key in ("seconds", "peak_bytes", "resident_bytes") if key in found}
        return found | worst | {"ranks": ranks}

    return leg


def join(spec: dict[str, Any], rank: int, store: str) -> None:
    """Connects the ranks: before batch-invariant mode, which would leave NCCL a single channel."""
    group: dict[str, Any] = {"init_method": f"file://{store}", "rank": rank, "world_size": spec["ranks"]}
    if spec["device"] == "cuda":
        torch.cuda.set_device(rank)
        # gloo: what is offloaded is added up on the CPU
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank), **group)
    else:
        dist.init_process_group("gloo", **group)


class Rank:
    """Does what every rank is told at once."""

    def __init__(self, spec: dict[str, Any]):
        self.spec, self.ops = spec, exact_kernels(spec["kernels"])
        self.leg: Leg | None = None

    def obey(self, do: str, **command: Any) -> dict[str, Any]:
        return {"leg": self.measure, "build": self.build, "free": self.free}[do](**command)

    def measure(self, **command: int) -> dict[str, Any]:
        assert self.leg is not None
        return self.leg(**command)

    def build(self, fsdp: dict[str, Any]) -> dict[str, Any]:
        self.free()  # nothing of the trainer before may count towards the peak of this one
        self.leg = trainer(self.spec, fsdp, self.ops)
        return {"weight_gradients": ["torch.float32"], "spec": described(self.spec | {"fsdp": fsdp})}

    def free(self) -> dict[str, Any]:
        self.leg = None
        gc.collect()
        if self.spec["device"] == "cuda":
            torch.cuda.empty_cache()
        return {}


def follow(spec: dict[str, Any], number: int, store: str) -> None:
    """Any rank but the first: does what the first one is asked."""
    join(spec, number, store)
    rank = Rank(spec)
    while True:
        command: list[Any] = [None]
        dist.broadcast_object_list(command)
        rank.obey(**command[0])


def build(spec: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    if spec["ranks"] > 1:
        store = f"{tempfile.mkdtemp(prefix='mlite-ranks-')}/store"
        for number in range(1, spec["ranks"]):
            mp.get_context("spawn").Process(target=follow, args=(spec, number, store), daemon=True).start()  # ends with this process
        join(spec, 0, store)
    rank = Rank(spec)

    def handle(command: dict[str, Any]) -> dict[str, Any]:
        if spec["ranks"] > 1:
            dist.broadcast_object_list([command])
        return rank.obey(**command)

    name = torch.cuda.get_device_name() if spec["device"] == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__}, handle


if __name__ == "__main__":
    serve(build)
