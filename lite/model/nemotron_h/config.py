"""config.json of nemotron_h checkpoints, and of its proxies."""

import math
from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

from lite.errors import InputError
from lite.primitive.ckpt.hf_config import REQUIRED, read_fields
from lite.primitive.kernels.visible import SSDShape
from lite.primitive.modules.decoder import DecoderConfig, MixerKind, MLPKind
from lite.primitive.modules.mamba2 import Mamba2Config
from lite.primitive.modules.moe import MoEConfig

MAMBA_SIZES = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "chunk_size")
MOE_SIZES = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size")
HONOURED = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings"), REQUIRED),
    **dict.fromkeys(("num_key_value_heads", "num_hidden_layers", "hybrid_override_pattern", "layers_block_type")),
    **dict.fromkeys((*MAMBA_SIZES, *MOE_SIZES)),
    "head_dim": 128, "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
}  # fmt: skip
ONLY = {
    "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
    "mamba_proj_bias": (False,), "attention_dropout": (0.0,), "hidden_dropout": (0.0,), "sliding_window": (None,),
    "residual_in_fp32": (False,), "moe_latent_size": (None,), "n_shared_experts": (1,), "mamba_ssm_cache_dtype": ("float32",),
    "tie_word_embeddings": (False,),  # neither transformers nor vLLM ties them
    # no limit, as JSON spells it and as transformers does
    "time_step_limit": (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
}  # fmt: skip
IGNORED = {
    "expand": "Mamba's width is that of its heads",
    **dict.fromkeys(("time_step_min", "time_step_max", "time_step_floor"), "dt_bias is initialised by it"),
    "rescale_prenorm_residual": "weights are initialised by it",
    **dict.fromkeys(("rope_theta", "partial_rotary_factor"), "attention has no rotary"),
    **dict.fromkeys(("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"), "see Skip in the weight table"),
    **dict.fromkeys(("use_mamba_kernels", "moe_shared_expert_overlap", "num_logits_to_keep"), "how transformers runs it"),
}

BLOCKS: dict[str, tuple[MixerKind | None, MLPKind | None]] = {
    "M": ("mamba", None), "*": ("attention", None), "E": (None, "moe"), "-": (None, "relu2"),
}  # fmt: skip
SPELLED = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "moe": "E", "mlp": "-"}


def read_pattern(hf: Mapping[str, Any]) -> str:
    """A letter a layer. hf: HONOURED as read; both spellings may be there."""
    names = [SPELLED.get(str(name)) for name in hf["layers_block_type"] or ()]
    if None in names:
        raise InputError("config.json", f"layers_block_type holds {hf['layers_block_type'][names.index(None)]!r}", f"only {list(SPELLED)}")
    spellings = {spelling for spelling in (hf["hybrid_override_pattern"], "".join(map(str, names))) if spelling}
    if len(spellings) != 1:
        problem = "'hybrid_override_pattern' differs from layers_block_type" if spellings else "lacks 'hybrid_override_pattern'"
        raise InputError("config.json", problem, "give it, or layers_block_type")
    pattern = spellings.pop()
    if unknown := set(pattern) - set(BLOCKS):
        raise InputError("config.json", f"hybrid_override_pattern holds {min(unknown)!r}", f"only {' '.join(BLOCKS)} are")
    if hf["num_hidden_layers"] not in (None, len(pattern)):
        raise InputError("config.json", f"num_hidden_layers = {hf['num_hidden_layers']} for a pattern of {len(pattern)}", "give both alike")
    return pattern


def read_config(source: Mapping[str, Any]) -> DecoderConfig:
    norm_eps = (source.get("layer_norm_epsilon", HONOURED["layer_norm_epsilon"]),)
    hf = read_fields(source, HONOURED, ONLY | {"norm_eps": norm_eps}, IGNORED)
    pattern = read_pattern(hf)
    needed = (*(MAMBA_SIZES if "M" in pattern else ()), *(MOE_SIZES if "E" in pattern else ()))
    if missing := [key for key in needed if hf[key] is None]:
        raise InputError("config.json", f"lacks {missing[0]!r}", "add it")
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden=hf["hidden_size"],
        intermediate=hf["intermediate_size"],
        mixers=tuple(BLOCKS[letter][0] for letter in pattern),
        mlps=tuple(BLOCKS[letter][1] for letter in pattern),
        heads=hf["num_attention_heads"],
        kv_heads=hf["num_key_value_heads"] or hf["num_attention_heads"],
        head_dim=hf["head_dim"],
        norm_eps=hf["layer_norm_epsilon"],
        max_positions=hf["max_position_embeddings"],
        rotary=None,
        tied_head=False,
        mamba=_mamba(hf) if "M" in pattern else None,
        moe=_moe(hf) if "E" in pattern else None,
    )


def _mamba(hf: Mapping[str, Any]) -> Mamba2Config:
    shape = SSDShape(*(hf[key] for key in ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "chunk_size")))
    return Mamba2Config(shape=shape, conv_width=hf["conv_kernel"], conv_bias=hf["use_conv_bias"], proj_bias=hf["use_bias"])


def _moe(hf: Mapping[str, Any]) -> MoEConfig:
    return MoEConfig(
        experts=hf["n_routed_experts"],
        k=hf["num_experts_per_tok"],
        intermediate=hf["moe_intermediate_size"],
        router="sigmoid",
        activation="relu2_no_mul",
        renormalize=hf["norm_topk_prob"],
        groups=hf["n_group"],
        topk_groups=hf["topk_group"],
        scale=hf["routed_scaling_factor"],
        shared=hf["moe_shared_expert_intermediate_size"],
    )


REAL_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
TINY_PATTERN = "ME*-M"


def proxy_config(geometry: str, layers: int | None) -> dict[str, Any]:
    """`real`: the layers of Nemotron-3-Nano-30B-A3B, the first ones of its pattern; from 7 on every pair of neighbours is among them.
    `tiny`: small enough for a CPU test, with every kind of block from 4 layers on."""
    whole = REAL_PATTERN if geometry == "real" else TINY_PATTERN
    pattern = "".join(islice(cycle(whole), layers or len(whole)))
    common = {
        "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "mlp_hidden_act": "relu2", "bos_token_id": 1,
        "eos_token_id": 2, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False, "num_hidden_layers": len(pattern),
        "hybrid_override_pattern": pattern, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "conv_kernel": 4,
    }  # fmt: skip
    if geometry == "real":
        return common | {
            "vocab_size": 131072, "hidden_size": 2688, "intermediate_size": 1856, "num_attention_heads": 32, "num_key_value_heads": 2,
            "head_dim": 128, "max_position_embeddings": 262144, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8,
            "ssm_state_size": 128, "chunk_size": 128, "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
        }  # fmt: skip
    return common | {
        "vocab_size": 512, "hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 1024, "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2,
        "ssm_state_size": 16, "chunk_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 96,
    }  # fmt: skip
