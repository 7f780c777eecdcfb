"""Tiny checkpoints with weights of a realistic size, and the trainers and engines that the tests open on them."""

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lite.model.protocol import ModelBundle, ParallelConfig
from lite.model.registry import families, family
from lite.primitive.ckpt.hf_weights import export_weights
from lite.primitive.ckpt.safetensors_files import write_checkpoint
from lite.primitive.compare import Comparison, bits, compare_bytes
from lite.primitive.ops.bridges import reference_ops
from lite.runtime.batch import PackedBatch
from lite.runtime.config import MegatronLiteConfig, OptimizerConfig, RuntimeConfig
from lite.runtime.rollout.embedded import EmbeddedEngine
from lite.runtime.rollout.engine import Prompt, Trajectory
from lite.runtime.runtime import Handle, Runtime

# Models this small gain nothing from a second thread, and threads that share a busy core wait for each other twenty times longer than
# they compute. What threads may not change is test_determinism.py's subject.
torch.set_num_threads(1)

FAMILIES = families()
TIES = [name for name in FAMILIES if name != "nemotron_h"]  # their heads can be tied to the embedding
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Four query heads on two key heads: a fused projection whose parts are told apart by nothing but their order.
SMALL = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip


def hf_config(family_name: str, **changes: Any) -> dict[str, Any]:
    """Two layers, or of a hybrid as many as its pattern has: each is one block."""
    tiny = family(family_name).proxy_config("tiny", None)
    depth = {"num_hidden_layers": tiny["num_hidden_layers"]} if "hybrid_override_pattern" in tiny else {}
    return tiny | SMALL | depth | changes


def build(config: dict[str, Any], dtype: torch.dtype, name: str) -> ModelBundle:
    protocol = family(name)
    model_cfg = protocol.build_model_config(config)
    return protocol.build_model(
        model_cfg, impl_cfg=protocol.ImplConfig(), parallel=ParallelConfig(), kernels=reference_ops(), dtype=dtype
    )


def fill(parameters: Iterable[tuple[str, Tensor]], seed: int = 0) -> None:
    """Matrices std fan_in**-0.5, norms about 1, biases about 0: activations then have the size they have in a trained model. A scan's
    time steps are those that Mamba-2 starts from, so that its states last."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in parameters:
            noise = torch.randn(p.shape, generator=generator)
            if "norm" in name or name.endswith(".D"):
                p.copy_(1 + 0.1 * noise)
            elif name.endswith("dt_bias"):
                p.copy_(-3 + noise)
            else:
                p.copy_(0.1 * noise if p.ndim == 1 else noise * p.shape[-1] ** -0.5)


def make_tensors(name: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by their Hugging Face names."""
    bundle = build(hf_config(name, **changes), dtype, name)
    parameters = dict(bundle.module.named_parameters())
    fill(parameters.items(), seed)
    return dict(export_weights(bundle.weights, bundle.config, bundle.layers, parameters))


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="mlite-tests-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def checkpoint(name: str = "llama", dtype: str = "bf16", seed: int = 0, tied: bool | None = None) -> Path:
    """A folder that tests share and must not write to."""
    changes = {} if tied is None else {"tie_word_embeddings": tied}
    folder = _root() / f"{name}-{dtype}-{seed}-{tied}"
    write_checkpoint(folder, hf_config(name, **changes), make_tensors(name, DTYPES[dtype], seed, **changes).items())
    return folder


def trainer(folder: Path, dtype: str = "bf16", optimizer: OptimizerConfig | None = None) -> tuple[Runtime, Handle]:
    runtime = Runtime(RuntimeConfig(str(folder), backend_cfg=MegatronLiteConfig(dtype=dtype, device="cpu", optimizer=optimizer)))  # type: ignore[arg-type]
    return runtime, runtime.build_model()


def engine(folder: Path, dtype: str = "bf16", **options: Any) -> EmbeddedEngine:
    config = RuntimeConfig(str(folder), backend_cfg=MegatronLiteConfig(dtype=dtype, device="cpu", optimizer=None))  # type: ignore[arg-type]
    return EmbeddedEngine(Runtime(config).bundle(), folder, **options)


def make_prompts(lengths: Sequence[int], seed: int = 0, vocab: int = SMALL["vocab_size"]) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    return [Prompt(f"p{seed}-{i}", tuple(torch.randint(0, vocab, (n,), generator=generator).tolist())) for i, n in enumerate(lengths)]


def make_samples(lengths: Sequence[tuple[int, int]], seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids) of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, SMALL["vocab_size"], (n,), generator=generator).tolist()
    return [(draw(prompt), draw(response)) for prompt, response in lengths]


def batch_of(trajectories: Sequence[Trajectory], temperature: float = 1.0) -> PackedBatch:
    return PackedBatch.from_samples([(t.prompt_ids, t.response_ids) for t in trajectories], temperature=temperature)


def against_trainer(trajectories: Sequence[Trajectory], runtime: Runtime, handle: Handle, temperature: float = 1.0) -> Comparison:
    """The engine's logprobs beside those of a packed training forward over the same tokens."""
    batch = batch_of(trajectories, temperature)
    scores = runtime.forward_backward(handle, batch, forward_only=True).log_probs[0][batch.loss_mask]
    return compare_bytes(torch.cat([t.logprobs for t in trajectories]), scores)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal shapes and equal bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def answers(trajectories: Sequence[Trajectory]) -> dict[tuple[str, int], tuple[tuple[int, ...], bytes]]:
    """Tokens and logprob bytes of each response, by request: what must not depend on anything but the request."""
    return {(t.uid, t.sample): (t.response_ids, t.logprobs.numpy().tobytes()) for t in trajectories}
