"""Reading a checkpoint folder of safetensors, sharded or not, one tensor at a time, and writing one."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lite.errors import InputError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 4 << 30


def _unique_keys(path: Path) -> Any:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise InputError(path, f"names {key!r} twice", "keep one entry")
            seen[key] = value
        return seen

    return build


def _constant(name: str) -> float:
    """Infinity is a limit that is none (time_step_limit); NaN is nothing."""
    if name == "NaN":
        raise ValueError("it holds NaN")
    return float(name)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object whose keys are unique at every level."""
    try:
        content = json.loads(path.read_text(), object_pairs_hook=_unique_keys(path), parse_constant=_constant)
    except FileNotFoundError:
        raise InputError(path, "no such file", "give the folder of a Hugging Face checkpoint") from None
    except (ValueError, IsADirectoryError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(path, f"is not JSON ({error})", "download it again") from None
    if not isinstance(content, dict):
        raise InputError(path, "is not a JSON object", "download it again")
    return content


def _open(shard: Path) -> Any:
    if not shard.is_file():
        raise InputError(shard, "this shard is missing", "download it; the index names it")
    try:
        return safe_open(shard, framework="pt")
    except SafetensorError as error:
        raise InputError(shard, f"is truncated or no safetensors file ({error})", "download it again") from None


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor, shard after shard. The whole layout is checked before the first one is read."""
    for handle in _opened(folder):
        for name in handle.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
            yield name, handle.get_tensor(name)


def tensor_names(folder: Path) -> list[str]:
    """Of every tensor, by the headers alone; the layout is checked."""
    return [name for handle in _opened(folder) for name in handle.keys()]  # noqa: SIM118


def _opened(folder: Path) -> list[Any]:
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise InputError(folder / INDEX, "has no weight_map", "download it again")
        shards = {folder / name for name in weight_map.values()}
    elif (folder / SINGLE).exists():
        weight_map, shards = None, {folder / SINGLE}
    else:
        raise InputError(folder, f"holds neither {INDEX} nor {SINGLE}", "give the folder of a safetensors checkpoint")

    opened = {shard: _open(shard) for shard in sorted(shards)}
    if weight_map is not None:
        for name, shard_name in weight_map.items():
            if name not in opened[folder / shard_name].keys():  # noqa: SIM118
                raise InputError(folder / shard_name, f"lacks {name!r}, which the index places there", "download the checkpoint again")
        for shard, handle in opened.items():
            for name in handle.keys():  # noqa: SIM118
                if weight_map.get(name) != shard.name:
                    raise InputError(shard, f"holds {name!r}, which the index places in {weight_map.get(name)}", "download it again")
    return list(opened.values())


def write_checkpoint(
    folder: Path, config: dict[str, Any], tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES, beside: Path | None = None
) -> None:
    """Writes config.json and safetensors shards, streaming: no more than a shard is held. The folder appears whole or not at all.

    beside: a checkpoint whose tokenizer and generation files are copied along.
    """
    if folder.exists() and not (folder / "config.json").exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(folder, "exists and is no checkpoint", "name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        shards: list[dict[str, int]] = []
        for shard in _shards(tensors, shard_bytes):
            save_file(shard, scratch / f"shard-{len(shards)}", metadata={"format": "pt"})
            shards.append({name: tensor.numel() * tensor.element_size() for name, tensor in shard.items()})
        _name_shards(scratch, shards)
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in beside.iterdir() if beside else ():
            if file.is_file() and file.name != "config.json" and ".safetensors" not in file.name:
                shutil.copy2(file, scratch / file.name)
        for file in scratch.iterdir():
            file.chmod(0o644)
        scratch.chmod(0o755)  # mkdtemp made it private
        if folder.exists():
            old = folder.rename(scratch.with_name(scratch.name + ".old"))
            try:
                scratch.rename(folder)
            except OSError:
                old.rename(folder)
                raise
            shutil.rmtree(old)
        else:
            scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    held = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > shard_bytes:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor.detach().contiguous().cpu()
        held += size
    yield shard


def _name_shards(scratch: Path, shards: list[dict[str, int]]) -> None:
    """Final names and the index, known once the number of shards is. shards: bytes by tensor name."""
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for i, name in enumerate(names):
        os.replace(scratch / f"shard-{i}", scratch / name)
    if count > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(sum(shard.values()) for shard in shards)
        (scratch / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
