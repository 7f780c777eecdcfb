"""`--layers N` of a checkpoint: its first N layers, as a model of their own."""

from pathlib import Path
from typing import Any

from lite.errors import InputError
from lite.primitive.ckpt.hf_config import PER_LAYER
from lite.runtime.config import RuntimeConfig
from lite.runtime.runtime import Runtime


def first_layers(model: Path, layers: int | None) -> dict[str, Any]:
    """The keys of its config.json to override; none for all layers. InputError where it has fewer, or cannot be read as it is."""
    if layers is None:
        return {}
    whole = Runtime(RuntimeConfig(hf_path=model))
    there = whole.protocol.build_model_config(whole.hf_config).layers
    if not 1 <= layers <= there:
        raise InputError("--layers", f"{layers} of a model that has {there}", f"give 1 to {there}")
    return {"num_hidden_layers": layers} | {key: whole.hf_config[key][:layers] for key in PER_LAYER if whole.hf_config.get(key)}
