"""verl's configurations of optimizer and checkpoints as the Runtime has them. What has no counterpart is refused by name, not left out."""

from dataclasses import fields
from typing import Any

from verl.workers.config import McoreOptimizerConfig

from lite.errors import InputError
from lite.runtime.config import OptimizerConfig

TRAINER_STATE = {"model", "optimizer", "extra"}  # one checkpoint holds all three

MAPPED = {
    "_target_", "optimizer", "lr", "min_lr", "weight_decay", "clip_grad", "grad_clip", "betas", "lr_warmup_init", "lr_warmup_steps",
    "lr_warmup_steps_ratio", "lr_decay_steps", "lr_decay_style", "total_training_steps", "override_optimizer_config",
}  # fmt: skip
"""Keys of verl's optimizer configuration that mean something here; the others must be as verl ships them."""


def check_checkpoint(c: Any) -> None:
    """verl's CheckpointConfig."""
    for key in ("save_contents", "load_contents"):
        contents = set(c[key])
        if unknown := contents - TRAINER_STATE - {"hf_model"}:
            raise InputError(f"checkpoint.{key}", f"holds {sorted(unknown)}", f"choose from {sorted(TRAINER_STATE)} and hf_model")
        if contents & TRAINER_STATE not in (TRAINER_STATE, set()):
            raise InputError(f"checkpoint.{key}", f"holds {sorted(contents)}", f"name all of {sorted(TRAINER_STATE)}, or none")
    for key in ("async_save", "save_lora_only"):
        if c[key]:
            raise InputError(f"checkpoint.{key}", "is not built", "set it to False")


def optimizer_config(c: Any) -> OptimizerConfig:
    """verl's McoreOptimizerConfig. As for verl's Megatron engine, steps of warmup that are not given are a share of those of the decay, and
    these are all steps, which the trainer has counted by now."""
    if not isinstance(c, McoreOptimizerConfig):
        raise InputError("optim", f"is a {type(c).__name__}", "add optim=megatron: its keys are the ones that are read")
    decay = c.lr_decay_steps or (c.total_training_steps if c.total_training_steps > 0 else None)
    warmup = c.lr_warmup_steps or 0
    if warmup <= 0:
        warmup = int(c.lr_warmup_steps_ratio * (decay or 0))
    for key in fields(McoreOptimizerConfig):
        if key.name not in MAPPED and (found := getattr(c, key.name)) != key.default:
            raise InputError(f"optim.{key.name}", f"{found!r} is not built", f"leave it at {key.default}")
    if extra := dict(c.override_optimizer_config or {}):
        raise InputError("optim.override_optimizer_config", f"{extra} is not built", "leave it empty")
    if len(c.betas) != 2:
        raise InputError("optim.betas", f"is {list(c.betas)}", "give two")
    return OptimizerConfig(
        optimizer=c.optimizer,
        lr=c.lr,
        min_lr=c.min_lr,
        weight_decay=c.weight_decay,
        clip_grad=c.clip_grad,
        adam_beta1=c.betas[0],
        adam_beta2=c.betas[1],
        lr_warmup_init=c.lr_warmup_init,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=c.lr_decay_style,
    )
