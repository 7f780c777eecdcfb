"""The whole model beside transformers' own on the same fp32 checkpoint: logprobs, every parameter's gradient, an exported step.

Limits, set before any result was seen: both sides compute in fp32 and differ in the order of their sums only. Logprobs of a two-layer
model may differ by 2e-5 nats (eps 6e-8 on logits of up to 10, some tens of roundings deep), gradients by 1e-4 in relative L2, and
`assert_gradient` checks that 1.05 and 1.25 times the gradient misses that.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lite import PackedBatch
from lite.model.registry import families
from lite.primitive.ckpt.spec import parts
from lite.runtime.runtime import Handle, StepContext, TokenScores
from tests.checkpoints import same
from tests.gradients import assert_gradient
from tests.tiny import tiny_checkpoint, tiny_runtime

LOGPROB_LIMIT, GRADIENT_LIMIT = 2e-5, 1e-4
TEMPERATURE = 0.7
SAMPLES = [([5, 9, 301, 77], [4, 4, 500, 21, 8]), ([3], list(range(100, 173))), ([11, 12], [13])]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
# Every kind of block, and a Mamba layer after the others. transformers clamps the time steps at time_step_min, vLLM and we clamp nothing.
# The second sample has five chunks: transformers 5.9's scan on a CPU sums over the wrong axis from the second chunk on, 5.17's does not.
HYBRID = {"hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5, "time_step_min": 0.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "llama attention bias": ("llama", {"attention_bias": True}),
    "llama mlp bias": ("llama", {"mlp_bias": True}),
    "llama own head_dim": ("llama", {"head_dim": 32}),
    "llama no grouping": ("llama", {"num_key_value_heads": None, "tie_word_embeddings": False}),
    "llama linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama llama3": ("llama", {"rope_scaling": LLAMA3}),
    "llama yarn": ("llama", {"rope_scaling": YARN}),
    "llama new spelling": ("llama", {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}}),
    "mistral": ("llama", {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 attention bias": ("qwen3", {"attention_bias": True}),
    "qwen3 yarn": ("qwen3", {"rope_scaling": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe all sparse": ("qwen3_moe", {"mlp_only_layers": [], "norm_topk_prob": False, "tie_word_embeddings": True}),
    "qwen3_moe every second layer": ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2, "num_experts_per_tok": 3}),
    "nemotron_h": ("nemotron_h", HYBRID),
    "nemotron_h variants": ("nemotron_h", HYBRID | {"use_bias": True, "use_conv_bias": False, "norm_topk_prob": False, "n_groups": 3}),
    "nemotron_h groups of experts": ("nemotron_h", HYBRID | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "conv_kernel": 3}),
}


def weighted(logprob: Tensor, entropy: Tensor) -> Tensor:
    """A loss in which every token has another weight, of either sign."""
    return -(logprob * torch.linspace(-1, 2, len(logprob))).sum() - 0.05 * entropy.sum()


def our_loss(scores: TokenScores, batch: PackedBatch, context: StepContext) -> tuple[Tensor, dict[str, Any]]:
    return weighted(scores.logprob[batch.loss_mask], scores.entropy[batch.loss_mask]), {}


def their_model(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def their_scores(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Logprob and entropy of every response token, one sequence a call."""
    logprobs, entropies = [], []
    for prompt, response in SAMPLES:
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        log_p = (logits / TEMPERATURE).log_softmax(-1)
        logprobs.append(log_p.gather(1, torch.tensor(response)[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def our_gradients(handle: Handle) -> dict[str, Tensor]:
    """By checkpoint name: fused parameters' gradients come apart as the weight table says."""
    b, parameters = handle.bundle, dict(handle.module.named_parameters())
    grads = {}
    for part in parts(b.weights, b.config, b.layers):
        grad = parameters[part.native].grad
        assert (grad is not None) == parameters[part.native].requires_grad, part.native
        if grad is not None:
            grads[part.hf] = part.of(grad)
    return grads


def taken_apart(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """transformers' tensors under the checkpoint's names: it stacks experts, and says `model` for what a hybrid calls `backbone`."""
    tensors = list(tensors)
    hybrid = any(name.endswith("norm_f.weight") for name, _ in tensors)
    found = {}
    for name, tensor in tensors:
        name = name.replace("model.", "backbone.", 1) if hybrid else name
        prefix, experts, leaf = name.partition(".experts.")
        if not experts:
            found[name] = tensor
            continue
        for e, matrix in enumerate(tensor):
            halves = {"gate_proj": matrix.chunk(2)[0], "up_proj": matrix.chunk(2)[1]} if leaf == "gate_up_proj" else {leaf: matrix}
            found |= {f"{prefix}.experts.{e}.{part}.weight": half for part, half in halves.items()}
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_and_gradients_are_transformers(variant: str, tmp_path: Path) -> None:
    name, overrides = VARIANTS[variant]
    folder = tiny_checkpoint(name, tmp_path / "model", **overrides)
    runtime, handle = tiny_runtime(folder)
    batch = PackedBatch.from_samples(SAMPLES, temperature=TEMPERATURE)
    result = runtime.forward_backward(handle, batch, our_loss)

    model = their_model(folder)
    logprob, entropy = their_scores(model)
    weighted(logprob, entropy).backward()
    mask = batch.loss_mask
    assert (result.log_probs[0][mask] - logprob.detach()).abs().max() <= LOGPROB_LIMIT
    assert (result.entropy[0][mask] - entropy.detach()).abs().max() <= LOGPROB_LIMIT
    assert logprob.std() > 0.5, "weights too small for anything to show"

    grads = our_gradients(handle)
    theirs = taken_apart((key, p.grad) for key, p in model.named_parameters())
    assert grads.keys() == theirs.keys()
    for key, want in theirs.items():
        assert want is not None and want.count_nonzero(), key
        assert_gradient(grads[key], want, GRADIENT_LIMIT, key)


@pytest.mark.parametrize("name", families())
def test_an_exported_step_opens_in_transformers(name: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(name, tmp_path / "model", **(HYBRID if name == "nemotron_h" else {}))
    runtime, handle = tiny_runtime(folder, lr=1e-2)
    batch = PackedBatch.from_samples(SAMPLES, temperature=TEMPERATURE)
    before = runtime.forward_backward(handle, batch, our_loss).log_probs[0][batch.loss_mask]
    done, norm, _ = runtime.optimizer_step(handle)
    assert done and norm > 0
    ours = runtime.forward_backward(handle, batch, forward_only=True).log_probs[0][batch.loss_mask]

    runtime.save_hf(handle, tmp_path / "exported")
    with torch.no_grad():
        theirs = their_scores(their_model(tmp_path / "exported"))[0]
    assert (ours - theirs).abs().max() <= LOGPROB_LIMIT
    assert (ours - before).abs().max() > 100 * LOGPROB_LIMIT, "the step changed nothing, so an export of the old weights would pass"


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "nemotron_h"])
def test_a_bf16_export_holds_the_deployed_bytes(name: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(name, tmp_path / "model", torch.bfloat16, layers=None)
    runtime, handle = tiny_runtime(folder, "bf16", lr=1e-2)
    runtime.forward_backward(handle, PackedBatch.from_samples(SAMPLES), our_loss)
    runtime.optimizer_step(handle)
    runtime.save_hf(handle, tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto")
    biases = ((name, b) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))  # fp32 there, too
    theirs = taken_apart([*model.named_parameters(), *biases])
    exported = dict(runtime.export_weights(handle))
    assert exported.keys() == theirs.keys()
    assert all(same(exported[key].to(p.dtype), p.detach()) for key, p in theirs.items())
    wider = {key.rpartition(".")[2] for key, p in exported.items() if p.dtype != torch.bfloat16}
    assert wider == ({"A_log", "e_score_correction_bias"} if name == "nemotron_h" else set())  # they round A_log, vLLM does not
