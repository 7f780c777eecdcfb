"""config.json is read strictly: a key is honoured, known to change nothing, or refused in one line that names it."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    MistralConfig,
    NemotronHConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeSparseMoeBlock

from lite.errors import InputError
from lite.model.nemotron_h.config import MAMBA_SIZES, MOE_SIZES
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
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True),
    "qwen3_moe default": Qwen3MoeConfig(),
    "qwen3_moe some dense": Qwen3MoeConfig(**SHAPE, decoder_sparse_step=2, mlp_only_layers=[0], head_dim=32, tie_word_embeddings=True),
    "nemotron_h": NemotronHConfig(**SHAPE, layers_block_type=["mamba", "attention", "moe"]),
    "nemotron_h default": NemotronHConfig(),
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
        *((name, "hidden_act", "gelu") for name in families() if name != "nemotron_h"),
        *((name, "attention_dropout", 0.1) for name in families()),
        ("llama", "sliding_window", 4096),
        ("llama", "pretraining_tp", 2),
        ("llama", "rope_interleaved", True),
        ("qwen2", "use_sliding_window", True),
        ("qwen3", "use_sliding_window", True),
        ("qwen2", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("qwen3", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("qwen3_moe", "use_sliding_window", True),
        ("qwen3_moe", "output_router_logits", True),
        ("nemotron_h", "mlp_hidden_act", "silu"),
        ("nemotron_h", "mamba_hidden_act", "gelu"),
        ("nemotron_h", "attention_bias", True),
        ("nemotron_h", "mlp_bias", True),
        ("nemotron_h", "tie_word_embeddings", True),
        ("nemotron_h", "mamba_proj_bias", True),
        ("nemotron_h", "hidden_dropout", 0.1),
        ("nemotron_h", "sliding_window", 4096),
        ("nemotron_h", "residual_in_fp32", True),
        ("nemotron_h", "moe_latent_size", 64),
        ("nemotron_h", "n_shared_experts", 2),
        ("nemotron_h", "mamba_ssm_cache_dtype", "float16"),
        ("nemotron_h", "time_step_limit", [0.001, 0.1]),
        ("nemotron_h", "time_step_limit", [0.001, math.inf]),
        ("nemotron_h", "norm_eps", 1e-3),
    ],
)
def test_an_unsupported_value_is_refused(name: str, key: str, value: Any) -> None:
    assert repr(value) in refusal(proxy(name, **{key: value}), key)


@pytest.mark.parametrize(
    "name, key",
    [
        *((name, key) for name in families() for key in SHAPE if key not in ("num_key_value_heads", "num_hidden_layers")),
        *((name, "num_hidden_layers") for name in families() if name != "nemotron_h"),  # there the pattern says it
        *((name, "num_key_value_heads") for name in ("qwen2", "qwen3", "qwen3_moe")),
        *(("qwen3_moe", key) for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")),
        *(("nemotron_h", key) for key in (*MAMBA_SIZES, *MOE_SIZES, "hybrid_override_pattern")),
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
    absent = ("rope_theta", "rms_norm_eps", "layer_norm_epsilon", "tie_word_embeddings", "hidden_act", "norm_topk_prob")
    theirs = TRANSFORMERS[f"{name} default"]
    config = parse({key: value for key, value in proxy(name).items() if key not in absent})
    assert (config.norm_eps, config.tied_head) == (norm_eps(theirs), theirs.tie_word_embeddings)
    if config.rotary is not None:
        assert config.rotary.theta == theirs.rope_parameters["rope_theta"]
    if config.moe is not None:
        assert config.moe.renormalize == theirs.norm_topk_prob


def norm_eps(theirs: PretrainedConfig) -> float:
    return theirs.layer_norm_epsilon if theirs.model_type == "nemotron_h" else theirs.rms_norm_eps


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
    assert config.norm_eps == norm_eps(theirs) and config.tied_head == theirs.tie_word_embeddings
    assert config.max_positions == theirs.max_position_embeddings
    if theirs.model_type == "nemotron_h":
        assert config.rotary is None
        check_hybrid(config, theirs)
    else:
        assert config.rotary.theta == theirs.rope_parameters["rope_theta"]
        assert dict(config.rotary.scaling)["rope_type"] == theirs.rope_parameters["rope_type"]
    assert config.qkv_bias == (theirs.model_type == "qwen2" or getattr(theirs, "attention_bias", False))
    assert config.out_bias == getattr(theirs, "attention_bias", False) and config.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert config.qk_norm == (theirs.model_type in ("qwen3", "qwen3_moe"))
    if theirs.model_type == "qwen3_moe":
        moe = config.moe
        assert (moe.experts, moe.k, moe.intermediate) == (
            theirs.num_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size,
        )  # fmt: skip
        assert moe.renormalize == theirs.norm_topk_prob
        with torch.device("meta"):
            mlps = [Qwen3MoeDecoderLayer(theirs, i).mlp for i in range(theirs.num_hidden_layers)]
        assert [kind == "moe" for kind in config.mlps] == [isinstance(mlp, Qwen3MoeSparseMoeBlock) for mlp in mlps]


def check_hybrid(config: DecoderConfig, theirs: NemotronHConfig) -> None:
    letters = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "moe": "E", "mlp": "-"}  # 5.9, 5.17
    blocks = {"M": ("mamba", None), "*": ("attention", None), "E": (None, "moe"), "-": (None, "relu2")}
    assert list(zip(config.mixers, config.mlps, strict=True)) == [blocks[letters[kind]] for kind in theirs.layers_block_type]
    shape = (theirs.mamba_num_heads, theirs.mamba_head_dim, theirs.n_groups, theirs.ssm_state_size, theirs.chunk_size)
    assert config.mamba.shape == shape
    assert (config.mamba.conv_width, config.mamba.conv_bias, config.mamba.proj_bias) == (
        theirs.conv_kernel, theirs.use_conv_bias, theirs.use_bias,
    )  # fmt: skip
    moe = config.moe
    assert (moe.experts, moe.k, moe.intermediate, moe.shared) == (
        theirs.n_routed_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size, theirs.moe_shared_expert_intermediate_size,
    )  # fmt: skip
    assert (moe.groups, moe.topk_groups, moe.renormalize, moe.scale) == (
        theirs.n_group, theirs.topk_group, theirs.norm_topk_prob, theirs.routed_scaling_factor,
    )  # fmt: skip


def test_both_spellings_of_a_pattern_say_the_same() -> None:
    names = ["mamba", "moe", "full_attention", "mlp", "linear_attention", "attention"]
    hf = {key: value for key, value in proxy("nemotron_h").items() if key not in ("hybrid_override_pattern", "num_hidden_layers")}
    letters, listed = parse(hf | {"hybrid_override_pattern": "ME*-M*"}), parse(hf | {"layers_block_type": names})
    assert letters == listed and letters.layers == 6
    assert parse(hf | {"layers_block_type": names, "hybrid_override_pattern": "ME*-M*"}) == letters
    refusal(hf | {"layers_block_type": names, "hybrid_override_pattern": "ME*-MM"}, "'hybrid_override_pattern' differs")
    refusal(hf | {"layers_block_type": [*names, "conv"]}, "'conv'")
    refusal(hf | {"layers_block_type": [*names, {}]}, "holds {}")
    refusal(hf | {"hybrid_override_pattern": "MEX"}, "'X'")
    refusal(hf | {"hybrid_override_pattern": "ME*", "num_hidden_layers": 2}, "num_hidden_layers")


def test_a_short_real_hybrid_has_every_pair_of_neighbours_that_the_whole_one_has() -> None:
    def pairs(layers: int | None) -> set[str]:
        return {a + b for a, b in itertools.pairwise(family("nemotron_h").proxy_config("real", layers)["hybrid_override_pattern"])}

    assert len(family("nemotron_h").proxy_config("real", None)["hybrid_override_pattern"]) == 52
    assert pairs(8) == pairs(7) == pairs(None) != pairs(6)
    assert set(family("nemotron_h").proxy_config("tiny", None)["hybrid_override_pattern"]) == set("ME*-")


def test_a_pattern_needs_the_sizes_of_its_own_blocks_only() -> None:
    hf = {key: value for key, value in proxy("nemotron_h").items() if key not in (*MOE_SIZES, "num_hidden_layers")}
    assert parse(hf | {"hybrid_override_pattern": "M*-"}).moe is None
    refusal(hf | {"hybrid_override_pattern": "ME"}, "'n_routed_experts'")


@pytest.mark.parametrize("limit", ["[0.0, Infinity]", '[0.0, {"__float__": "Infinity"}]', "null"])
def test_a_time_step_limit_that_is_none_is_read_in_every_spelling(limit: str, tmp_path: Path) -> None:
    text = json.dumps(proxy("nemotron_h"))
    (tmp_path / "config.json").write_text(f'{text[:-1]}, "time_step_limit": {limit}}}')
    assert parse(load_hf_config(tmp_path)) == parse(proxy("nemotron_h"))


@pytest.mark.parametrize(
    "name, changes, named",
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 of 8 experts"),
        ("qwen3_moe", {"num_local_experts": 4}, "'num_experts'"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ("nemotron_h", {"n_group": 3}, "3 groups of 8 experts"),
        ("nemotron_h", {"n_group": 8}, "8 groups"),
        ("nemotron_h", {"n_group": 4, "topk_group": 5}, "5 of 4 groups"),
        ("nemotron_h", {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "3 of 2 experts"),
        ("nemotron_h", {"n_groups": 4}, "6 Mamba heads"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(name: str, changes: dict[str, Any], named: str) -> None:
    refusal(proxy(name, **changes), named)
