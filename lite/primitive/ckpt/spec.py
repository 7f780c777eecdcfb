"""The declarative weight table: how a checkpoint's tensors become a model's parameters, read by load, export, sync and report."""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Weight:
    """One parameter (or one per layer, where names hold {layer}).

    native   the module's name for it
    hf       the checkpoint's names of its parts, stacked along axis 0 in this order
    rows     config -> rows of each part; needed where there is more than one part
    when     config -> whether this model has it
    shard_axis  the axis that tensor parallelism splits, None for replicated
    """

    native: str
    hf: tuple[str, ...]
    rows: Callable[[Any], tuple[int, ...]] | None = None
    when: Callable[[Any], bool] = lambda config: True
    shard_axis: int | None = None


@dataclass(frozen=True)
class Skip:
    """Checkpoint tensors (a glob) that are left out on purpose, and why."""

    hf: str
    reason: str
    when: Callable[[Any], bool] = lambda config: True


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor's place: rows start .. stop of a parameter (stop None: all of it)."""

    hf: str
    native: str
    start: int
    stop: int | None


WeightTable = tuple[Weight | Skip, ...]


def parts(table: WeightTable, config: Any, layers: int) -> list[Part]:
    """Every checkpoint tensor that this config's model has, in the table's order, layers expanded."""
    found = []
    for entry in table:
        if isinstance(entry, Skip) or not entry.when(config):
            continue
        for layer in range(layers) if "{layer}" in entry.native else [0]:
            start = 0
            for name, rows in zip(entry.hf, entry.rows(config) if entry.rows else (None,) * len(entry.hf), strict=True):
                stop = None if rows is None else start + rows
                found.append(Part(name.format(layer=layer), entry.native.format(layer=layer), start, stop))
                start = stop or 0
    return found


def skip_reason(table: WeightTable, config: Any, hf_name: str) -> str | None:
    """Why the table leaves this checkpoint tensor out, None where it does not."""
    for entry in table:
        if isinstance(entry, Skip) and entry.when(config) and fnmatchcase(hf_name, entry.hf):
            return entry.reason
    return None
