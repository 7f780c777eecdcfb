"""The trained SmolLM2-135M that `make test` prepares under .cache/demo: real weights, real text."""

import json
from pathlib import Path

import pytest
import torch

from lite import MegatronLiteConfig, PackedBatch, RuntimeConfig, create_runtime
from tests.unit.acceptance.test_prove import mlite

DEMO = Path(__file__).resolve().parents[2] / ".cache" / "demo"
CHECKPOINT, PROMPTS = DEMO / "SmolLM2-135M-Instruct", DEMO / "prompts.jsonl"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROMPTS.exists(), reason=f"{PROMPTS} is not prepared: run `make test` or examples/demo/prepare.py"),
]


def test_logprobs_of_real_text_are_those_of_transformers():
    """bf16 on both sides, other kernels: transformers rounds attention and norms at other points, so per-token logprobs agree to a few
    bf16 steps of the logits (2^-8 relative at logits of about 20: 0.08), and their mean much better."""
    from transformers import AutoModelForCausalLM

    lines = [json.loads(line) for line in PROMPTS.read_text().splitlines()[:3]]
    samples = [(line["prompt_ids"][:20], line["prompt_ids"][20:]) for line in lines]
    runtime = create_runtime(RuntimeConfig(hf_path=str(CHECKPOINT), backend_cfg=MegatronLiteConfig(optimizer=None)))
    batch = PackedBatch.from_samples(samples)
    ours = runtime.forward_backward(runtime.build_model(), batch, forward_only=True).log_probs[0][batch.loss_mask]
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.bfloat16)
    theirs = []
    with torch.no_grad():
        for prompt, response in samples:
            ids = torch.tensor([[*prompt, *response]])
            logprobs = model(ids).logits[0].float().log_softmax(-1)
            theirs.append(logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0])
    difference = (ours - torch.cat(theirs)).abs()
    assert len(ours) > 80 and difference.max() < 0.5 and difference.mean() < 0.05
    assert ours.mean() > -2.5, "a trained model finds this text likely; a wrong one does not"


def test_the_trained_model_is_exact_before_and_after_an_update(tmp_path, monkeypatch):
    args = ["--model", CHECKPOINT, "--prompts", PROMPTS, "--groups", 2, "--samples", 3, "--response-tokens", 16, "--updates", 1]
    assert mlite(monkeypatch, "prove", *args, "--out", tmp_path / "run") == 0
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert receipt["subject"]["weights"] == "trained" and receipt["subject"]["layers"] == 30
    assert sum(p["score"]["valid_tokens"] for p in receipt["policies"]) > 60
    assert receipt["updates"][0]["parameters_with_grad"] == receipt["updates"][0]["parameters_expected"] == 272
