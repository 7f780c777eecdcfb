"""What a mixer may ask of the caller: the state of the sequences whose tokens it was given."""

from typing import Protocol

from torch import Tensor

from lite.primitive.parallel.packing import Seqlens


class SequenceContext(Protocol):
    """State belongs to the caller: none in training (`PackedSequences`), a cache in an engine. Contexts choose no kernels."""

    @property
    def positions(self) -> Tensor:
        """Position of each token in its own sequence, [T] int64."""

    def extend_kv(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Seqlens]:
        """Remembers k, v[T, Hk, D] of the tokens in hand. -> (keys, values [Tk, Hk, D] of every token so far, sequence after
        sequence; the lengths of both)."""
