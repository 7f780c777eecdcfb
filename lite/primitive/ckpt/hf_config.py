"""Reading config.json strictly: every key is honoured, known to be irrelevant here, or refused by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lite.errors import InputError, nearest
from lite.primitive.ckpt.safetensors_files import read_json

# Keys that say nothing about the forward pass of a causal language model.
IRRELEVANT = frozenset({
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "chunk_size_feed_forward",
    "dtype", "torch_dtype", "id2label", "label2id", "initializer_range", "is_encoder_decoder", "model_type", "output_attentions",
    "output_hidden_states", "problem_type", "return_dict", "transformers_version", "transformers.js_config", "use_cache", "tokenizer_class",
})  # fmt: skip

REQUIRED = object()


def load_hf_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise InputError(folder, "no such folder", "give the folder of a Hugging Face checkpoint")
    return read_json(folder / "config.json")


def read_fields(hf: Mapping[str, Any], honoured: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The honoured keys with their defaults filled in.

    honoured: key -> default, or REQUIRED. only: key -> the values under which it changes nothing (the first is the default);
    any other value is refused, because honouring it is not built.
    """
    known = set(honoured) | set(only) | IRRELEVANT
    for key in hf:
        if key not in known:
            raise InputError("config.json", f"key {key!r} is not known for {hf.get('model_type')}", nearest(key, known - IRRELEVANT))
    for key, values in only.items():
        if key in hf and hf[key] not in values:
            raise InputError("config.json", f"{key} = {hf[key]!r} is not supported", f"only {' or '.join(map(repr, values))} is")
    missing = [key for key, default in honoured.items() if default is REQUIRED and hf.get(key) is None]
    if missing:
        raise InputError("config.json", f"lacks {missing[0]!r}", "add it")
    return {key: hf[key] if hf.get(key) is not None else default for key, default in honoured.items()}
