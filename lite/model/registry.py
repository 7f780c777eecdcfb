"""Finds the family that serves a checkpoint's `model_type`. Families are the folders beside this file; there is no list to keep."""

import importlib
import pkgutil
from pathlib import Path
from typing import cast

from lite.errors import InputError, nearest
from lite.model.protocol import ModelProtocol


def families() -> list[str]:
    here = Path(__file__).parent
    return sorted(m.name for m in pkgutil.iter_modules([str(here)]) if m.ispkg and (here / m.name / "protocol.py").exists())


def family(name: str) -> ModelProtocol:
    """The family of that name; InputError names the nearest where there is none."""
    if name not in families():
        raise InputError("model family", f"{name!r} is not known", nearest(name, families()))
    return cast(ModelProtocol, importlib.import_module(f"lite.model.{name}.protocol"))


def family_of(model_type: str | None) -> str:
    """The family that serves config.json's model_type."""
    served = {hf_type: name for name in families() for hf_type in family(name).HF_MODEL_TYPES}
    if not isinstance(model_type, str) or model_type not in served:
        raise InputError("config.json", f"model_type {model_type!r} is not supported", nearest(str(model_type), served))
    return served[model_type]
