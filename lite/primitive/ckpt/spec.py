"""The declarative weight table: how a checkpoint's tensors become a model's parameters, read by load, export, sync and report."""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Weight:
    """One parameter (or one per layer, where names hold {layer}).

    native   the module's name for it
    hf       the checkpoint's names of its parts, stacked along axis 0 in this order; with {expert} in them, expert after expert
    rows     config -> rows of each part; needed where there is more than one part
    when     config -> whether this model has it
    at       config, layer -> whether that layer has it
    experts  config -> how many experts {expert} counts
    unit_axis  where the checkpoint's tensor has an axis of 1 that the parameter lacks
    shard_axis  the axis that tensor parallelism splits, None for replicated
    """

    native: str
    hf: tuple[str, ...]
    rows: Callable[[Any], tuple[int, ...]] | None = None
    when: Callable[[Any], bool] = lambda config: True
    at: Callable[[Any, int], bool] = lambda config, layer: True
    experts: Callable[[Any], int] = lambda config: 1
    unit_axis: int | None = None
    shard_axis: int | None = None


@dataclass(frozen=True)
class Skip:
    """Checkpoint tensors (a glob) that are left out on purpose, and why."""

    hf: str
    reason: str
    when: Callable[[Any], bool] = lambda config: True


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor's place: rows start .. stop of a parameter (stop None: all of it), whose leading axes count as one where it has
    more than two (experts' matrices below each other)."""

    hf: str
    native: str
    start: int
    stop: int | None
    unit_axis: int | None = None

    def of(self, parameter: Tensor) -> Tensor:
        """The part in a parameter, or in anything of its shape (a gradient, a master), as the checkpoint shapes it; a view."""
        found = as_rows(parameter)[self.start : self.stop]
        return found if self.unit_axis is None else found.unsqueeze(self.unit_axis)


def as_rows(parameter: Tensor) -> Tensor:
    """The rows that parts are counted in; experts lie one after another. A view."""
    return parameter.flatten(0, -2) if parameter.ndim > 2 else parameter


WeightTable = tuple[Weight | Skip, ...]


def parts(table: WeightTable, config: Any, layers: int) -> list[Part]:
    """Every checkpoint tensor that this config's model has, in the table's order, layers and experts expanded."""
    found = []
    for entry in table:
        if isinstance(entry, Skip) or not entry.when(config):
            continue
        for layer in range(layers) if "{layer}" in entry.native else [0]:
            if not entry.at(config, layer):
                continue
            native = entry.native.format(layer=layer)
            start = 0
            for expert in range(entry.experts(config)):
                for name, rows in zip(entry.hf, entry.rows(config) if entry.rows else (None,) * len(entry.hf), strict=True):
                    stop = None if rows is None else start + rows
                    found.append(Part(name.format(layer=layer, expert=expert), native, start, stop, entry.unit_axis))
                    start = stop or 0
    return found


def skip_reason(table: WeightTable, config: Any, hf_name: str) -> str | None:
    """Why the table leaves this checkpoint tensor out, None where it does not."""
    for entry in table:
        if isinstance(entry, Skip) and entry.when(config) and fnmatchcase(hf_name, entry.hf):
            return entry.reason
    return None
