"""verl's jagged batches as packed rows, and scores back. Nothing is padded on the way."""

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from lite.errors import InputError
from lite.runtime import routes
from lite.runtime.batch import PackedBatch


def pack(micro: TensorDict, replay: bool = False) -> PackedBatch:
    """One row of a micro-batch's sequences. input_ids: nested [B, j]. temperature: one for all or [B]. replay: along the routes that the
    rollout recorded. See `scored` and `recorded`."""
    ids, offsets = micro["input_ids"].values(), micro["input_ids"].offsets()
    lengths = offsets.diff()
    temperature: float | Tensor = tu.get(micro, "temperature", 1.0)
    if isinstance(temperature, Tensor) and temperature.ndim:
        temperature = torch.repeat_interleave(temperature.float(), lengths)
    experts = recorded(micro) if replay else None
    return PackedBatch(ids, torch.roll(ids, -1), tuple(lengths.tolist()), scored(micro), temperature=temperature, routed_experts=experts)


def scored(micro: TensorDict) -> Tensor:
    """[T] bool: the rows whose next token verl reads a logprob of. In RL these are all of a response's tokens, whatever its mask says of
    them (`no_padding_2_padding` slices them out); in SFT those that loss_mask, as long as the sequence, marks."""
    offsets = micro["input_ids"].offsets()
    rows = torch.arange(len(micro["input_ids"].values()), device=offsets.device)
    if "responses" in micro:
        ends = torch.repeat_interleave(offsets[1:], offsets.diff())
        lengths = torch.repeat_interleave(response_lengths(micro).to(offsets), offsets.diff())
        mask = (rows >= ends - lengths - 1) & (rows < ends - 1)
    else:
        mask = torch.roll(micro["loss_mask"].values().bool(), -1)
        mask[offsets[1:] - 1] = False
    if not mask.any():
        mask[0] = True  # verl's losses multiply by their own mask, and a micro-batch without a marked token is theirs to weigh
    return mask


def recorded(micro: TensorDict) -> Tensor:
    """[T, L, k]: routed_experts, nested [B, j, L, k], of all tokens but each sequence's last, whose row verl fills with zeros. Where verl
    pads a batch with samples of its own it fills all rows so: they get k other experts each, since nothing of them is ever marked."""
    if "routed_experts" not in micro:
        raise InputError("engine.router_replay_mode", "R3, and the batch has no routes", "set rollout.enable_rollout_routing_replay=True")
    lengths = micro["input_ids"].offsets().diff().tolist()
    records = [rows[: n - 1].int() for rows, n in zip(micro["routed_experts"].unbind(), lengths, strict=True)]
    for rows, mask in zip(records, micro["response_mask"].unbind(), strict=True):
        if not mask.any():
            rows.copy_(torch.arange(rows.shape[-1]))
    return routes.pack(records, lengths)


def response_lengths(data: TensorDict) -> Tensor:
    """[B]; prompts and responses are nested, or padded with an attention_mask over both."""
    if data["responses"].is_nested:
        return data["responses"].offsets().diff()
    return data["attention_mask"][:, data["prompts"].shape[1] :].sum(1)


def jagged(values: Tensor, micro: TensorDict) -> Tensor:
    """[T] as a nested tensor of the micro-batch's sequences."""
    return torch.nested.nested_tensor_from_jagged(values, micro["input_ids"].offsets())
