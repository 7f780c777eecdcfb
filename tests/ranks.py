"""Several processes of one group on this machine, forked: what the parent has built and imported is there at once."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes


def _run(rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    torch.save(function(*arguments), f"{folder}/{rank}")
    dist.destroy_process_group()


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """function(*arguments) in `world` processes of a gloo group. -> what each returned, by rank; raises what the first to fail raised."""
    with tempfile.TemporaryDirectory(prefix="mlite-ranks-") as folder:
        start_processes(_run, (world, folder, function, arguments), nprocs=world, start_method="fork")
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(world)]
