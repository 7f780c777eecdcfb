"""A damaged or foreign checkpoint ends in one line that names the file or the tensor, never in a model that is partly loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lite.errors import InputError
from lite.primitive.ckpt.safetensors_files import INDEX, SINGLE, read_tensors, write_checkpoint
from lite.runtime.config import MegatronLiteConfig, RuntimeConfig
from lite.runtime.runtime import Runtime
from tests.checkpoints import hf_config, make_tensors

NORM, DOWN, EXTRA = "model.norm.weight", "model.layers.1.mlp.down_proj.weight", "model.layers.2.mlp.down_proj.weight"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", hf_config("llama"), make_tensors("llama").items(), shard_bytes=20_000)
    return tmp_path / "model"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", hf_config("llama"), make_tensors("llama").items())
    return tmp_path / "model"


def refused(folder: Path, *said: str) -> None:
    with pytest.raises(InputError) as caught:
        Runtime(RuntimeConfig(str(folder), backend_cfg=MegatronLiteConfig(device="cpu"))).build_model()
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in said), message


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> dict[str, str]:
    """Applies change to the index's weight_map in place. -> the map as it was."""
    index = json.loads((folder / INDEX).read_text())
    before = dict(index["weight_map"])
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    return before


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def test_a_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refused(sharded, shard.name, "missing")


@pytest.mark.parametrize("left", [0, 4, 100, -1])
@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_a_truncated_file(layout: str, left: int, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(layout)
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:left])
    refused(folder, file.name, "truncated")


def test_a_file_that_is_something_else(single: Path) -> None:
    (single / SINGLE).write_text("<!DOCTYPE html><html>404: not found, sent with status 200</html>")
    refused(single, SINGLE, "no safetensors file")


def test_no_weights_at_all(single: Path) -> None:
    (single / SINGLE).unlink()
    refused(single, SINGLE, INDEX)


def test_an_index_that_names_one_tensor_twice(sharded: Path) -> None:
    """json.loads would keep the last of the two without a word."""
    text = (sharded / INDEX).read_text()
    (sharded / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{NORM}": "model-00001-of-00002.safetensors",'))
    refused(sharded, INDEX, NORM, "twice")


def test_an_index_that_places_a_tensor_in_a_shard_without_it(sharded: Path) -> None:
    def swap(weight_map: dict[str, str]) -> None:
        weight_map[NORM] = next(shard for shard in weight_map.values() if shard != weight_map[NORM])

    edit_index(sharded, swap)
    refused(sharded, NORM, "lacks")


def test_a_shard_that_holds_what_the_index_places_elsewhere(sharded: Path) -> None:
    """A stale copy in an earlier shard: whichever is read last would win."""
    shard = sorted(sharded.glob("*.safetensors"))[0]
    save_file(load_file(shard) | {NORM: torch.ones(48)}, shard)
    refused(sharded, shard.name, NORM, "places in model-")


def test_a_shard_that_holds_what_the_index_does_not_know(sharded: Path) -> None:
    before = edit_index(sharded, lambda weight_map: weight_map.pop(NORM))
    refused(sharded, before[NORM], NORM)


def test_the_layout_is_checked_before_the_first_tensor_is_read(sharded: Path) -> None:
    """A sync that stops halfway leaves an engine without weights; a fault that can be known beforehand must be."""
    last = sorted(sharded.glob("*.safetensors"))[-1]
    save_file(load_file(last) | {"model.stray": torch.ones(1)}, last)
    with pytest.raises(InputError, match=r"model\.stray"):
        next(read_tensors(sharded))


@pytest.mark.parametrize("index", ["{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 3}}', "[]", "{", "\xff"])
def test_an_index_that_is_none(sharded: Path, index: str) -> None:
    (sharded / INDEX).write_text(index, encoding="latin-1")
    refused(sharded, INDEX)


@pytest.mark.parametrize("config", ["{", "[1]", "", '{"a": 1, "a": 2}'])
def test_a_config_that_is_not_json(single: Path, config: str) -> None:
    (single / "config.json").write_text(config)
    refused(single, "config.json")


def test_no_config(single: Path) -> None:
    (single / "config.json").unlink()
    refused(single, "config.json", "no such file")


def test_no_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "no such folder")


@pytest.mark.parametrize(("model_type", "hint"), [("qwen33", "'qwen3'"), ("bert", "llama"), (None, "None")])
def test_a_model_type_that_no_family_serves(single: Path, model_type: str | None, hint: str) -> None:
    config = json.loads((single / "config.json").read_text()) | {"model_type": model_type}
    (single / "config.json").write_text(json.dumps(config))
    refused(single, "model_type", str(model_type), hint)


def nan_in(tensors: dict[str, Tensor]) -> None:
    tensors[DOWN][3, 5] = torch.nan


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (nan_in, (DOWN, "NaN or Inf in 1 places")),
        (lambda t: t.update({NORM: torch.full((48,), torch.inf)}), (NORM, "NaN or Inf in 48 places")),
        (lambda t: t.update({EXTRA: t[DOWN].clone()}), ("1 unexpected", EXTRA)),
        (lambda t: t.pop(DOWN), ("1 missing", DOWN)),
        (lambda t: (t.pop(DOWN), t.update({DOWN + "_old": torch.ones(1)})), ("1 missing", "1 unexpected", DOWN + "_old")),
        (lambda t: t.update({DOWN: t[DOWN].t().contiguous()}), (DOWN, "(80, 48)", "(48, 80)")),
        (lambda t: t.update({DOWN: t[DOWN].flatten()}), (DOWN, "(3840,)")),
        (lambda t: t.update({DOWN: torch.ones(48, 80, dtype=torch.int32)}), (DOWN, "int32")),
        (lambda t: t.update({DOWN: torch.ones(48, 80, dtype=torch.uint8)}), (DOWN, "uint8")),
    ],
    ids=["nan", "inf", "unexpected", "missing", "renamed", "transposed", "flat", "int32", "uint8"],
)
def test_tensors_that_are_not_the_models(single: Path, change: Callable[[dict[str, Tensor]], object], said: tuple[str, ...]) -> None:
    edit_tensors(single, change)
    refused(single, *said)


def test_a_number_that_the_models_dtype_cannot_hold_is_no_weight(single: Path) -> None:
    """Finite in fp32, it would be Inf in the bf16 that is deployed."""
    edit_tensors(single, lambda tensors: tensors.update({NORM: torch.full((48,), 3.4e38)}))
    refused(single, NORM, "NaN or Inf in 48 places as bfloat16")


def test_a_model_whose_load_failed_does_not_run(single: Path) -> None:
    runtime = Runtime(RuntimeConfig(str(single), backend_cfg=MegatronLiteConfig(device="cpu")))
    handle = runtime.build_model()
    edit_tensors(single, nan_in)
    with pytest.raises(InputError, match="NaN"):
        handle.weights.load(read_tensors(single), 1, single)
    with pytest.raises(InputError, match="not whole"):
        next(runtime.export_weights(handle))
