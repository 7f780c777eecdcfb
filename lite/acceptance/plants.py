"""Known errors, planted on one side where the real fault would arise, before scoring. A proof that does not see them proves nothing."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lite.errors import InputError, nearest
from lite.primitive.ckpt.spec import Skip, Weight, WeightTable
from lite.primitive.compare import bits
from lite.primitive.modules.decoder import DecoderConfig
from lite.runtime.batch import PackedBatch
from lite.runtime.rollout.engine import Trajectory
from lite.runtime.rollout.paged_cache import CachedSequences


@dataclass(frozen=True)
class Plant:
    """kind, what it does, and the hooks of the proof that it changes; a hook left alone is the identity."""

    kind: str
    what: str
    skip_sync: bool = False
    table: Callable[[WeightTable], WeightTable] = lambda table: table  # the trainer's load
    batch: Callable[[PackedBatch], PackedBatch] = lambda batch: batch  # the trainer's micro-batches
    rollout: Callable[[list[Trajectory]], list[Trajectory]] = lambda trajectories: trajectories
    context: type[CachedSequences] = CachedSequences  # how the embedded engine reads and writes its cache


def _fuses(entry: Weight | Skip, kind: str) -> bool:
    """Whether the plant finds its parameter here: an expert's w13 may also be its up projection alone."""
    suffixes, count = FUSED[kind]
    return isinstance(entry, Weight) and entry.native.endswith(suffixes) and len(entry.hf) == count


FUSED = {"qkv-order": (("qkv.weight",), 3), "gate-up-order": (("gate_up.weight", "experts.w13"), 2)}  # kind -> names' ends, parts


def _order(kind: str, order: tuple[int, ...]) -> Callable[[WeightTable], WeightTable]:
    """Fuses the parts of each such parameter in another order."""

    def change(table: WeightTable) -> WeightTable:
        def swapped(entry: Weight | Skip) -> Weight | Skip:
            if isinstance(entry, Skip) or not _fuses(entry, kind) or (rows := entry.rows) is None:
                return entry
            return replace(entry, hf=tuple(entry.hf[i] for i in order), rows=lambda c: tuple(rows(c)[i] for i in order))

        return tuple(swapped(entry) for entry in table)

    return change


def _one_ulp(trajectories: list[Trajectory]) -> list[Trajectory]:
    middle = len(trajectories) // 2
    logprobs = trajectories[middle].logprobs.clone()
    bits(logprobs)[len(logprobs) // 2] ^= 1
    return [*trajectories[:middle], replace(trajectories[middle], logprobs=logprobs), *trajectories[middle + 1 :]]


def _mask_shift(batch: PackedBatch) -> PackedBatch:
    assert batch.loss_mask is not None
    return replace(batch, loss_mask=batch.loss_mask.roll(1))


def _position_shift(batch: PackedBatch) -> PackedBatch:
    positions = [torch.arange(n) - (torch.arange(n) >= max(n // 2, 1)).long() for n in batch.seq_lens]
    return replace(batch, position_ids=torch.cat(positions))


def _packing_leak(batch: PackedBatch) -> PackedBatch:
    if len(batch.seq_lens) < 2:
        return batch
    first, second, *rest = batch.seq_lens
    return replace(batch, seq_lens=(first + second, *rest), position_ids=batch.context.positions)


class _ShiftedChunks(CachedSequences):
    def boundary(self, past: int, chunk: int) -> int:
        return super().boundary(past, chunk) + (past % chunk > 1)


class _CoarseStates(CachedSequences):
    def keep_boundary(self, layer: int, boundary: Tensor) -> None:
        super().keep_boundary(layer, boundary.bfloat16().float())


PLANTS = {
    plant.kind: plant
    for plant in (
        Plant("stale-weights", "the engine misses a weight sync", skip_sync=True),
        Plant("one-ulp", "one bit of one rollout logprob is flipped", rollout=_one_ulp),
        Plant("qkv-order", "the trainer's load fuses k|q|v", table=_order("qkv-order", (1, 0, 2))),
        Plant("gate-up-order", "the trainer's load fuses up|gate", table=_order("gate-up-order", (1, 0))),
        Plant("mask-shift", "the trainer's loss mask is one row late", batch=_mask_shift),
        Plant("position-shift", "the trainer's positions are one too low in each sequence's second half", batch=_position_shift),
        Plant("chunk-shift", "the engine replays a chunk from its second row on", context=_ShiftedChunks),
        Plant("state-bf16", "the engine keeps the state at a chunk boundary in bf16", context=_CoarseStates),
        Plant("packing-leak", "the trainer ignores the boundary of the first two sequences of a row", batch=_packing_leak),
    )
}


def find_plant(kind: str) -> Plant:
    if kind not in PLANTS:
        raise InputError("--plant", f"{kind!r} is not known", nearest(kind, PLANTS))
    return PLANTS[kind]


def check_applies(plant: Plant, weights: WeightTable, config: DecoderConfig, engine: str, updates: int, samples: int) -> None:
    """InputError (exit 2) where the plant has no meaning for this run. weights: the family's table."""
    if plant.kind in FUSED and not any(_fuses(entry, plant.kind) for entry in weights):
        raise InputError("--plant", f"{plant.kind} has no meaning for this family: it fuses no such parameter", "choose another kind")
    if plant.kind == "position-shift" and config.rotary is None:
        raise InputError("--plant", "position-shift has no meaning for this family: it has no rotary", "choose another kind")
    if plant.kind == "stale-weights" and updates == 0:
        raise InputError("--plant", "stale-weights needs an update to miss", "set --updates to at least 1")
    if plant.context is not CachedSequences:
        if not any(isinstance(e, Weight) and e.native.endswith("A_log") for e in weights):
            raise InputError("--plant", f"{plant.kind} has no meaning for this family: it scans nothing", "choose another kind")
        if engine != "embedded":
            raise InputError("--plant", f"{plant.kind} is planted in the embedded engine's cache", "leave --engine out")
    if plant.kind == "packing-leak" and samples < 2:
        raise InputError("--plant", "packing-leak needs two sequences in a row", "raise --groups or --samples")
