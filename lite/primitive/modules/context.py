"""What a mixer may ask of the caller: the state of the sequences whose tokens it was given."""

from typing import Protocol

from torch import Tensor

from lite.primitive.parallel.packing import Seqlens


class SequenceContext(Protocol):
    """State belongs to the caller: none in training (`PackedSequences`), a cache in an engine. Contexts choose no kernels."""

    @property
    def positions(self) -> Tensor:
        """Position of each token in its own sequence, [T] int64."""

    @property
    def seqlens(self) -> Seqlens:
        """Of the tokens in hand, as queries and as keys."""

    def extend_kv(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Seqlens]:
        """Remembers k, v[T, Hk, D] of the tokens in hand. -> (keys, values [Tk, Hk, D] of every token so far, sequence after
        sequence; the lengths of both)."""

    def conv_history(self, layer: int, x: Tensor, width: int) -> Tensor | None:
        """Remembers x[T, C]. -> the width - 1 rows before each sequence's tokens in hand, [S, width - 1, C], zeros before its start;
        None where no sequence has any."""

    def extend_scan(self, layer: int, xbc: Tensor, dt: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor | None, Seqlens]:
        """Remembers xbc[T, C] and dt[T, H]. -> (both again with, before each sequence's rows, those since its last chunk boundary; the
        state [S, H, P, N] at that boundary, None where all stand in their first chunk; the lengths: queries in hand, keys given)."""

    def keep_boundary(self, layer: int, boundary: Tensor) -> None:
        """Remembers each sequence's state [S, H, P, N] at its last chunk boundary."""
