"""A checkpoint of Qwen3-30B-A3B's layer geometry with random weights of realistic magnitude, under the names that vLLM reads."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False, "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 40960, "attention_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def write_checkpoint(folder: Path, layers: int, seed: int = 0) -> None:
    """A file a layer. A matrix has a standard deviation of 1/sqrt(inputs), a router twice that: its logits choose, and none always wins."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden, size, dim = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"], CONFIG["head_dim"]
    heads, kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]

    def normal(*shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return (mean + std * torch.randn(*shape, generator=generator, device="cuda")).bfloat16().cpu()

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        return normal(outputs, inputs, std=gain * inputs**-0.5)

    for i in range(layers):
        tensors = {
            "self_attn.q_proj": matrix(heads * dim, hidden), "self_attn.k_proj": matrix(kv_heads * dim, hidden),
            "self_attn.v_proj": matrix(kv_heads * dim, hidden), "self_attn.o_proj": matrix(hidden, heads * dim),
            "self_attn.q_norm": normal(dim, std=0.1, mean=1.0), "self_attn.k_norm": normal(dim, std=0.1, mean=1.0),
            "input_layernorm": normal(hidden, std=0.1, mean=1.0), "post_attention_layernorm": normal(hidden, std=0.1, mean=1.0),
            "mlp.gate": matrix(CONFIG["num_experts"], hidden, gain=2.0),
        }  # fmt: skip
        for e in range(CONFIG["num_experts"]):
            tensors |= {
                f"mlp.experts.{e}.gate_proj": matrix(size, hidden), f"mlp.experts.{e}.up_proj": matrix(size, hidden),
                f"mlp.experts.{e}.down_proj": matrix(hidden, size, gain=3.0),
            }  # fmt: skip
        save_file({f"model.layers.{i}.{name}.weight": t for name, t in tensors.items()}, folder / f"model-{i:05d}.safetensors")
    save_file(
        {
            "model.embed_tokens.weight": normal(CONFIG["vocab_size"], hidden, std=0.5),
            "model.norm.weight": normal(hidden, std=0.1, mean=1.0),
            "lm_head.weight": matrix(CONFIG["vocab_size"], hidden, gain=2.0),
        },
        folder / f"model-{layers:05d}.safetensors",
    )
