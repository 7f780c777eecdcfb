"""Between checkpoint tensors and parameters, both ways, by the model's weight table."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lite.errors import InputError
from lite.primitive.ckpt.spec import Part, WeightTable, parts, skip_reason
from lite.primitive.transfer import arrived, stream_of

AT_ONCE, PIECE = 64, 1 << 24  # of a fingerprint: tensors hashed side by side, bytes of one that are on the CPU at a time


@dataclass
class LoadReport:
    """What a load did, by checkpoint name. A load that leaves anything missing, unexpected or misshapen has raised instead."""

    loaded: list[str] = field(default_factory=list)
    converted: dict[str, str] = field(default_factory=dict)  # name -> "float16 -> bfloat16"
    skipped: dict[str, str] = field(default_factory=dict)  # name -> reason

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def load_weights(
    table: WeightTable,
    config: Any,
    layers: int,
    parameters: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    write: Callable[[Part, Tensor], Tensor],
    where: object,
) -> LoadReport:
    """Streams tensors to `write(part, tensor)`; every parameter's every part must come exactly once, finite and of the right shape. What
    write returns, the whole tensor where it now is, is looked through for NaN: on a GPU that is faster than before the copy.

    parameters gives shapes and dtypes; raises InputError that names the tensor.
    """
    expected = {part.hf: part for part in parts(table, config, layers)}
    report = LoadReport()
    unexpected = []
    seen: set[str] = set()
    for name, tensor in tensors:
        part = expected.get(name)
        if part is None:
            reason = skip_reason(table, config, name)
            if reason is None:
                unexpected.append(name)
            else:
                report.skipped[name] = reason
            continue
        if name in seen:
            raise InputError(where, f"gives {name!r} twice", "give each tensor once")
        seen.add(name)
        target = part.of(parameters[part.native])
        if tensor.shape != target.shape:
            raise InputError(where, f"{name!r} is {tuple(tensor.shape)}, the config says {tuple(target.shape)}", "correct the config")
        if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise InputError(where, f"{name!r} holds {_dtype(tensor)}", "give a bf16, fp16 or fp32 checkpoint")
        if tensor.dtype != target.dtype:
            report.converted[name] = f"{_dtype(tensor)} -> {_dtype(target)}"
        written = write(part, tensor)
        if not torch.isfinite(written).all():
            bad = int((~torch.isfinite(written)).sum())
            raise InputError(where, f"{name!r} holds NaN or Inf in {bad} places as {_dtype(written)}", "use an intact checkpoint")
        report.loaded.append(name)
    _require_none([name for name in expected if name not in seen], unexpected, where)
    return report


def check_names(table: WeightTable, config: Any, layers: int, names: Iterable[str], where: object) -> None:
    """What `load_weights` asks of a checkpoint's names, before anything is read."""
    expected, found = {part.hf for part in parts(table, config, layers)}, set(names)
    unexpected = [name for name in found - expected if skip_reason(table, config, name) is None]
    _require_none(sorted(expected - found), sorted(unexpected), where)


def _require_none(missing: list[str], unexpected: list[str], where: object) -> None:
    if missing or unexpected:
        problems = [f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
                    for kind, names in (("missing", missing), ("unexpected", unexpected)) if names]  # fmt: skip
        raise InputError(where, "tensors do not match the model: " + "; ".join(problems), "check config.json against the weights")


def export_weights(table: WeightTable, config: Any, layers: int, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) in the table's order; fused and stacked parameters come apart as views."""
    for part in parts(table, config, layers):
        yield part.hf, part.of(parameters[part.native].detach())


def deployed(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensors as every inference engine holds them: the decay of a Mamba layer as A = -exp(A_log) in fp32, made on the
    tensor's own device, the rest as it is."""
    for name, tensor in tensors:
        transformed = deployed_name(name) != name
        yield deployed_name(name), -torch.exp(tensor.float()) if transformed else tensor


def deployed_name(name: str) -> str:
    return name.removesuffix("_log") if name.endswith(".A_log") else name


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 over name, dtype, shape and bytes of every tensor, in the order of the names; one number for one policy's weights."""
    tensors = iter(tensors)
    digests: list[tuple[str, bytes]] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing does not hold the interpreter
        while some := list(islice(tensors, AT_ONCE)):  # not all: a sharded model's are gathered for this
            digests += pool.map(_digest, some, [stream_of(tensor) for _, tensor in some])
    return hashlib.sha256(b"".join(digest for _, digest in sorted(digests))).hexdigest()


def _digest(item: tuple[str, Tensor], stream: torch.cuda.Stream | None) -> tuple[str, bytes]:
    name, tensor = item
    found = hashlib.sha256(f"{name} {_dtype(tensor)} {tuple(tensor.shape)}".encode())
    with torch.cuda.stream(stream):
        for piece in tensor.contiguous().view(-1).view(torch.uint8).split(PIECE):
            here = piece.to("cpu", non_blocking=True)
            arrived(here.device)
            found.update(here.numpy().data)
    return name, found.digest()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
