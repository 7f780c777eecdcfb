"""A checkpoint of Nemotron-3-Nano's layer geometry with random weights of realistic magnitude, under the names that vLLM reads."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

PATTERN = "MEMEM*EM"
CONFIG = {
    "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": PATTERN, "hidden_size": 2688,
    "num_hidden_layers": len(PATTERN), "vocab_size": 131072, "intermediate_size": 1856, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 6, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "mlp_hidden_act": "relu2", "mlp_bias": False,
    "attention_bias": False, "use_bias": False, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "attention_head_dim": 128, "norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "rms_norm_eps": 1e-5, "mamba_num_heads": 64,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128, "mamba_hidden_act": "silu",
    "mamba_proj_bias": False, "use_conv_bias": True, "expand": 2, "time_step_limit": [0.0, 1e30], "residual_in_fp32": False,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "num_logits_to_keep": 1,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_mamba_kernels": True, "sliding_window": None,
}  # fmt: skip
HIDDEN, INNER, CHANNELS, HEADS = 2688, 64 * 64, 64 * 64 + 2 * 8 * 128, 64


def write_checkpoint(folder: Path, seed: int = 0) -> None:
    """A file a layer. A matrix has a standard deviation of 1/sqrt(inputs); A of -1 to about -12 and steps of about 0.02 to 0.5, as trained
    models have them: states last, and what they hold moves the logits."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return (mean + std * torch.randn(*shape, generator=generator, device="cuda")).bfloat16().cpu()

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        return normal(outputs, inputs, std=gain * inputs**-0.5)

    def mamba() -> dict[str, torch.Tensor]:
        return {
            "in_proj.weight": matrix(INNER + CHANNELS + HEADS, HIDDEN), "conv1d.weight": normal(CHANNELS, 1, 4, std=0.5),
            "conv1d.bias": normal(CHANNELS, std=0.02), "A_log": (1 + 4 * normal(HEADS, std=1.0).float().abs()).log().bfloat16(),
            "D": normal(HEADS, std=0.1, mean=1.0), "dt_bias": normal(HEADS, std=1.0, mean=-3.0),
            "norm.weight": normal(INNER, std=0.1, mean=1.0), "out_proj.weight": matrix(HIDDEN, INNER),
        }  # fmt: skip

    def attention() -> dict[str, torch.Tensor]:
        heads, kv_heads = CONFIG["num_attention_heads"] * 128, CONFIG["num_key_value_heads"] * 128
        return {
            "q_proj.weight": matrix(heads, HIDDEN), "k_proj.weight": matrix(kv_heads, HIDDEN),
            "v_proj.weight": matrix(kv_heads, HIDDEN), "o_proj.weight": matrix(HIDDEN, heads),
        }  # fmt: skip

    def experts() -> dict[str, torch.Tensor]:
        size, shared, count = CONFIG["moe_intermediate_size"], CONFIG["moe_shared_expert_intermediate_size"], CONFIG["n_routed_experts"]
        tensors = {
            "gate.weight": matrix(count, HIDDEN, gain=2.0), "gate.e_score_correction_bias": normal(count, std=0.05).float(),
            "shared_experts.up_proj.weight": matrix(shared, HIDDEN), "shared_experts.down_proj.weight": matrix(HIDDEN, shared),
        }  # fmt: skip
        for e in range(count):
            tensors[f"experts.{e}.up_proj.weight"], tensors[f"experts.{e}.down_proj.weight"] = matrix(size, HIDDEN), matrix(HIDDEN, size)
        return tensors

    for i, letter in enumerate(PATTERN):
        tensors = {"M": mamba, "*": attention, "E": experts}[letter]()
        held = {f"backbone.layers.{i}.mixer.{name}": tensor for name, tensor in tensors.items()}
        held[f"backbone.layers.{i}.norm.weight"] = normal(HIDDEN, std=0.1, mean=1.0)
        save_file(held, folder / f"model-{i:05d}.safetensors")
    save_file(
        {
            "backbone.embeddings.weight": normal(CONFIG["vocab_size"], HIDDEN, std=1.0),
            "backbone.norm_f.weight": normal(HIDDEN, std=0.1, mean=1.0),
            "lm_head.weight": matrix(CONFIG["vocab_size"], HIDDEN, gain=2.0),
        },
        folder / f"model-{len(PATTERN):05d}.safetensors",
    )
