"""Where vLLM's model holds the tensors of a checkpoint: under names of its own, fused by rows, experts stacked."""

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lite.model.protocol import ModelBundle
from lite.primitive.ckpt.hf_weights import deployed_name
from lite.primitive.ckpt.spec import parts

EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate_proj|up_proj|down_proj)\.weight")
STACKS = {"gate_proj": "w13_weight", "up_proj": "w13_weight", "down_proj": "w2_weight"}


Rows = tuple[str, int, int]
"""(checkpoint name, first row, end) in the parameter that the trainer fuses it into, which vLLM fuses alike; of experts the rows of all
matrices below each other."""


def weight_rows(bundle: ModelBundle) -> list[Rows]:
    """Of every tensor of the model's checkpoint."""

    def rows(native: str) -> int:
        return bundle.module.get_parameter(native).shape[0]

    return [(p.hf, p.start, rows(p.native) if p.stop is None else p.stop) for p in parts(bundle.weights, bundle.config, bundle.layers)]


def held(model: Any, rows: list[Rows]) -> Iterator[tuple[str, Tensor]]:
    """-> (name, tensor) as inference reads it, see `deployed`."""
    parameters = dict(model.named_parameters())
    for hf, start, stop in rows:
        if expert := EXPERT.fullmatch(hf):
            stack = parameters[f"{_vllm_name(model, expert[1])}.routed_experts.{STACKS[expert[2]]}"]
            yield hf, stack.detach().flatten(0, 1)[start:stop]
        else:
            yield deployed_name(hf), parameters[_vllm_name(model, hf)].detach()[start:stop]


def _vllm_name(model: Any, hf: str) -> str:
    """By the table with which vLLM itself loads a checkpoint."""
    (name,) = model.hf_to_vllm_mapper.apply_list([hf])
    return name
