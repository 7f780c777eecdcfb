"""On two Hopper GPUs: both ranks of a sharded trainer agree with vLLM at every policy, at Qwen3-8B's layer geometry, 4 layers.

    python -m pytest tests/gpu/test_two_gpus_engine.py -m gpu        # with vLLM 0.26 and this package's wheel installed

tests/integration/test_sharded_trainer.py is the same on two CPU processes with the embedded engine.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lite.runtime.config import FsdpConfig, MegatronLiteConfig, OptimizerConfig, RuntimeConfig
from lite.runtime.runtime import Runtime
from tests.against_engine import assert_exact, follow_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 or importlib.util.find_spec("vllm") is None,
        reason="needs two Hopper GPUs and vLLM 0.26: run `python -m pytest tests/gpu/test_two_gpus_engine.py -m gpu` there",
    ),
]
PROGRAM = Path(__file__).with_name("engine_process.py")


def generate(folder: Path, bundle: Path) -> None:
    subprocess.run([sys.executable, "-P", str(PROGRAM), str(folder), str(bundle)], check=True)


def train(rank: int, folder: Path, scratch: Path) -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", f"file://{scratch}/store", rank=rank, world_size=2, device_id=device)
    from lite.primitive.kernels.vllm import enter_batch_invariance
    from lite.primitive.ops.bridges import vllm_ops

    enter_batch_invariance()
    backend = MegatronLiteConfig(fsdp=FsdpConfig(recompute=True), optimizer=OptimizerConfig(lr=1e-4))
    runtime = Runtime(RuntimeConfig(folder, backend_cfg=backend))
    handle = runtime.build_model(vllm_ops("FLASH_ATTN"))
    torch.save(follow_engine(runtime, handle, scratch, generate, updates=2), scratch / str(rank))
    dist.destroy_process_group()


def test_both_ranks_agree_with_vllm_at_every_policy(tmp_path: Path, record) -> None:
    from lite.acceptance.proxy import write_proxy

    folder = tmp_path / "qwen3"
    write_proxy("qwen3", folder, geometry="real", layers=4, dtype=torch.bfloat16, seed=0)
    mp.spawn(train, (folder, tmp_path), nprocs=2)  # type: ignore[attr-defined]
    ranks = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    record["valid tokens on each path"] = assert_exact(ranks)
    record["mismatch of each rank, policy and path"] = [
        [[path["mismatch"] for path in found.values()] for found in findings[:-1]] for findings in ranks
    ]
    record["engine"] = "FLASH_ATTN, full_decode graphs, prompts of 1 to 700 tokens"
    record["mismatch of a stale engine"] = [findings[-1]["score"]["mismatch"] for findings in ranks]
