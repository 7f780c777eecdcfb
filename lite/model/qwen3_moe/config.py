"""config.json of qwen3_moe checkpoints, and of its proxies."""

from collections.abc import Mapping
from typing import Any

from lite.errors import InputError
from lite.primitive.ckpt.hf_config import REQUIRED, read_fields
from lite.primitive.modules.decoder import DecoderConfig
from lite.primitive.modules.decoder_hf import FIELDS, ONLY, decoder_config
from lite.primitive.modules.moe import MoEConfig

HONOURED = FIELDS | {
    "attention_bias": False, "num_key_value_heads": REQUIRED, "sliding_window": None, "max_window_layers": None, "num_experts": None,
    "num_local_experts": None, "num_experts_per_tok": REQUIRED, "moe_intermediate_size": REQUIRED, "norm_topk_prob": False,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
ONLY_HERE = ONLY | {"use_sliding_window": (False,), "output_router_logits": (False,)}
IGNORED = {"router_aux_loss_coef": "it weighs a loss that is added where output_router_logits is set, which is refused"}


def read_config(source: Mapping[str, Any]) -> DecoderConfig:
    hf = read_fields(source, HONOURED, ONLY_HERE, IGNORED)
    experts = {hf[key] for key in ("num_experts", "num_local_experts")} - {None}  # two spellings of one number
    if len(experts) != 1:
        raise InputError("config.json", f"{len(experts)} values for 'num_experts'", "give one")
    if not all(type(layer) is int for layer in hf["mlp_only_layers"]):
        raise InputError("config.json", f"mlp_only_layers = {hf['mlp_only_layers']!r} are no layers", "correct it")
    moe = MoEConfig(
        experts=experts.pop(),
        k=hf["num_experts_per_tok"],
        intermediate=hf["moe_intermediate_size"],
        router="softmax",
        activation="silu",
        renormalize=hf["norm_topk_prob"],
    )

    def mlp(layer: int) -> str:
        dense = layer in hf["mlp_only_layers"] or (layer + 1) % hf["decoder_sparse_step"]
        return "gated" if dense else "moe"

    return decoder_config(
        hf,
        qk_norm=True,
        qkv_bias=hf["attention_bias"],
        out_bias=hf["attention_bias"],
        mlps=tuple(mlp(layer) for layer in range(hf["num_hidden_layers"])),
        moe=moe,
    )


def proxy_config(geometry: str, layers: int | None) -> dict[str, Any]:
    """`real`: Qwen3-30B-A3B's layers. `tiny`: small enough for a CPU test, its first layer dense."""
    common = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False, "norm_topk_prob": True,
    }  # fmt: skip
    if geometry == "real":
        return common | {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": layers or 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
            "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        }  # fmt: skip
    return common | {
        "vocab_size": 512, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": layers or 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
        "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0],
    }  # fmt: skip
