"""Packing: sequences of unequal length in one row of tokens (thd), no padding, boundaries given by cumulative lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lite.errors import InputError


def cumulative_lengths(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """[0, l0, l0 + l1, ...] int32, as attention kernels want it."""
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def positions_of(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """0 .. l - 1 for each sequence, one row of int64."""
    return torch.cat([torch.arange(length, device=device) for length in lengths])


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Sample indices by micro-batch, in the order given, each as full as the budget allows.

    Any split gives the same logprob bytes; it decides memory and speed only.
    """
    batches: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if length > token_budget:
            raise InputError(f"sample {index}", f"{length} tokens do not fit the micro-batch budget of {token_budget}", "raise the budget")
        if length > room:
            batches.append([])
            room = token_budget
        batches[-1].append(index)
        room -= length
    return batches


@dataclass(frozen=True)
class PackedSequences:
    """The sequence context of training: whole sequences, nothing before them. A mixer's keys are the row's own.

    positions[T] int64, cu_seqlens[S + 1] int32.
    """

    positions: Tensor
    cu_seqlens: Tensor

    def extend_kv(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """k, v[T, Hk, D] of the tokens in hand -> (all keys, all values, cu_seqlens of the queries, cu_seqlens of the keys)."""
        return k, v, self.cu_seqlens, self.cu_seqlens
