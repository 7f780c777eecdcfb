"""What of a trainer goes into a checkpoint, and how it comes back."""

from pathlib import Path
from typing import Any

from torch import Tensor

from lite.errors import InputError
from lite.primitive.optimizer.master import MasterAdamW
from lite.runtime import checkpoint
from lite.runtime.handle import Handle

FACTS = ("version", "fingerprint", "config", "steps", "schedule", "lr", "ranks", "facts")


def save(handle: Handle, optimizer: MasterAdamW, hf_config: dict[str, Any], path: Path, keep: int, facts: dict[str, Any]) -> Path:
    """See `Runtime.save_checkpoint`."""
    assert handle.schedule is not None
    version = handle.weights.require()
    held = {
        "version": version,
        "fingerprint": handle.weights.fingerprint(),
        "config": hf_config,
        "steps": optimizer.steps(),
        "schedule": handle.schedule.last_epoch,
        "lr": [group["lr"] for group in optimizer.adamw.param_groups],
        "ranks": checkpoint.ranks(),
        "facts": facts,
    }
    tensors = _training_state(handle, optimizer) | checkpoint.random_state()
    return checkpoint.save(path, version, tensors, held, keep)


def load(handle: Handle, optimizer: MasterAdamW, hf_config: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """See `Runtime.load_checkpoint`."""
    folder = path if (path / checkpoint.STATE).exists() else checkpoint.latest(path)
    if folder is None:
        return None
    assert handle.schedule is not None
    held = checkpoint.read_facts(folder)
    if missing := [name for name in FACTS if name not in held]:
        raise InputError(folder, f"is no checkpoint of a trainer: its {checkpoint.STATE} lacks {missing[0]!r}", checkpoint.way_back(folder))
    for key in {*held["config"], *hf_config}:
        if held["config"].get(key) != hf_config.get(key):
            was, now = held["config"].get(key), hf_config.get(key)
            raise InputError(folder, f"was written by a model with {key} = {was!r}, this one has {now!r}", "resume with the same model")
    handle.weights.version = None
    if bool(held["version"]) != bool(held["steps"]):
        raise InputError(folder, f"is of version {held['version']} with no steps of the optimizer", checkpoint.way_back(folder))
    optimizer.set_steps(held["steps"])
    # under another number of ranks no stream has its old place; then each keeps the one it has
    random = checkpoint.random_state() if held["ranks"] == checkpoint.ranks() else {}
    checkpoint.load(folder, _training_state(handle, optimizer) | random)
    checkpoint.set_random_state(random)
    handle.schedule.last_epoch = held["schedule"]
    for group, lr in zip(optimizer.adamw.param_groups, held["lr"], strict=True):
        group["lr"] = lr
    optimizer.zero_grad()
    handle.weights.deploy(optimizer.masters, held["version"])
    if handle.weights.fingerprint() != held["fingerprint"]:
        handle.weights.version = None
        raise InputError(folder, "the weights are not those that were saved", checkpoint.way_back(folder))
    return dict(held["facts"])


def _training_state(handle: Handle, optimizer: MasterAdamW) -> dict[str, Tensor]:
    frozen = {f"deployed.{name}": p for name, p in handle.weights.parameters.items() if name not in optimizer.masters}
    return optimizer.tensors() | frozen
