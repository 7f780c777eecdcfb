"""Reading and writing checkpoint folders: every layout loads to the same bytes, and nothing half-written appears."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lite.primitive.ckpt.safetensors_files import INDEX, SINGLE, read_tensors, write_checkpoint
from lite.primitive.ckpt.spec import parts
from tests.checkpoints import DTYPES, FAMILIES, TIES, build, checkpoint, engine, hf_config, make_tensors, same, trainer

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def exported(folder: Path, dtype: str) -> dict[str, Tensor]:
    runtime, handle = trainer(folder, dtype)
    return dict(runtime.export_weights(handle))


@pytest.mark.parametrize("shard_bytes", [1, 20_000, 1 << 30])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_loaded_checkpoint_is_exported_byte_for_byte(tmp_path: Path, name: str, dtype: str, shard_bytes: int) -> None:
    """One file or many shards (a shard a tensor, at shard_bytes 1): export(load(x)) is x."""
    tensors = make_tensors(name, DTYPES[dtype])
    folder = tmp_path / "model"
    write_checkpoint(folder, hf_config(name), tensors.items(), shard_bytes)
    files = sorted(folder.glob("*.safetensors"))
    assert (len(files) == len(tensors)) == (shard_bytes == 1) and (len(files) == 1) == (shard_bytes == 1 << 30)
    assert identical(dict(read_tensors(folder)), tensors)
    assert identical(exported(folder, dtype), tensors)


def test_shards_keep_to_their_size_and_the_index_is_true(tmp_path: Path) -> None:
    tensors = make_tensors("qwen3")
    write_checkpoint(tmp_path / "model", {}, tensors.items(), shard_bytes=20_000)
    index = json.loads((tmp_path / "model" / INDEX).read_text())
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    contents = {file.name: load_file(file) for file in files}
    assert {name: file for file, shard in contents.items() for name in shard} == index["weight_map"]
    assert all(len(shard) == 1 or sum(t.nbytes for t in shard.values()) <= 20_000 for shard in contents.values())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_of_another_dtype_is_rounded_once_and_reported(tmp_path: Path, stored: torch.dtype, dtype: str) -> None:
    tensors = make_tensors("llama", stored)
    write_checkpoint(tmp_path / "model", hf_config("llama"), tensors.items())
    runtime, handle = trainer(tmp_path / "model", dtype)
    assert identical(dict(runtime.export_weights(handle)), {n: t.to(DTYPES[dtype]) for n, t in tensors.items()})
    spelled = [str(d).removeprefix("torch.") for d in (stored, DTYPES[dtype])]
    changed = {name: " -> ".join(spelled) for name in tensors} if stored != DTYPES[dtype] else {}
    assert handle.load_report.converted == changed


@pytest.mark.parametrize("name", TIES)
def test_a_tied_head_may_be_in_the_file_or_not(tmp_path: Path, name: str) -> None:
    """Both kinds of checkpoint exist. The one in the file is left out by name; the model still has one parameter for both."""
    tensors = make_tensors(name, tie_word_embeddings=True)
    assert HEAD not in tensors
    for there in (False, True):
        folder = tmp_path / f"head-{there}"
        given = tensors | ({HEAD: tensors[EMBED].clone()} if there else {})
        write_checkpoint(folder, hf_config(name, tie_word_embeddings=True), given.items())
        runtime, handle = trainer(folder)
        assert identical(dict(runtime.export_weights(handle)), tensors)
        assert handle.load_report.skipped == ({HEAD: "tied to the embedding"} if there else {})
        assert handle.bundle.module.head.weight is handle.bundle.module.embed.weight


@pytest.mark.parametrize("name", FAMILIES)
def test_the_load_report_names_every_tensor_once(name: str) -> None:
    tensors = make_tensors(name)
    _, handle = trainer(checkpoint(name))
    assert sorted(handle.load_report.loaded) == sorted(tensors)
    assert handle.load_report.as_dict() == dataclasses.asdict(handle.load_report)
    assert handle.load_report.converted == handle.load_report.skipped == {}


def numbered(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """-> (checkpoint tensors whose row r of a projection is filled with a number of its own, the same as parameters of the model)."""
    bundle = build(hf_config(name), torch.float32, name)
    shapes = make_tensors(name, torch.float32)
    tensors, first = {}, 0
    for key, tensor in shapes.items():
        rows = torch.arange(first, first + len(tensor)).float()
        tensors[key] = rows.view(-1, *[1] * (tensor.ndim - 1)).expand_as(tensor).contiguous()
        first += len(tensor)
    native = {n: p.detach() for n, p in bundle.module.named_parameters()}
    return tensors, native


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_rows_stand_in_the_order_that_attention_splits_them(tmp_path: Path, name: str) -> None:
    """NeMo-RL#2802: with grouped queries a fused projection went back in the wrong row order, silently, as every row has the same width.
    Rows are numbered: 4 query heads, then 2 key heads, then 2 value heads, each head's rows together; then the way back."""
    tensors, native = numbered(name)
    write_checkpoint(tmp_path / "model", hf_config(name), tensors.items())
    runtime, handle = trainer(tmp_path / "model", "fp32")
    loaded = dict(handle.module.named_parameters())
    for key in [key for key in tensors if key.endswith("q_proj.weight")]:
        q, k, v = (tensors[key.replace("q_proj", f"{part}_proj")] for part in "qkv")
        fused_name = f"layers.{key.split('.')[2]}.mixer.qkv.weight"
        fused = loaded.pop(fused_name)
        assert [len(t) for t in (q, k, v)] == [4 * 16, 2 * 16, 2 * 16]
        assert same(fused, torch.cat([q, k, v])) and fused.shape == native[fused_name].shape
        heads = fused.view(8, 16, -1)[:, :, 0]
        assert heads[0, 0] == q[0, 0] and heads[4, 0] == k[0, 0] and heads[6, 15] == v[15, 0]
    for key in [key for key in tensors if key.endswith("mlp.gate_proj.weight")]:
        gate, up = tensors[key], tensors[key.replace("gate_proj", "up_proj")]
        assert same(loaded.pop(f"layers.{key.split('.')[2]}.mlp.gate_up.weight"), torch.cat([gate, up]))
    assert not [left for left in loaded if left.endswith(("qkv.weight", "gate_up.weight"))]
    assert identical(dict(runtime.export_weights(handle)), tensors)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_covers_every_row_of_every_parameter_once(name: str) -> None:
    """A row that no part names would keep what the allocator left there, and load without complaint."""
    bundle = build(hf_config(name), torch.float32, name)
    covered = {n: torch.zeros(p.shape, dtype=torch.int64) for n, p in bundle.module.named_parameters()}
    for part in parts(bundle.weights, bundle.config, bundle.layers):
        part.of(covered[part.native]).add_(1)
    assert all(bool((rows == 1).all()) for rows in covered.values())


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("shard_bytes", [1, 1 << 30])
@pytest.mark.parametrize("before", [True, False])
def test_a_write_that_breaks_off_leaves_the_old_folder_and_nothing_else(tmp_path: Path, before: bool, shard_bytes: int) -> None:
    tensors = make_tensors("llama")
    if before:
        write_checkpoint(tmp_path / "model", hf_config("llama"), tensors.items())
    old = tree(tmp_path)

    def breaking() -> Iterator[tuple[str, Tensor]]:
        yield from list(tensors.items())[:5]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "model", hf_config("llama"), breaking(), shard_bytes)
    assert tree(tmp_path) == old and bool(old) == before
    assert [p.name for p in tmp_path.iterdir()] == (["model"] if before else [])


def test_a_second_write_replaces_the_first_whole(tmp_path: Path) -> None:
    """Shards of the first write must not stay beside the single file of the second."""
    first, second = make_tensors("llama", seed=1), make_tensors("llama", seed=2)
    write_checkpoint(tmp_path / "model", hf_config("llama"), first.items(), shard_bytes=1)
    write_checkpoint(tmp_path / "model", hf_config("llama"), second.items())
    assert {p.name for p in (tmp_path / "model").iterdir()} == {SINGLE, "config.json"}
    assert identical(dict(read_tensors(tmp_path / "model")), second)


def test_a_saved_model_opens_again_with_its_tokenizer_and_override(tmp_path: Path) -> None:
    """save_hf over the very folder that was loaded: the files beside the weights come along, the weights are the deployed ones."""
    folder = tmp_path / "model"
    write_checkpoint(folder, hf_config("qwen3") | {"torch_dtype": "float32"}, make_tensors("qwen3", torch.float32).items())
    (folder / "tokenizer.json").write_text("{}")
    save_file({"x": torch.ones(1)}, folder / "model-00009-of-00009.safetensors")
    runtime, handle = trainer(folder)
    runtime.save_hf(handle, folder)
    assert {p.name for p in folder.iterdir()} == {SINGLE, "config.json", "tokenizer.json"}
    saved = json.loads((folder / "config.json").read_text())
    assert saved["dtype"] == "bfloat16" and "torch_dtype" not in saved
    assert engine(folder).fingerprint() == handle.weights.fingerprint()
