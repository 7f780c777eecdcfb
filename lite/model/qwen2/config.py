"""config.json of qwen2 checkpoints, and of its proxies."""

from collections.abc import Mapping
from typing import Any

from lite.primitive.ckpt.hf_config import REQUIRED, read_fields
from lite.primitive.modules.decoder import DecoderConfig
from lite.primitive.modules.decoder_hf import FIELDS, ONLY, decoder_config

HONOURED = FIELDS | {"num_key_value_heads": REQUIRED, "sliding_window": None, "max_window_layers": None}
ONLY_HERE = ONLY | {"use_sliding_window": (False,)}


def read_config(source: Mapping[str, Any]) -> DecoderConfig:
    only = ONLY_HERE | {"layer_types": (None, ["full_attention"] * (source.get("num_hidden_layers") or 0))}
    hf = read_fields(source, HONOURED, only)
    return decoder_config(hf, qkv_bias=True)


def proxy_config(geometry: str, layers: int | None) -> dict[str, Any]:
    """`real`: Qwen2.5-0.5B's layers. `tiny`: small enough for a CPU test."""
    common = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    if geometry == "real":
        return common | {
            "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": layers or 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        }  # fmt: skip
    return common | {
        "vocab_size": 512, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": layers or 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    }  # fmt: skip
