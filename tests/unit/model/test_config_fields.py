"""config.json is read strictly: a key is honoured, known to change nothing, or refused in one line that names it."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from lite.errors import InputError
from lite.model.registry import families, family, family_of
from lite.primitive.ckpt.hf_config import load_hf_config
from lite.primitive.modules.decoder import DecoderConfig

SHAPE = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


TRANSFORMERS = {
    "llama": LlamaConfig(**SHAPE),
    "llama default": LlamaConfig(),
    "llama variants": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, head_dim=32, tie_word_embeddings=True),
    "llama3": LlamaConfig(**SHAPE, rope_parameters=LLAMA3 | {"rope_theta": 5e5}),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral default": MistralConfig(sliding_window=None),
    "qwen3": Qwen3Config(**SHAPE),
    "qwen3 default": Qwen3Config(),
    "qwen3 tied": Qwen3Config(**SHAPE, tie_word_embeddings=True, attention_bias=True),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2 default": Qwen2Config(),
    "qwen2 tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
}


def parse(hf: dict[str, Any]) -> DecoderConfig:
    return family(family_of(hf.get("model_type"))).build_model_config(hf)


def proxy(name: str, **changes: Any) -> dict[str, Any]:
    return family(name).proxy_config("tiny", None) | changes


def refusal(hf: dict[str, Any], key: str) -> str:
    """The error's message, which is one line and names the key."""
    with pytest.raises(InputError) as error:
        parse(hf)
    message = str(error.value)
    assert key in message and "\n" not in message
    return message


@pytest.mark.parametrize("name", families())
@pytest.mark.parametrize("geometry", ["tiny", "real"])
def test_a_familys_own_proxies_are_accepted(name: str, geometry: str) -> None:
    hf = family(name).proxy_config(geometry, 5)
    config = parse(hf)
    assert (config.layers, config.hidden, config.heads) == (5, hf["hidden_size"], hf["num_attention_heads"])


@pytest.mark.parametrize("name", families())
def test_an_unknown_key_is_refused(name: str) -> None:
    message = refusal(proxy(name, hiden_size=64), "'hiden_size'")
    assert "'hidden_size'" in message, "with the nearest valid one"
    refusal(proxy(name, attn_logit_softcapping=30.0), "'attn_logit_softcapping'")


@pytest.mark.parametrize(
    "name, key, value",
    [
        *((name, "hidden_act", "gelu") for name in families()),
        *((name, "attention_dropout", 0.1) for name in families()),
        ("llama", "sliding_window", 4096),
        ("llama", "pretraining_tp", 2),
        ("llama", "rope_interleaved", True),
        ("qwen2", "use_sliding_window", True),
        ("qwen3", "use_sliding_window", True),
        ("qwen2", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("qwen3", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    ],
)
def test_an_unsupported_value_is_refused(name: str, key: str, value: Any) -> None:
    assert repr(value) in refusal(proxy(name, **{key: value}), key)


@pytest.mark.parametrize(
    "name, key",
    [
        *((name, key) for name in families() for key in SHAPE if key != "num_key_value_heads"),
        ("qwen2", "num_key_value_heads"),
        ("qwen3", "num_key_value_heads"),
    ],
)
def test_a_missing_key_is_refused(name: str, key: str) -> None:
    hf = proxy(name)
    del hf[key]
    refusal(hf, repr(key))
    refusal(proxy(name, **{key: None}), repr(key))


@pytest.mark.parametrize("name", families())
def test_an_absent_optional_key_has_its_default(name: str) -> None:
    """What old checkpoints leave out is what transformers fills in."""
    absent = ("rope_theta", "rms_norm_eps", "tie_word_embeddings", "hidden_act")
    theirs = TRANSFORMERS[name]
    config = parse({key: value for key, value in proxy(name).items() if key not in absent})
    assert (config.norm_eps, config.tied_head) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert config.rotary.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("name", families())
def test_heads_that_cannot_be_shared_are_refused(name: str) -> None:
    refusal(proxy(name, num_attention_heads=6, num_key_value_heads=4), "6 query heads")


def test_another_model_type_is_refused() -> None:
    refusal(proxy("llama", model_type="lama"), "'lama'")
    refusal({k: v for k, v in proxy("llama").items() if k != "model_type"}, "model_type")


def test_an_override_replaces_a_key_and_is_read_as_strictly() -> None:
    build = family("llama").build_model_config
    assert build(proxy("llama"), num_hidden_layers=7).layers == 7
    with pytest.raises(InputError, match="'num_hidden_layer'"):
        build(proxy("llama"), num_hidden_layer=7)



@pytest.mark.parametrize("source", ["to_dict", "file of every key", "save_pretrained's file"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_what_transformers_writes_is_read_as_transformers_means_it(name: str, source: str, tmp_path: Path) -> None:
    theirs: PretrainedConfig = TRANSFORMERS[name]
    if source == "to_dict":
        hf = theirs.to_dict()
    else:
        theirs.to_json_file(tmp_path / "config.json", use_diff=source == "save_pretrained's file")
        hf = load_hf_config(tmp_path)
    config = parse(hf)
    assert (config.vocab_size, config.hidden, config.intermediate) == (theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size)
    assert (config.layers, config.heads, config.kv_heads) == (
        theirs.num_hidden_layers, theirs.num_attention_heads, theirs.num_key_value_heads,
    )  # fmt: skip
    assert config.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert config.norm_eps == theirs.rms_norm_eps and config.tied_head == theirs.tie_word_embeddings
    assert config.max_positions == theirs.max_position_embeddings and config.rotary.theta == theirs.rope_parameters["rope_theta"]
    assert dict(config.rotary.scaling)["rope_type"] == theirs.rope_parameters["rope_type"]
    assert config.qkv_bias == (theirs.model_type == "qwen2" or getattr(theirs, "attention_bias", False))
    assert config.out_bias == getattr(theirs, "attention_bias", False) and config.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert config.qk_norm == (theirs.model_type == "qwen3")
