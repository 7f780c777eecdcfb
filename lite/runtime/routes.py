"""Routes: the experts that a rollout engine chose for each token, recorded there and replayed by the trainer (R3).

One form everywhere: ids [tokens, L, k] of a signed integer, a column a layer by the layer's number in the model, layers without experts
included. -1 is "no record", and never an expert: in the columns of layers without experts, and in the row of a token that the engine did
not run, which the trainer then routes itself. An engine never feeds the last token it sampled, so a record of n tokens may have n - 1 rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lite.errors import InputError
from lite.primitive.modules.decoder import Decoder, DecoderConfig
from lite.primitive.modules.moe import MoE

WHERE = "PackedBatch.routed_experts"


def pack(records: Sequence[Any], lengths: Sequence[int]) -> Tensor:
    """A record [n or more, L, k] a sequence, n its length; the last row may be missing -> [T, L, k] int32, rows past a sequence left out.
    InputError where a sequence has no record, a shorter one, or one of another shape than the first's."""
    if len(records) != len(lengths):
        raise InputError("routes", f"{len(records)} records for {len(lengths)} samples", "give one a sample, or none at all")
    packed: list[Tensor] = []
    for i, (record, length) in enumerate(zip(records, lengths, strict=True)):
        if record is None:
            raise InputError(f"sample {i}", "has no routes, and others have", "record all of them or none")
        rows = torch.as_tensor(record)[:length].to(torch.int32)
        if rows.ndim != 3 or (packed and rows.shape[1:] != packed[0].shape[1:]):
            raise InputError(f"sample {i}", f"its routes have the shape {tuple(rows.shape)}", "give [tokens, layers, k], as in all others")
        if len(rows) < length - 1:
            raise InputError(f"sample {i}", f"its routes have {len(rows)} rows for {length} tokens", "only the last one may be missing")
        packed.append(torch.cat([rows, rows.new_full((length - len(rows), *rows.shape[1:]), -1)]))
    return torch.cat(packed)


def check(routes: Tensor, scored: Tensor | None, config: DecoderConfig) -> None:
    """InputError where routes [T, L, k] do not fit the model, or a scored row (scored[T] bool, None: all) has no record."""
    require_experts(WHERE, config)
    assert config.moe is not None
    layers = [layer for layer, mlp in enumerate(config.mlps) if mlp == "moe"]
    if tuple(routes.shape[1:]) != (config.layers, config.moe.k):
        what = f"has {routes.shape[1]} layers and {routes.shape[2]} experts a token, the model {config.layers} and {config.moe.k}"
        raise InputError(WHERE, what, "give a column for every layer, one without experts too, and none for MTP blocks")
    chosen = routes[:, layers]
    low, top = int(chosen.min()), int(chosen.max())
    if low < -1 or top >= config.moe.experts:
        raise InputError(WHERE, f"{low if low < -1 else top} is none of {config.moe.experts} experts", "check which model recorded them")
    absent = (chosen == -1).all(-1)
    ordered = chosen.sort(-1).values
    alike = ((ordered[..., 1:] == ordered[..., :-1]).any(-1) | (ordered[..., 0] < 0)) & ~absent
    if alike.any():
        row, column = alike.nonzero()[0].tolist()
        what = f"row {row}, layer {layers[column]}: {chosen[row, column].tolist()} are not {config.moe.k} experts"
        raise InputError(WHERE, what, "give each once; an engine whose kernel chooses experts by itself records zeros")
    lost = absent.any(-1) if scored is None else absent.any(-1) & scored
    if lost.any():
        raise InputError(WHERE, f"row {int(lost.nonzero()[0])} is scored and has no record", "record it, or leave it out of loss_mask")


def require_experts(where: str, config: DecoderConfig) -> None:
    if "moe" not in config.mlps:
        raise InputError(where, "the model has no experts", "leave it out")


@contextmanager
def recording(decoder: Decoder) -> Iterator[dict[int, Tensor]]:
    """What the routers choose in a forward inside: layer -> ids [T, k]. The latest forward's; `by_layer` gives it the one form."""
    found: dict[int, Tensor] = {}
    keep = lambda layer, router, inputs, output: found.update({layer: output[1]})  # noqa: E731
    routers = [(layer, block.mlp.router) for layer, block in enumerate(decoder.layers) if isinstance(block.mlp, MoE)]
    hooks = [router.register_forward_hook(partial(keep, layer)) for layer, router in routers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def by_layer(found: dict[int, Tensor], layers: int) -> Tensor:
    """{layer: ids [T, k]} -> [T, L, k] int16."""
    any_ids = next(iter(found.values()))
    routes = any_ids.new_full((any_ids.shape[0], layers, any_ids.shape[1]), -1, dtype=torch.int16)
    for layer, ids in found.items():
        routes[:, layer] = ids.to(torch.int16)
    return routes


def from_vllm(record: Any, config: DecoderConfig) -> Tensor:
    """vLLM's record of a sequence (numpy, unsigned, [n - 1, `num_hidden_layers`, k]) -> the one form, int16.

    vLLM, too, numbers a column by the layer's number in the model (`MoERunner.layer_id`, read off the layer's name), so none moves; MTP
    blocks have numbers past the last column and are not recorded. But it leaves zeros where a layer has no experts.
    """
    if record.shape[1] != config.layers:
        raise InputError("vllm", f"recorded {record.shape[1]} layers, the model has {config.layers}", "give both the same checkpoint")
    routes = torch.from_numpy(record.astype("int16"))
    routes[:, [layer for layer, mlp in enumerate(config.mlps) if mlp != "moe"]] = -1
    return routes
