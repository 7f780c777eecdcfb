"""What preflight asks of the files that a run reads: the checkpoint, the data, what it goes on from."""

import json
from pathlib import Path

from lite.errors import InputError
from lite.primitive.ckpt.hf_config import load_hf_config
from lite.primitive.ckpt.hf_weights import check_names
from lite.primitive.ckpt.safetensors_files import read_json, tensor_names
from verl_mlite.preflight_job import Job
from verl_mlite.preflight_tables import MEGATRON, ROLLOUT, VLLM


def check_model(job: Job) -> list[str]:
    folder = job.model
    if not job.get("actor_rollout_ref.model.path"):
        raise InputError("actor_rollout_ref.model.path", "is not set", "give the folder of a checkpoint")
    kind = load_hf_config(folder).get("model_type")
    names = tensor_names(folder)
    tokenizer = Path(job.get("actor_rollout_ref.model.tokenizer_path") or folder)
    if not any([*tokenizer.glob("*token*"), *tokenizer.glob("vocab.*")]):
        raise InputError(tokenizer, "holds no tokenizer", "add its files: verl formats the prompts with it")
    for file in tokenizer.glob("tokenizer*.json"):
        read_json(file)
    if job.formats_prompts and not job.get("actor_rollout_ref.model.custom_chat_template") and not _has_chat_template(tokenizer):
        fix = "add chat_template.jinja, or set actor_rollout_ref.model.custom_chat_template"
        raise InputError(tokenizer, "holds no chat template, with which verl formats the prompts", fix)
    lines = [f"model: {folder}, {kind}"]
    if not job.exact:
        if kind == "nemotron_h":
            for key in ("actor_rollout_ref.model.use_remove_padding", f"{MEGATRON}.use_remove_padding"):
                fix = "set it to False, as nemotron_h.sh does: verl packs without the boundaries that Mamba layers need"
                lines.append(job.require(key, (False,), fix))
        return lines
    protocol, config = job.model_family()
    check_names(protocol.WEIGHTS, config, config.layers, names, folder)
    if config.mamba is not None:
        key = f"{VLLM}.mamba_ssm_cache_dtype"
        lines.append(job.require(key, ("float32",), f"add +{key}=float32, as nemotron_h.sh does: the scan's states are"))
    return lines


def check_positions(job: Job) -> list[str]:
    """verl's vLLM server refuses a longer context than the configuration names."""
    override = job.get("actor_rollout_ref.model.override_config.max_position_embeddings")
    positions, longest = override or load_hf_config(job.model).get("max_position_embeddings"), job.get(f"{ROLLOUT}.max_model_len")
    if positions and longest and longest > positions:
        what = f"is {longest}, of a model whose max_position_embeddings is {positions}"
        raise InputError(f"{ROLLOUT}.max_model_len", what, "give at most as many: shorten prompts or responses")
    return []


def _has_chat_template(tokenizer: Path) -> bool:
    """In any of the places that transformers reads; a tokenizer that is code of its own may make one."""
    if any([*tokenizer.glob("*chat_template*"), *tokenizer.glob("*.py")]):
        return True
    config = tokenizer / "tokenizer_config.json"
    return config.is_file() and bool(read_json(config).get("chat_template"))


def check_data(job: Job) -> list[str]:
    if job.get("data.custom_cls.path"):
        return ["data: read by data.custom_cls"]
    lines, rows = [], {}
    for key in ("data.train_files", "data.val_files"):
        found = job.get(key)
        if not found:
            raise InputError(key, "is not set", "name a file of prompts")
        names = [found] if isinstance(found, str) else found
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InputError(key, f"is {found!r}", "name a file of prompts, or several")
        rows[key] = [_rows(job, key, name) for name in names if "://" not in name]
        lines.append(f"{key}: {found}")
    counted, batch, most = rows["data.train_files"], job.get("data.train_batch_size"), job.get("data.train_max_samples")
    if counted and None not in counted:
        prompts = min(sum(counted), most if most and most > 0 else sum(counted))
        if prompts < batch:
            raise InputError("data.train_batch_size", f"is {batch}, of {prompts} prompts in data.train_files", "give at most as many")
    return lines


def _rows(job: Job, key: str, name: str) -> int | None:
    """-> how many rows the file has, None where only reading it would tell."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise InputError(key, f"{name} is no file", "correct the path")
    if path.suffix == ".parquet":
        return _parquet_rows(job, key, name)
    if path.suffix not in (".json", ".jsonl"):
        raise InputError(key, f"{name} is of a kind that verl does not read", "give a .parquet, .json or .jsonl")
    with path.open(errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
    if first.lstrip().startswith("["):
        return None
    try:
        row = json.loads(first)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise InputError(key, f"{name} does not begin with an object of JSON", "write one a line")
    _require_columns(job, key, name, list(row))
    _require_messages(job, key, name, isinstance(row[job.get("data.prompt_key")], list))
    return None


def _parquet_rows(job: Job, key: str, name: str) -> int:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata
    from pyarrow.types import is_large_list, is_list

    try:
        found = read_metadata(Path(name).expanduser())
    except ArrowException as error:
        raise InputError(key, f"{name} is no whole parquet file ({error})", "write it again, or give a .json or .jsonl") from None
    schema = found.schema.to_arrow_schema()
    _require_columns(job, key, name, schema.names)
    if not found.num_rows:
        raise InputError(key, f"{name} has no rows", "give a file of prompts")
    kind = schema.field(job.get("data.prompt_key")).type
    _require_messages(job, key, name, is_list(kind) or is_large_list(kind))
    return int(found.num_rows)


def _require_columns(job: Job, key: str, name: str, columns: list[str]) -> None:
    prompts = job.get("data.prompt_key")
    if prompts not in columns:
        raise InputError(key, f"{name} has no column {prompts!r}", "add it, or name another by data.prompt_key")
    if job.get("reward.reward_manager.source") == "register":
        for column in ("data_source", "reward_model"):
            if column not in columns:
                raise InputError(key, f"{name} has no column {column!r}", "add it: verl's reward managers read it of every prompt")


def _require_messages(job: Job, key: str, name: str, are: bool) -> None:
    """verl takes a string for a list of messages, too: each of its letters is one, without content."""
    if not are and job.formats_prompts:
        what = f"{name} has prompts that are no lists of messages"
        raise InputError(key, what, "write each as [{role: user, content: ...}]")


def check_paths(job: Job) -> list[str]:
    """What else is named by its path."""
    start = job.get("trainer.resume_from_path")
    if job.get("trainer.resume_mode") == "resume_path" and not (start and "global_step_" in start and Path(start).is_dir()):
        raise InputError("trainer.resume_from_path", f"is {start!r}", "give the folder .../global_step_N of a checkpoint")
    reward = job.get("reward.custom_reward_function.path")
    if reward and "://" not in reward and not Path(reward).expanduser().is_file():
        raise InputError("reward.custom_reward_function.path", f"{reward} is no file", "correct the path")
    return []
