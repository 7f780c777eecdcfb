"""A trainer's state on disk, in folders that are whole or not there: a kill at any moment leaves the one before.

Tensors go through torch.distributed.checkpoint in its safetensors form, so shards written by one world size are read by another and
nothing is ever unpickled; the rest is JSON. A folder is written under a name that no reader takes, flushed, and renamed.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lite.errors import InputError

STATE, STEP, PARTIAL = "state.json", "step-", ".partial"
START_AGAIN = "no earlier one is there to go on from: start again"


def save(root: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], keep: int) -> Path:
    """Writes root/step-N and then deletes all but the `keep` latest. facts: what JSON can hold. Every rank calls it with its shards.

    Raises InputError where root holds this step or a later one: a run that went back would be taken for the one that went on.
    """
    if keep < 1:
        raise InputError("keep", f"is {keep}", "keep at least this one")
    text = json.dumps(facts, indent=1)
    final = root / f"{STEP}{step:08d}"
    if (last := latest(root)) is not None and last.name >= final.name:
        raise InputError(root, f"holds {last.name} already", f"go on from it, or save step {step} elsewhere")
    if final.exists():
        raise InputError(final, "is in the way and no checkpoint", "move it away or delete it")
    scratch = root / f"{final.name}{PARTIAL}"
    barrier()
    if first_rank():
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    barrier()
    writer = dcp.HuggingFaceStorageWriter(str(scratch), save_distributed=True)
    with _one_process_is_meant():
        dcp.save(dict(tensors), storage_writer=writer, no_dist=not _distributed())
    barrier()
    if first_rank():
        _write(scratch / STATE, text)
        _flush(scratch)
        os.rename(scratch, final)
        _flush(root)
        for old in whole(root)[:-keep]:
            # its name goes first: half-deleted it must not be taken for whole
            shutil.rmtree(old.rename(old.with_name(old.name + PARTIAL)))
    barrier()
    return final


def whole(root: Path) -> list[Path]:
    """The checkpoints in root, oldest first. What a kill left half-written has another name; what holds no STATE, which is written last,
    is somebody else's."""
    return sorted(path for path in root.glob(f"{STEP}{8 * '[0-9]'}") if (path / STATE).is_file())


def latest(root: Path) -> Path | None:
    return next(reversed(whole(root)), None)


def way_back(folder: Path) -> str:
    """What to do about a damaged checkpoint: readers take the latest that is there."""
    before = [path.name for path in whole(folder.parent) if path.name < folder.name]
    return f"move it away or delete it to go on from {before[-1]}" if before else START_AGAIN


def read_facts(folder: Path) -> dict[str, Any]:
    """What `save` was given beside the tensors. InputError where the folder is no checkpoint."""
    try:
        facts = json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        raise InputError(folder, f"is no checkpoint of a trainer ({error})", way_back(folder)) from None
    return dict(facts)


def load(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills the tensors in place, whatever world size wrote them. InputError where one is missing, misshapen or damaged."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        held = reader.read_metadata().state_dict_metadata
        for name, tensor in tensors.items():
            if name not in held:
                raise InputError(folder, f"lacks {name!r}", "resume with the model and optimizer that wrote it")
            if held[name].size != tensor.shape:  # type: ignore[union-attr]
                found = tuple(held[name].size)  # type: ignore[union-attr]
                raise InputError(folder, f"{name!r} is {found}, this model's is {tuple(tensor.shape)}", "resume with the same model")
        with _one_process_is_meant():
            dcp.load(dict(tensors), storage_reader=reader, no_dist=not _distributed())
    except InputError:
        raise
    except Exception as error:  # safetensors and DCP raise types of their own for a file that is cut off or changed
        raise InputError(folder, f"cannot be read ({type(error).__name__}: {error})", way_back(folder)) from None


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """Makes the folder's names durable: without it a power cut may lose a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """DCP warns of a lone process each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def first_rank() -> bool:
    return not _distributed() or dist.get_rank() == 0


def barrier() -> None:
    if _distributed():
        dist.barrier()


def ranks() -> int:
    return dist.get_world_size() if _distributed() else 1


def random_state() -> dict[str, Tensor]:
    """torch's global random streams, of the CPU and of this process's GPU, [n] uint8 each, under names of this rank."""
    rank = dist.get_rank() if _distributed() else 0
    states = {f"random.{rank}.cpu": torch.get_rng_state()}
    return states | ({f"random.{rank}.cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(states: Mapping[str, Tensor]) -> None:
    for name, state in states.items():
        {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}[name.rpartition(".")[2]](state)
