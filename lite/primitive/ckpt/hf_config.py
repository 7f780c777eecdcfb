"""Reading config.json strictly: every key is honoured, known to be irrelevant here, or refused by name."""

import math
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

KINDS = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                     "head_dim", "max_position_embeddings", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok",
                     "moe_intermediate_size", "moe_shared_expert_intermediate_size", "decoder_sparse_step", "n_group", "topk_group",
                     "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "chunk_size"), "count"),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "rope_theta", "routed_scaling_factor"), "positive number"),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "use_bias", "use_conv_bias"), "boolean"),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), "mapping"),
    **dict.fromkeys(("mlp_only_layers", "layers_block_type"), "list"),
    "hybrid_override_pattern": "string",
}  # fmt: skip

PER_LAYER = ("layer_types", "layers_block_type", "hybrid_override_pattern")  # an entry a layer


def _is(value: Any, kind: str) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "count":
            return isinstance(value, int) and number and 0 < value < 1 << 31
        case "positive number":
            return number and 0 < value < math.inf
        case "boolean":
            return isinstance(value, bool)
        case "list":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case _:
            return isinstance(value, dict)


def load_hf_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise InputError(folder, "no such folder", "give the folder of a Hugging Face checkpoint")
    return read_json(folder / "config.json")


def read_fields(
    hf: Mapping[str, Any], honoured: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]], ignored: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The honoured keys with their defaults filled in.

    honoured: key -> default, or REQUIRED. only: key -> the values under which it changes nothing (the first is the default);
    any other value is refused, because honouring it is not built. ignored: key -> why the family's forward pass does not depend on it.
    """
    known = set(honoured) | set(only) | set(ignored or ()) | IRRELEVANT
    for key in hf:
        if key not in known:
            raise InputError("config.json", f"key {key!r} is not known for {hf.get('model_type')}", nearest(key, known - IRRELEVANT))
    for key, values in only.items():
        if key in hf and hf[key] not in values:
            raise InputError("config.json", f"{key} = {hf[key]!r} is not supported", f"only {' or '.join(map(repr, values))} is")
    for key, kind in KINDS.items():
        value = hf.get(key)
        if key in honoured and value is not None and not _is(value, kind):
            raise InputError("config.json", f"{key} = {value!r} is no {kind}", "correct it")
    missing = [key for key, default in honoured.items() if default is REQUIRED and hf.get(key) is None]
    if missing:
        raise InputError("config.json", f"lacks {missing[0]!r}", "add it")
    return {key: hf[key] if hf.get(key) is not None else default for key, default in honoured.items()}


def layer_count(hf: Mapping[str, Any]) -> int:
    """As its number or, where there is none (transformers 5 writes Nemotron-H so), by what it lists; 0 where it says nothing."""
    return hf.get("num_hidden_layers") or max((len(hf[key]) for key in PER_LAYER if hf.get(key)), default=0)
