"""Files that a run would read, each broken in its own way."""

import json
from pathlib import Path

import pyarrow.parquet
import torch
from safetensors.torch import save_file

from tests.checkpoints import hf_config
from tests.verl_machine import MODEL, ROLLOUT, Machine, model_folder

WRITE = "write each as [{role: user, content: ...}]"


def test_data_for_another_reward_manager_need_no_columns_of_verls(machine: Machine) -> None:
    machine.write_data(without="reward_model")
    machine.run({"reward.reward_manager.source": "importlib"})
    assert "has no column 'reward_model'" in machine.refusal()


def test_a_batch_is_of_what_is_left_of_the_data(machine: Machine) -> None:
    assert machine.refusal({"data.train_max_samples": 8}).startswith("data.train_batch_size: is 32, of 8 prompts in data.train_files")


def test_a_run_that_goes_on_from_nowhere_is_refused(machine: Machine, tmp_path: Path) -> None:
    for start in (None, "/nope/global_step_3", str(tmp_path)):
        said = machine.refusal({"trainer.resume_mode": "resume_path", "trainer.resume_from_path": start})
        assert said.startswith(f"trainer.resume_from_path: is {start!r}; give the folder .../global_step_N")


def test_a_model_that_is_not_there_or_of_no_family_is_refused(machine: Machine, tmp_path: Path) -> None:
    assert machine.refusal({f"{MODEL}.path": str(tmp_path / "none")}).startswith(f"{tmp_path}/none: no such folder; ")
    (tmp_path / "empty").mkdir()
    assert "empty/config.json: no such file; " in machine.refusal({f"{MODEL}.path": str(tmp_path / "empty")})
    other = model_folder(tmp_path / "other", **hf_config("qwen3", model_type="qwen3_mo"))
    said = machine.refusal({f"{MODEL}.path": str(other)})
    assert said == "config.json: model_type 'qwen3_mo' is not supported; did you mean 'qwen3_moe'?"
    (other / "model.safetensors").unlink()
    assert "holds neither model.safetensors.index.json nor model.safetensors" in machine.refusal({f"{MODEL}.path": str(other)})


def test_a_model_without_a_tokenizer_and_data_that_are_no_parquet_are_refused(machine: Machine) -> None:
    (machine.model / "tokenizer.json").unlink()
    assert "holds no tokenizer" in machine.refusal()
    (machine.model / "vocab.json").write_text("{}")
    machine.run()
    (machine.model / "vocab.json").unlink()
    (machine.model / "tokenizer.json").write_text("{")
    assert "tokenizer.json: is not JSON" in machine.refusal()
    (machine.model / "tokenizer.json").write_text("{}")
    whole = machine.data.read_bytes()
    for broken in (b"x", b"PAR1", whole[: len(whole) // 2]):
        machine.data.write_bytes(broken)
        assert "is no whole parquet file" in machine.refusal()


def test_a_tokenizer_without_a_chat_template_is_refused(machine: Machine) -> None:
    (machine.model / "chat_template.jinja").unlink()
    for content in (None, {"chat_template": None}):
        if content:
            (machine.model / "tokenizer_config.json").write_text(json.dumps(content))
        assert machine.refusal().startswith(f"{machine.model}: holds no chat template, with which verl formats the prompts; add ")
    machine.run({f"{MODEL}.custom_chat_template": "{{ messages }}"})
    machine.run({f"{ROLLOUT}.agent.agent_loop_config_path": "mine.yaml"})
    (machine.model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    machine.run()


def test_prompts_that_are_no_lists_of_messages_are_refused(machine: Machine, tmp_path: Path) -> None:
    machine.write_data(prompt="1 + 1")
    assert machine.refusal() == f"data.train_files: {machine.data} has prompts that are no lists of messages; {WRITE}"
    machine.run({f"{ROLLOUT}.agent.agent_loop_config_path": "mine.yaml"})
    for prompt, refused in (('"1 + 1"', True), ('[{"role": "user", "content": "1 + 1"}]', False)):
        (tmp_path / "a.jsonl").write_text(f'{{"prompt": {prompt}, "data_source": "x", "reward_model": "2"}}\n')
        plant = {"data.train_files": [str(tmp_path / "a.jsonl")], "data.val_files": [str(tmp_path / "a.jsonl")]}
        if refused:
            assert machine.refusal(plant) == f"data.train_files: {tmp_path}/a.jsonl has prompts that are no lists of messages; {WRITE}"
        else:
            machine.run(plant)


def test_data_that_are_not_named_or_that_verl_does_not_read_are_refused(machine: Machine, tmp_path: Path) -> None:
    assert machine.refusal({"data.val_files": None}) == "data.val_files: is not set; name a file of prompts"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["1 + 1"]}), machine.data)
    assert "has no column 'prompt'; add it" in machine.refusal()
    for column in ("data_source", "reward_model"):
        machine.write_data(without=column)
        assert f"has no column {column!r}; add it: verl's reward managers read it" in machine.refusal()
    machine.write_data(rows=0)
    assert "has no rows; give a file of prompts" in machine.refusal()
    (tmp_path / "prompts.jsonl").write_text('{"question": 1}\n')
    assert "has no column 'prompt'" in machine.refusal({"data.train_files": [str(tmp_path / "prompts.jsonl")]})
    for text in ("not json", "", '{"prompt": ', "5"):
        (tmp_path / "prompts.jsonl").write_text(text)
        assert "does not begin with an object of JSON" in machine.refusal({"data.train_files": [str(tmp_path / "prompts.jsonl")]})
    (tmp_path / "prompts.py").touch()
    assert "is of a kind that verl does not read" in machine.refusal({"data.train_files": [str(tmp_path / "prompts.py")]})


def test_a_checkpoint_that_is_not_whole_is_refused(machine: Machine) -> None:
    save_file({"w": torch.zeros(1)}, machine.model / "model.safetensors")
    said = machine.refusal()
    assert "tensors do not match the model: " in said and "missing (" in said and "1 unexpected (w)" in said
    (machine.model / "model.safetensors").write_bytes(b"abc")
    assert "is truncated or no safetensors file" in machine.refusal()
    save_file({"w": torch.zeros(1)}, machine.model / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"v": "model-00001-of-00002.safetensors", "w": "model-00002-of-00002.safetensors"}}
    (machine.model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors: this shard is missing" in machine.refusal()
