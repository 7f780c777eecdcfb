"""On two Hopper GPUs: a model sharded over both trains as one GPU does, with vLLM's kernels at Qwen3-8B's layer geometry, 2 layers.

    python -m pytest tests/gpu/test_two_gpus.py -m gpu        # with vLLM 0.26 installed

Limits, set before any run: see tests/unit/runtime/test_fsdp.py. Every micro-batch has one gradient wherever it runs (kernels and
backwards are deterministic), so what differs is the order in which four of them are added in fp32. Among the sharded runs nothing does.
"""

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

from lite.primitive.ckpt.hf_weights import fingerprint
from lite.primitive.compare import bits
from lite.runtime.batch import PackedBatch
from lite.runtime.config import FsdpConfig, MegatronLiteConfig, OptimizerConfig, RuntimeConfig
from lite.runtime.runtime import Runtime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 or importlib.util.find_spec("vllm") is None,
        reason="needs two Hopper GPUs and vLLM 0.26: run `python -m pytest tests/gpu/test_two_gpus.py -m gpu` there",
    ),
]

GRADIENT, UPDATE = 1e-6, 1e-2
STEPS, MICRO_BATCHES, EVERY = 3, 4, 64  # every 64th row of each tensor is compared
SETTINGS: dict[str, dict[str, Any]] = {
    "sharded": {}, "recompute": {"recompute": True}, "kept gathered": {"reshard_after_forward": False},
    "optimizer offloaded": {"optimizer_offload": True}, "all offloaded": {"recompute": True, "param_offload": True},
}  # fmt: skip


def sampled(tensors: dict[str, Any]) -> torch.Tensor:
    """One fp32 vector of every EVERYth row of each, on the CPU."""
    found = []
    for tensor in tensors.values():
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.to("cuda").full_tensor()
        found.append(tensor[::EVERY].flatten().cpu())
    return torch.cat(found)


def train(folder: Path, **fsdp: Any) -> dict[str, Any]:
    """STEPS updates of four unequal micro-batches; two ranks take two each."""
    from lite.primitive.kernels.vllm import enter_batch_invariance
    from lite.primitive.ops.bridges import vllm_ops

    enter_batch_invariance()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    backend = MegatronLiteConfig(fsdp=FsdpConfig(**fsdp), optimizer=OptimizerConfig(lr=1e-4))
    runtime = Runtime(RuntimeConfig(folder, backend_cfg=backend))
    handle = runtime.build_model(vllm_ops("FLASH_ATTN"))
    assert handle.optimizer is not None
    found: dict[str, Any] = {"start": sampled(handle.optimizer.masters)}
    torch.cuda.reset_peak_memory_stats()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        draw = lambda n, generator=generator: torch.randint(151936, (n,), generator=generator).tolist()
        made = [PackedBatch.from_samples([(draw(5 + i), draw(700)), (draw(90), draw(33 * i + 1))]) for i in range(MICRO_BATCHES)]
        rows = sum(int(batch.loss_mask.sum()) for batch in made)  # type: ignore[union-attr]
        mine = made[rank * MICRO_BATCHES // ranks : (rank + 1) * MICRO_BATCHES // ranks]
        runtime.zero_grad(handle)
        if step == 0:
            found["scored"] = [t.cpu() for t in runtime.forward_backward(handle, mine, forward_only=True).log_probs]
        result = runtime.forward_backward(handle, mine, lambda scores, *_, rows=rows: (-scores.logprob.sum() / rows, {}))
        if step == 0:
            found["actor"] = [t.cpu() for t in result.log_probs]
            found["gradient"] = sampled({name: p.grad for name, p in handle.weights.parameters.items()})
        done, found["norm"], _ = runtime.optimizer_step(handle)
        assert done and handle.weights.bytes_changed > 0
    found |= {"masters": sampled(handle.optimizer.masters), "fingerprint": handle.weights.fingerprint()}
    tensors = handle.optimizer.tensors()
    found["moments on"] = {tensor.device.type for name, tensor in tensors.items() if not name.startswith("master")}
    if not fsdp.get("param_offload"):  # what verl's OFFLOAD does around a rollout
        runtime.to(handle, "cpu")
        assert not any(tensor.is_cuda for tensor in handle.optimizer.tensors().values())
        runtime.to(handle, "cuda")
    found["masters after a visit to the CPU"] = sampled(handle.optimizer.masters)
    return found | {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def fingerprint_of_queued_work(rank: int) -> bool:
    """Whether it waits for what this rank has queued, on another stream than the default one."""
    with torch.cuda.stream(torch.cuda.Stream()):
        weight = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]  # cycles: a fifth of a second
        weight.fill_(rank + 1.0)
        found = fingerprint([("w", weight)])
    return found == fingerprint([("w", torch.full((1 << 20,), rank + 1.0))])


def follow(rank: int, folder: Path, scratch: str) -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(rank)
    store, device = f"file://{scratch}/store", torch.device("cuda", rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", store, rank=rank, world_size=2, device_id=device)
    torch.save(fingerprint_of_queued_work(rank), f"{scratch}/queued.{rank}")
    for name, fsdp in SETTINGS.items():
        torch.save(train(folder, **fsdp), f"{scratch}/{name}.{rank}")
        torch.cuda.empty_cache()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each setting gave, by rank; "plain" is one process."""
    from lite.acceptance.proxy import write_proxy

    folder = tmp_path_factory.mktemp("fsdp") / "qwen3"
    write_proxy("qwen3", folder, geometry="real", layers=2, dtype=torch.bfloat16, seed=0)
    found = {"plain": [train(folder)]}
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(follow, (folder, scratch), nprocs=2)  # type: ignore[attr-defined]
        for name in ["queued", *SETTINGS]:
            found[name] = [torch.load(f"{scratch}/{name}.{rank}") for rank in range(2)]
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("name", SETTINGS)
def test_forward_bytes_are_those_of_one_process(runs, name: str) -> None:
    for path in ("scored", "actor"):
        ranks = runs[name][0][path] + runs[name][1][path]
        assert all(same(a, b) for a, b in zip(ranks, runs["plain"][0][path], strict=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_and_masters_are_within_the_limits(runs, record, name: str) -> None:
    plain, sharded = runs["plain"][0], runs[name][0]
    gradient = float((sharded["gradient"] - plain["gradient"]).norm() / plain["gradient"].norm())
    update = float((sharded["masters"] - plain["masters"]).norm() / (plain["masters"] - plain["start"]).norm())
    record[name] = {"gradient_error": gradient, "update_error": update, "peak_gib": sharded["peak_gib"]}
    record["plain"] = {"peak_gib": plain["peak_gib"]}
    assert same(sharded["start"], plain["start"]) and gradient < GRADIENT and update < UPDATE
    assert runs[name][0]["fingerprint"] == runs[name][1]["fingerprint"]


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "sharded"])
def test_memory_is_saved_without_a_bit_of_difference(runs, name: str) -> None:
    base, other = runs["sharded"][0], runs[name][0]
    assert same(other["gradient"], base["gradient"])
    assert same(other["masters"], base["masters"]) and other["fingerprint"] == base["fingerprint"]


@pytest.mark.parametrize("name", SETTINGS)
def test_moments_rest_where_they_were_asked_to_and_a_visit_to_the_cpu_changes_no_bit(runs, name: str) -> None:
    for rank in runs[name]:
        assert rank["moments on"] == {"cpu" if "offloaded" in name else "cuda"}
        assert same(rank["masters after a visit to the CPU"], rank["masters"])


def test_a_fingerprint_waits_for_what_its_rank_has_queued(runs) -> None:
    assert runs["queued"] == [True, True]


def test_rounded_gradients_would_pass_the_limit(runs) -> None:
    """The limit's own check: what FSDP2 would do without `grad_dtype`."""
    gradient = runs["plain"][0]["gradient"]
    assert float((gradient.bfloat16().float() - gradient).norm() / gradient.norm()) > 100 * GRADIENT
