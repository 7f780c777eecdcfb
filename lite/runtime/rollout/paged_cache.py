"""The embedded engine's cache: pages of PAGE tokens, and the sequence context that reads and writes them."""

import torch
from torch import Tensor

from lite.primitive.parallel.packing import Seqlens

PAGE = 16


class PagedCache:
    """Keys and values of every layer in pages. Layers' pools are made when a layer first stores something, in the shape it stores."""

    def __init__(self, pages: int, device: torch.device):
        self.device = device
        self.pages = pages
        self.free = list(range(pages))
        self.pools: dict[int, tuple[Tensor, Tensor]] = {}

    def pool(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.pools:
            shape = (self.pages * PAGE, *k.shape[1:])
            # NaN in what was never written: a read of it cannot pass unseen
            self.pools[layer] = (k.new_full(shape, torch.nan), v.new_full(shape, torch.nan))
        return self.pools[layer]

    def grow(self, pages: list[int], tokens: int) -> bool:
        """Extends a request's pages to hold that many tokens. False, and nothing taken, where there are too few."""
        more = -(-tokens // PAGE) - len(pages)
        if more > len(self.free):
            return False
        pages += [self.free.pop() for _ in range(more)]
        return True

    def release(self, pages: list[int]) -> None:
        self.free += pages
        pages.clear()

    def rows(self, pages: list[int], start: int, stop: int) -> Tensor:
        """Pool rows of a request's tokens start .. stop."""
        offsets = torch.arange(start, stop)
        return torch.tensor(pages)[offsets // PAGE] * PAGE + offsets % PAGE


class CachedSequences:
    """The sequence context of one engine step: for each sequence, `past` tokens cached and `new` tokens in hand."""

    def __init__(self, cache: PagedCache, sequences: list[tuple[list[int], int, int]]):
        """sequences: (pages, past, new) each."""
        device = cache.device
        self.cache = cache
        self.positions = torch.cat([torch.arange(past, past + new) for _, past, new in sequences]).to(device)
        self.new_rows = torch.cat([cache.rows(pages, past, past + new) for pages, past, new in sequences]).to(device)
        self.all_rows = torch.cat([cache.rows(pages, 0, past + new) for pages, past, new in sequences]).to(device)
        self.seqlens = Seqlens.of([new for _, _, new in sequences], [past + new for _, past, new in sequences], device)

    def extend_kv(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Seqlens]:
        """See `SequenceContext.extend_kv`."""
        keys, values = self.cache.pool(layer, k, v)
        keys[self.new_rows], values[self.new_rows] = k, v
        return keys[self.all_rows], values[self.all_rows], self.seqlens
