"""config.json of llama checkpoints, and of its proxies."""

from collections.abc import Mapping
from typing import Any

from lite.primitive.ckpt.hf_config import read_fields
from lite.primitive.modules.decoder import DecoderConfig
from lite.primitive.modules.decoder_hf import FIELDS, ONLY, decoder_config

HONOURED = FIELDS | {"attention_bias": False, "mlp_bias": False}
ONLY_HERE = ONLY | {"pretraining_tp": (1,), "sliding_window": (None,), "rope_interleaved": (False,), "is_llama_config": (True,)}


def read_config(source: Mapping[str, Any]) -> DecoderConfig:
    hf = read_fields(source, HONOURED, ONLY_HERE)
    return decoder_config(hf, qkv_bias=hf["attention_bias"], out_bias=hf["attention_bias"], mlp_bias=hf["mlp_bias"])


def proxy_config(geometry: str, layers: int | None) -> dict[str, Any]:
    """`real`: SmolLM2-135M's layers. `tiny`: small enough for a CPU test."""
    common = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    if geometry == "real":
        return common | {
            "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": layers or 30,
            "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        }  # fmt: skip
    return common | {
        "vocab_size": 512, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": layers or 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    }  # fmt: skip
