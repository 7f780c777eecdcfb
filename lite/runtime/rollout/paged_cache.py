"""The embedded engine's cache: pages of PAGE tokens, and the sequence context that reads and writes them."""

import torch
from torch import Tensor

from lite.primitive.parallel.packing import Seqlens

PAGE = 16


class PagedCache:
    """What layers store for each token, in pages, and one state a request, under the number of its first page. Pools are made when a layer
    first stores something, in the shape it stores."""

    def __init__(self, pages: int, device: torch.device):
        self.device = device
        self.pages = pages
        self.free = list(range(pages))
        self.pools: dict[tuple[int, str], Tensor] = {}

    def pool(self, layer: int, what: str, like: Tensor) -> Tensor:
        """A row a token, each of the shape of like's rows."""
        return self._made((layer, what), like, self.pages * PAGE)

    def states(self, layer: int, like: Tensor) -> Tensor:
        """A row a page, each of the shape of like's rows."""
        return self._made((layer, "state"), like, self.pages)

    def _made(self, key: tuple[int, str], like: Tensor, rows: int) -> Tensor:
        if key not in self.pools:
            # NaN in what was never written: a read of it cannot pass unseen
            self.pools[key] = like.new_full((rows, *like.shape[1:]), torch.nan)
        return self.pools[key]

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
        self.cache, self.sequences = cache, sequences
        new = [n for _, _, n in sequences]
        self.positions = torch.cat([torch.arange(past, past + new) for _, past, new in sequences]).to(device)
        self.new_rows = torch.cat([cache.rows(pages, past, past + new) for pages, past, new in sequences]).to(device)
        self.all_rows = self._rows_from([0] * len(sequences))
        self.seqlens = Seqlens.of(new, new, device)
        self.kv_seqlens = Seqlens.of(new, [past + new for _, past, new in sequences], device)
        self.first_pages = torch.tensor([pages[0] for pages, _, _ in sequences], device=device)

    def _rows_from(self, starts: list[int]) -> Tensor:
        """Pool rows of each sequence's tokens from its start on, those in hand included."""
        rows = [self.cache.rows(pages, start, past + new) for (pages, past, new), start in zip(self.sequences, starts, strict=True)]
        return torch.cat(rows).to(self.cache.device)

    def extend_kv(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Seqlens]:
        """See `SequenceContext.extend_kv`."""
        keys, values = self.cache.pool(layer, "k", k), self.cache.pool(layer, "v", v)
        keys[self.new_rows], values[self.new_rows] = k, v
        return keys[self.all_rows], values[self.all_rows], self.kv_seqlens

    def conv_history(self, layer: int, x: Tensor, width: int) -> Tensor:
        """See `SequenceContext.conv_history`."""
        pool = self.cache.pool(layer, "conv", x)
        pool[self.new_rows] = x
        history = x.new_zeros(len(self.sequences), width - 1, x.shape[1])
        for i, (pages, past, _) in enumerate(self.sequences):
            kept = min(past, width - 1)
            history[i, width - 1 - kept :] = pool[self.cache.rows(pages, past - kept, past).to(x.device)]
        return history

    def boundary(self, past: int, chunk: int) -> int:
        """Where the chunk begins in which a sequence's next token stands; its rows are given to the scan from there on."""
        return past // chunk * chunk

    def extend_scan(self, layer: int, xbc: Tensor, dt: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor | None, Seqlens]:
        """See `SequenceContext.extend_scan`."""
        stored = [self.cache.pool(layer, what, rows) for what, rows in (("xbc", xbc), ("dt", dt))]
        for pool, rows in zip(stored, (xbc, dt), strict=True):
            pool[self.new_rows] = rows
        starts = [self.boundary(past, chunk) for _, past, _ in self.sequences]
        rows = self._rows_from(starts)
        given = [past + new - start for (_, past, new), start in zip(self.sequences, starts, strict=True)]
        seqlens = Seqlens.of([new for _, _, new in self.sequences], given, xbc.device)
        return stored[0][rows], stored[1][rows], self._boundary_states(layer, starts), seqlens

    def _boundary_states(self, layer: int, starts: list[int]) -> Tensor | None:
        """Zeros for sequences in their first chunk, None where all are: a page's last owner may have left anything in it."""
        if not any(starts):
            return None
        states = self.cache.pools[layer, "state"][self.first_pages]
        first = torch.tensor(starts, device=states.device) == 0
        return torch.where(first.view(-1, *[1] * (states.dim() - 1)), 0.0, states)

    def keep_boundary(self, layer: int, boundary: Tensor) -> None:
        """See `SequenceContext.keep_boundary`."""
        self.cache.states(layer, boundary)[self.first_pages] = boundary
