"""The engine on a tiny checkpoint in one process, batches as verl's trainers have them, and what the Runtime alone makes of the same."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import McoreOptimizerConfig
from verl.workers.utils.losses import sft_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding
from verl_mlite.engine import MliteEngine
from verl_mlite.engine_config import MliteEngineConfig

from lite.primitive.compare import bits
from lite.runtime.batch import PackedBatch
from lite.runtime.config import MegatronLiteConfig, RuntimeConfig
from lite.runtime.runtime import Runtime
from tests.checkpoints import checkpoint, make_samples

LENGTHS = [(4, 9), (1, 5), (12, 20), (7, 1), (3, 14), (2, 2)]


def engine(
    contents: tuple[str, ...] = ("model", "optimizer", "extra"),
    folder: Path | None = None,
    optim: McoreOptimizerConfig | None = None,
    **config: Any,
) -> MliteEngine:
    model = SimpleNamespace(
        local_path=str(folder or checkpoint("qwen3", "fp32")), override_config={"attn_implementation": "sdpa"},
        mtp=SimpleNamespace(enable=False), get=lambda key, default=None: default,
    )  # fmt: skip
    made = MliteEngine(
        model,
        MliteEngineConfig(dtype="float32", **config),
        None if config.get("forward_only") else optim or McoreOptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0),
        CheckpointConfig(save_contents=list(contents), load_contents=list(contents)),
    )
    made.initialize()
    return made


def samples() -> list[tuple[list[int], list[int]]]:
    return make_samples(LENGTHS)


def padded_batch(**tensors: torch.Tensor) -> TensorDict:
    """As an RL trainer has it: prompts padded on the left, responses on the right."""
    width, height = max(p for p, _ in LENGTHS), max(r for _, r in LENGTHS)
    left = [[0] * (width - len(p)) + p for p, _ in samples()]
    right = [r + [0] * (height - len(r)) for _, r in samples()]
    mask = [[0] * (width - p) + [1] * (p + r) + [0] * (height - r) for p, r in LENGTHS]
    attention = torch.tensor(mask)
    return TensorDict({
        "input_ids": torch.tensor([a + b for a, b in zip(left, right, strict=True)]), "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0), "prompts": torch.tensor(left), "responses": torch.tensor(right),
        "response_mask": attention[:, width:], **tensors,
    }, batch_size=len(LENGTHS))  # fmt: skip


def rl_batch(budget: int = 64, temperature: Any = 1.0, **tensors: torch.Tensor) -> TensorDict:
    data = left_right_2_no_padding(padded_batch(**tensors))
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=budget, calculate_entropy=True)
    if isinstance(temperature, torch.Tensor):
        data["temperature"] = temperature
    else:
        tu.assign_non_tensor(data, temperature=temperature)
    tu.assign_non_tensor_stack(data, "uid", ["a", "a", "b", "b", "c", "c"])
    return data


def sft_batch(budget: int = 64) -> TensorDict:
    jagged = lambda rows: torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
    data = TensorDict({
        "input_ids": jagged([p + r for p, r in samples()]), "loss_mask": jagged([[0] * p + [1] * r for p, r in LENGTHS]),
    }, batch_size=len(LENGTHS))  # fmt: skip
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=budget, temperature=1.0)
    return data


def direct(temperature: float = 1.0, name: str = "log_probs") -> list[torch.Tensor]:
    """Each response's logprobs, or what else is named, by the Runtime alone."""
    runtime = Runtime(
        RuntimeConfig(checkpoint("qwen3", "fp32"), backend_cfg=MegatronLiteConfig(dtype="fp32", device="cpu", optimizer=None))
    )
    batch = PackedBatch.from_samples(samples(), temperature)
    scores = getattr(runtime.forward_backward(runtime.build_model(), batch, forward_only=True), name)[0][batch.loss_mask]
    return list(scores.split([r for _, r in LENGTHS]))


def responses(output: dict[str, Any], data: TensorDict, name: str = "log_probs") -> list[torch.Tensor]:
    """As the trainer slices them out of the model output."""
    rows = no_padding_2_padding(output["model_output"][name], data)
    return [row[:n] for row, (_, n) in zip(rows, LENGTHS, strict=True)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def train(e: MliteEngine, steps: int, budget: int = 64) -> list[dict[str, Any]]:
    found = []
    for _ in range(steps):
        with e.train_mode():
            found.append(e.train_batch(sft_batch(budget), lambda **given: sft_loss(None, **given)))
            e.lr_scheduler_step()
    return found
