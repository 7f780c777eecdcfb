"""How Hugging Face spells the shared decoder: config keys and tensor names. Families add what is theirs."""

from typing import Any

from lite.primitive.ckpt.hf_config import REQUIRED
from lite.primitive.ckpt.spec import Skip, Weight
from lite.primitive.modules.decoder import DecoderConfig
from lite.primitive.modules.rotary import RotaryConfig

FIELDS: dict[str, Any] = {
    "vocab_size": REQUIRED, "hidden_size": REQUIRED, "intermediate_size": REQUIRED, "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": REQUIRED,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": None, "rope_scaling": None, "rope_parameters": None,
}  # fmt: skip
ONLY: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "attention_dropout": (0.0,)}


def decoder_config(hf: dict[str, Any], **variants: Any) -> DecoderConfig:
    """hf: FIELDS as read. variants: the fields of DecoderConfig that make the family (biases, qk_norm, experts)."""
    head_dim = hf["head_dim"] or hf["hidden_size"] // hf["num_attention_heads"]
    layers = hf["num_hidden_layers"]
    usual = {"mixers": ("attention",) * layers, "mlps": ("gated",) * layers}
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden=hf["hidden_size"],
        intermediate=hf["intermediate_size"],
        heads=hf["num_attention_heads"],
        kv_heads=hf["num_key_value_heads"] or hf["num_attention_heads"],
        head_dim=head_dim,
        norm_eps=hf["rms_norm_eps"],
        max_positions=hf["max_position_embeddings"],
        rotary=RotaryConfig.from_hf(hf, head_dim),
        tied_head=hf["tie_word_embeddings"],
        **usual | variants,
    )


def qkv_rows(c: DecoderConfig) -> tuple[int, ...]:
    return (c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim)


def _gate_up_rows(c: DecoderConfig) -> tuple[int, ...]:
    return (c.intermediate, c.intermediate)


def _gated(c: DecoderConfig, layer: int) -> bool:
    return c.mlps[layer] == "gated"


_LAYER = "model.layers.{layer}."
_QKV = tuple(_LAYER + f"self_attn.{part}_proj" for part in "qkv")
_GATE_UP = tuple(_LAYER + f"mlp.{part}_proj" for part in ("gate", "up"))

DECODER_WEIGHTS = (
    Weight("embed.weight", ("model.embed_tokens.weight",), shard_axis=0),
    Weight("layers.{layer}.mixer_norm.weight", (_LAYER + "input_layernorm.weight",)),
    Weight("layers.{layer}.mixer.qkv.weight", tuple(f"{name}.weight" for name in _QKV), rows=qkv_rows, shard_axis=0),
    Weight("layers.{layer}.mixer.qkv.bias", tuple(f"{name}.bias" for name in _QKV), rows=qkv_rows, shard_axis=0, when=lambda c: c.qkv_bias),
    Weight("layers.{layer}.mixer.q_norm.weight", (_LAYER + "self_attn.q_norm.weight",), when=lambda c: c.qk_norm),
    Weight("layers.{layer}.mixer.k_norm.weight", (_LAYER + "self_attn.k_norm.weight",), when=lambda c: c.qk_norm),
    Weight("layers.{layer}.mixer.out.weight", (_LAYER + "self_attn.o_proj.weight",), shard_axis=1),
    Weight("layers.{layer}.mixer.out.bias", (_LAYER + "self_attn.o_proj.bias",), when=lambda c: c.out_bias),
    Weight("layers.{layer}.mlp_norm.weight", (_LAYER + "post_attention_layernorm.weight",)),
    Weight("layers.{layer}.mlp.gate_up.weight", tuple(f"{name}.weight" for name in _GATE_UP), rows=_gate_up_rows, shard_axis=0, at=_gated),
    Weight(
        "layers.{layer}.mlp.gate_up.bias",
        tuple(f"{name}.bias" for name in _GATE_UP),
        rows=_gate_up_rows,
        shard_axis=0,
        when=lambda c: c.mlp_bias,
        at=_gated,
    ),
    Weight("layers.{layer}.mlp.down.weight", (_LAYER + "mlp.down_proj.weight",), shard_axis=1, at=_gated),
    Weight("layers.{layer}.mlp.down.bias", (_LAYER + "mlp.down_proj.bias",), when=lambda c: c.mlp_bias, at=_gated),
    Weight("norm.weight", ("model.norm.weight",)),
    Weight("head.weight", ("lm_head.weight",), when=lambda c: not c.tied_head, shard_axis=0),
    Skip("lm_head.weight", "tied to the embedding", when=lambda c: c.tied_head),
    Skip("model.layers.*.self_attn.rotary_emb.inv_freq", "computed from the config"),
)
