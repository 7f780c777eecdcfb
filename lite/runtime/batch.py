"""A micro-batch: several sequences in one row of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lite.errors import InputError
from lite.primitive.parallel.packing import PackedSequences
from lite.runtime.routes import pack


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of N sequences, no padding.

    input_ids[T], labels[T] int64: labels[t] is the token after input_ids[t] in its sequence (anything where it is not scored).
    seq_lens: N lengths that add up to T.
    loss_mask[T] bool: the rows whose label is scored; None scores all. A response's first token is scored at the prompt's last row.
    position_ids[T]: None counts from 0 in each sequence.
    temperature: one for all, or [T] fp32.
    routed_experts[T, L, k]: the experts to take in place of the routers' own choice (`lite.runtime.routes`); int16, int32 or int64, L the
    model's layers, -1 for none. None: the routers choose.
    """

    input_ids: Tensor
    labels: Tensor
    seq_lens: tuple[int, ...]
    loss_mask: Tensor | None = None
    position_ids: Tensor | None = None
    temperature: float | Tensor = 1.0
    routed_experts: Tensor | None = None

    def __post_init__(self) -> None:
        tokens = len(self.input_ids)
        if not self.seq_lens or min(self.seq_lens) < 1:
            raise InputError("PackedBatch.seq_lens", f"holds an empty sequence: {self.seq_lens}", "leave out sequences without tokens")
        if sum(self.seq_lens) != tokens:
            raise InputError("PackedBatch.seq_lens", f"adds up to {sum(self.seq_lens)} for {tokens} tokens", "give each sequence's length")
        for name in ("labels", "loss_mask", "position_ids", "routed_experts"):
            value = getattr(self, name)
            if value is not None and len(value) != tokens:
                raise InputError(f"PackedBatch.{name}", f"has {len(value)} entries for {tokens} tokens", "give one a token")
        temperature = torch.as_tensor(self.temperature)
        if not ((temperature > 0) & torch.isfinite(temperature)).all() or temperature.shape not in ((), (tokens,)):
            raise InputError("PackedBatch.temperature", "is not above 0, or not one a token", "give what the tokens were sampled at")
        if self.loss_mask is not None and self.loss_mask.dtype != torch.bool:
            raise InputError("PackedBatch.loss_mask", f"is {self.loss_mask.dtype}", "give booleans: integers would index rows")
        if self.loss_mask is not None and not self.loss_mask.any():
            raise InputError("PackedBatch.loss_mask", "marks no token", "an empty mask scores and proves nothing; mark the responses")
        r = self.routed_experts
        if r is not None and (r.ndim != 3 or r.dtype not in (torch.int16, torch.int32, torch.int64)):
            what = f"is {r.dtype} of shape {tuple(r.shape)}"
            raise InputError("PackedBatch.routed_experts", what, "give int16, int32 or int64 of [tokens, layers, k]")

    @classmethod
    def from_samples(
        cls, samples: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float = 1.0, routes: Sequence[Any] | None = None
    ) -> "PackedBatch":
        """Packs (prompt ids, response ids) pairs; the responses' tokens are the ones scored. routes: a record a sample (`routes.pack`)."""
        ids, labels, mask = [], [], []
        for i, (prompt, response) in enumerate(samples):
            if not prompt:
                raise InputError(f"sample {i}", "the prompt is empty", "give at least one token to predict the response from")
            if not response:
                raise InputError(f"sample {i}", "the response is empty", "leave the sample out")
            sequence = [*prompt, *response]
            ids += sequence
            labels += [*sequence[1:], 0]
            mask += [False] * (len(prompt) - 1) + [True] * len(response) + [False]
        lens = tuple(len(prompt) + len(response) for prompt, response in samples)
        routed = None if routes is None else pack(routes, lens)
        return cls(torch.tensor(ids), torch.tensor(labels), lens, torch.tensor(mask), temperature=temperature, routed_experts=routed)

    def to(self, device: torch.device) -> "PackedBatch":
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)  # type: ignore[arg-type]

    @property
    def context(self) -> PackedSequences:
        packed = PackedSequences.of(self.seq_lens, self.input_ids.device)
        return packed if self.position_ids is None else replace(packed, positions=self.position_ids)

    @property
    def temperatures(self) -> Tensor:
        """[T] fp32."""
        if isinstance(self.temperature, Tensor):
            return self.temperature.float().expand(self.input_ids.shape)
        return torch.full(self.input_ids.shape, self.temperature, dtype=torch.float32, device=self.input_ids.device)

    @property
    def scored_rows(self) -> Tensor | None:
        return None if self.loss_mask is None else self.loss_mask.nonzero()[:, 0]
