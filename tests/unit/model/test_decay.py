"""The decay of a Mamba layer keeps the precision that its checkpoint gives it, from there to the engine and back."""

from pathlib import Path

import torch

from lite.primitive.ckpt.safetensors_files import write_checkpoint
from tests.checkpoints import checkpoint, engine, hf_config, make_tensors, same, trainer
from tests.training import BASE, batch, nll

A_LOG, NATIVE = "backbone.layers.0.mixer.A_log", "layers.0.mixer.decay.A_log"


def test_an_fp32_decay_in_a_bf16_checkpoint_is_not_rounded(tmp_path: Path) -> None:
    """vLLM makes A of it in fp32; a trainer that rounded it would differ from the first token on."""
    tensors = make_tensors("nemotron_h")
    steps = 1 + 1e-3 * torch.arange(len(tensors[A_LOG]))
    assert not same(steps.bfloat16().float(), steps), "what is planted here"
    write_checkpoint(tmp_path / "model", hf_config("nemotron_h"), (tensors | {A_LOG: steps}).items())
    runtime, handle = trainer(tmp_path / "model", "bf16", BASE)
    decay = handle.module.get_parameter(NATIVE)
    assert same(decay.detach(), steps)
    handle.module.to(torch.bfloat16)
    assert handle.module.get_parameter(NATIVE) is decay and same(decay.detach(), steps)

    runtime.forward_backward(handle, batch(), nll)
    assert runtime.optimizer_step(handle)[0]
    assert same(handle.optimizer.masters[NATIVE], decay.detach()), "the master itself is deployed"
    assert not same(decay.detach(), steps)
    other = engine(checkpoint("nemotron_h"))
    other.update_weights(runtime.export_weights(handle), 1)
    assert same(other.bundle.module.get_parameter(NATIVE).detach(), decay.detach())
    assert other.fingerprint() == handle.weights.fingerprint()
