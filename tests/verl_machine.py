"""A machine as preflight sees it: a checkpoint, data, packages, and a recipe's configuration in which errors are planted."""

import copy
import functools
import importlib.metadata
import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from safetensors.torch import save_file
from verl_mlite import preflight as subject
from verl_mlite.preflight import checked
from verl_mlite.preflight_job import Job, composed

from lite.errors import InputError
from lite.model.registry import family
from lite.primitive.ckpt.spec import parts
from tests.checkpoints import hf_config
from tests.recipe_commands import overrides

ROLLOUT, VLLM = "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.engine_kwargs.vllm"
ACTOR, ENGINE = "actor_rollout_ref.actor", "actor_rollout_ref.actor.engine"
MODEL = "actor_rollout_ref.model"
FORWARDED = "ray_kwargs.ray_init.runtime_env.env_vars"
RECIPE = {"qwen3": "qwen3_dense", "nemotron_h": "nemotron_h"}
GONE = object()


def model_folder(folder: Path, **config: Any) -> Path:
    """Right in its tensors' names."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    kind = family(config["model_type"]) if config["model_type"] in RECIPE else None
    model = kind.build_model_config(config) if kind else None
    names = [part.hf for part in parts(kind.WEIGHTS, model, model.layers)] if kind else ["w"]
    save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@functools.cache
def recipe_config(name: str, arm: str) -> DictConfig:
    return composed(overrides(name, arm=arm))


def planted(config: DictConfig, key: str, value: Any) -> None:
    parent, _, leaf = key.rpartition(".")
    with open_dict(config):
        if value is GONE:
            del OmegaConf.select(config, parent)[leaf]
        else:
            OmegaConf.update(config, key, value, merge=False, force_add=True)


class Machine:
    """A checkpoint of the family, data, and the packages of a GPU machine, as far as preflight asks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, family: str = "qwen3"):
        self.patch, self.family, self.data = monkeypatch, family, folder / "train.parquet"
        self.model = model_folder(folder / "model", **hf_config(family, max_position_embeddings=16384))
        self.write_data()
        self.has(vllm="0.26.0", plugin="lite.vllm_plugin:register")

    def write_data(self, rows: int = 32, without: str = "", prompt: Any = ({"role": "user", "content": "1 + 1"},)) -> None:
        columns = {"prompt": [prompt] * rows, "data_source": ["x"] * rows, "reward_model": ["2"] * rows}
        pyarrow.parquet.write_table(pyarrow.table({name: column for name, column in columns.items() if name != without}), self.data)

    def has(self, vllm: str | None = None, plugin: str | None = None, missing: str | None = None) -> None:
        if vllm:
            real = importlib.metadata.version
            self.patch.setattr("importlib.metadata.version", lambda name: vllm if name == "vllm" else real(name))
        if plugin:
            found = [EntryPoint("mlite", plugin, "vllm.general_plugins")]
            self.patch.setattr(subject, "entry_points", lambda group: found)
        self.patch.setattr(subject, "_installed", lambda name: name != missing)

    def run(self, plant: dict[str, Any] | None = None, arm: str = "1") -> list[str]:
        config = copy.deepcopy(recipe_config(RECIPE[self.family], arm))
        mine = {"data.train_files": [str(self.data)], "data.val_files": str(self.data), f"{MODEL}.path": str(self.model)}
        for key, value in (mine | (plant or {})).items():
            planted(config, key, value)
        return checked(Job(config, {"VLLM_BATCH_INVARIANT": arm, "MLITE_EXACT": arm}))

    def refusal(self, plant: dict[str, Any] | None = None, arm: str = "1") -> str:
        with pytest.raises(InputError) as caught:
            self.run(plant, arm)
        assert "\n" not in str(caught.value)
        return str(caught.value)
