"""The check of row invariance: a row's bytes, alone and in every other company."""

from collections.abc import Callable

import torch
from torch import Tensor

from lite.primitive.compare import bits
from lite.primitive.parallel.packing import Seqlens

Kernel = Callable[..., Tensor | tuple[Tensor, ...]]


def _outputs(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def row_violations(kernel: Kernel, *rows: Tensor) -> list[str]:
    """Companies in which some row's bytes differ from those it has in the full call. rows: tensors with one row a token."""
    count = len(rows[0])
    generator = torch.Generator().manual_seed(7)
    order = torch.randperm(count, generator=generator)
    companies = {f"row {i} alone": torch.tensor([i]) for i in range(count)}
    companies |= {f"first {m}": torch.arange(m) for m in (2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 32, 33) if m <= count}
    companies |= {f"last {m}": torch.arange(count - m, count) for m in (3, 5, 8) if m <= count}
    companies |= {"permuted": order, "reversed": torch.arange(count).flip(0), "other neighbours": order[: count // 2]}
    companies["three times as many rows"] = torch.cat([order, torch.arange(count), order.flip(0)])
    companies["beside copies of one row"] = torch.cat([torch.zeros(5, dtype=torch.int64), torch.arange(count)])

    full = _outputs(kernel(*rows))
    found = []
    for name, index in companies.items():
        for whole, part in zip(full, _outputs(kernel(*(r[index].clone() for r in rows))), strict=True):
            if not torch.equal(bits(part), bits(whole[index])):
                found.append(name)
                break
    return found


def cut_violations(attention: Kernel, q: Tensor, k: Tensor, v: Tensor, cuts: list[int], scale: float) -> list[str]:
    """Places to cut one sequence at which its two chunks (the second over the first's cached keys), or the decode of the token after
    the cut, give other bytes than the full prefill."""
    n = len(q)

    def run(first: int, last: int) -> tuple[Tensor, ...]:
        """Queries first .. last - 1 against the keys up to the last one's."""
        seqlens = Seqlens.of([last - first], [last])
        return _outputs(attention(q[first:last].clone(), k[:last].clone(), v[:last].clone(), seqlens, scale))

    full = run(0, n)
    found = []
    for cut in cuts:
        for name, (first, last) in {"prefix": (0, cut), "rest": (cut, n), "decode": (cut, cut + 1)}.items():
            if any(not torch.equal(bits(part), bits(whole[first:last])) for part, whole in zip(run(first, last), full, strict=True)):
                found.append(f"{name} at {cut}")
    return found


def batch_violations(attention: Kernel, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> list[str]:
    """Companies of packed sequences in which one's bytes differ from those it has alone."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]

    def run(chosen: list[int]) -> list[tuple[Tensor, ...]]:
        index = torch.cat([torch.arange(starts[i], starts[i] + lengths[i]) for i in chosen])
        held = [lengths[i] for i in chosen]
        seqlens = Seqlens.of(held, held)
        cu = seqlens.cu_q
        out = _outputs(attention(q[index], k[index], v[index], seqlens, scale))
        return [tuple(t[cu[j] : cu[j + 1]] for t in out) for j in range(len(chosen))]

    every = list(range(len(lengths)))
    alone = [run([i])[0] for i in every]
    companies = {"all": every, "reversed": every[::-1], "twice": every + every, "pairs": every[::2], "rotated": every[1:] + every[:1]}
    return [
        f"sequence {i} in {name}"
        for name, chosen in companies.items()
        for i, got in zip(chosen, run(chosen), strict=True)
        if any(not torch.equal(bits(a), bits(b)) for a, b in zip(got, alone[i], strict=True))
    ]
