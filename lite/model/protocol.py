"""What a model family must provide, as a module `lite.model.<family>.protocol`, and what building one returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from lite.primitive.ckpt.spec import WeightTable
from lite.primitive.modules.decoder import Decoder
from lite.primitive.ops.bridges import Ops


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks by axis. Only 1 each is built so far; more is refused."""

    tp: int = 1
    ep: int = 1
    etp: int | None = None
    pp: int = 1
    vpp: int = 1
    cp: int = 1


@dataclass
class ModelBundle:
    """A built model, parameters not yet loaded.

    module: called as (input_ids, context, labels, temperature, scored_rows, with_entropy, routes) -> TokenScores.
    weights: the table that load, export and sync read.
    layers: how many times the table's {layer} expands.
    """

    module: Decoder
    config: Any
    weights: WeightTable
    layers: int
    routers: list[nn.Module] = field(default_factory=list)


class ModelProtocol(Protocol):
    HF_MODEL_TYPES: tuple[str, ...]
    """config.json's `model_type` values that this family serves."""

    WEIGHTS: WeightTable

    ImplConfig: type
    """Dataclass of the family's own options (`impl_cfg`)."""

    def build_model_config(self, source: Mapping[str, Any], **overrides: Any) -> Any:
        """source: the parsed config.json. overrides: its keys, replaced. Raises InputError for a key that is not honoured."""

    def build_model(self, model_cfg: Any, *, impl_cfg: Any, parallel: ParallelConfig, kernels: Ops, dtype: torch.dtype) -> ModelBundle: ...

    def proxy_config(self, geometry: str, layers: int | None) -> dict[str, Any]:
        """The config.json of a small random model ("tiny"), or of one at the family's real layer geometry ("real")."""
