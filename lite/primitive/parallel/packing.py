"""Packing: sequences of unequal length in one row of tokens (thd), no padding, boundaries given by cumulative lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lite.errors import InputError


def cumulative_lengths(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """[0, l0, l0 + l1, ...] int32, as attention kernels want it."""
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


class Seqlens(NamedTuple):
    """Lengths of the queries and keys of packed sequences: cu_q, cu_k[S + 1] int32 on the device, the longest of each on the host (a
    kernel that asked the device for it would wait for it in every layer)."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int

    @classmethod
    def of(cls, lengths_q: Sequence[int], lengths_k: Sequence[int], device: torch.device | str = "cpu") -> "Seqlens":
        """One tensor for both where the lengths are the same: who asks whether all rows are queries need not ask the device."""
        cu_q = cumulative_lengths(lengths_q, device)
        cu_k = cu_q if list(lengths_k) == list(lengths_q) else cumulative_lengths(lengths_k, device)
        return cls(cu_q, cu_k, max(lengths_q), max(lengths_k))


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

    positions[T] int64.
    """

    positions: Tensor
    seqlens: Seqlens

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "PackedSequences":
        return cls(positions_of(lengths, device), Seqlens.of(lengths, lengths, device))

    def extend_kv(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Seqlens]:
        """See `SequenceContext.extend_kv`."""
        return k, v, self.seqlens

    def conv_history(self, layer: int, x: Tensor, width: int) -> None:
        """See `SequenceContext.conv_history`."""

    def extend_scan(self, layer: int, xbc: Tensor, dt: Tensor, chunk: int) -> tuple[Tensor, Tensor, None, Seqlens]:
        """See `SequenceContext.extend_scan`."""
        return xbc, dt, None, self.seqlens

    def keep_boundary(self, layer: int, boundary: Tensor) -> None:
        """See `SequenceContext.keep_boundary`."""
