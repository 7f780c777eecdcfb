"""One arm of `train_step`, in its own process: a model, and forward and backward of a packed batch under it.

exact         the lite model on vLLM's kernels in batch-invariant mode (on a CPU: the reference kernels), weight gradients in fp32
native        the same model on torch's kernels (`native_ops`), weight gradients in the model dtype
transformers  AutoModelForCausalLM, weight gradients in the model dtype, logits of all scored rows at once

The loss of all three is minus the mean logprob of the response tokens; only their rows go through the head; no entropy.
"""

import time
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.legs import described, serve
from benchmarks.native_mamba_moe import sequence_of_rows
from benchmarks.native_ops import NativeOps, packed_attention
from benchmarks.packed import packed_batch
from benchmarks.profiles import Watch, summary, synchronize
from benchmarks.report import model_config
from lite.errors import InputError
from lite.primitive.ckpt.safetensors_files import read_tensors
from lite.primitive.kernels.vllm import enter_batch_invariance
from lite.primitive.ops.bridges import Ops, reference_ops, vllm_ops
from lite.runtime.batch import PackedBatch
from lite.runtime.config import MegatronLiteConfig, RuntimeConfig
from lite.runtime.runtime import Runtime
from lite.runtime.weights import DeployedWeights

Loss = Callable[["Inputs"], Tensor]


class Inputs:
    """A batch on the device, with everything derived from it made before the clock starts, for every arm alike."""

    def __init__(self, batch: PackedBatch, device: str):
        batch = batch.to(torch.device(device))
        rows = batch.scored_rows
        assert rows is not None
        self.ids, self.labels, self.rows, self.temperatures = batch.input_ids, batch.labels, rows, batch.temperatures
        self.context = batch.context
        self.sequences = sequence_of_rows(batch.context.seqlens, len(batch.input_ids))


def exact_kernels(kernels: str) -> Ops:
    if kernels == "reference":
        return reference_ops()
    enter_batch_invariance()
    return vllm_ops(kernels)


def lite_model(spec: dict[str, Any], ops: Any) -> nn.Module:
    """Loaded, without the probe: what is timed here was probed by `mlite prove`."""
    backend = MegatronLiteConfig(dtype=spec["dtype"], device=spec["device"], optimizer=None)
    bundle = Runtime(RuntimeConfig(hf_path=spec["folder"], backend_cfg=backend)).bundle(ops)
    DeployedWeights(bundle).load(read_tensors(Path(spec["folder"])), 0, spec["folder"])
    return bundle.module.train()


def exact(spec: dict[str, Any]) -> tuple[nn.Module, Loss]:
    model = lite_model(spec, exact_kernels(spec["kernels"]))
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32  # as the runtime's optimizer asks for
    return model, lambda inputs: lite_loss(model, inputs)


def native(spec: dict[str, Any]) -> tuple[nn.Module, Loss]:
    model = lite_model(spec, NativeOps())
    return model, lambda inputs: lite_loss(model, inputs)


def lite_loss(model: nn.Module, x: Inputs) -> Tensor:
    scores = model(x.ids, x.context, x.labels, x.temperatures, x.rows, with_entropy=False)
    return -scores.logprob.sum() / len(x.rows)  # rows that were not scored are 0


def transformers(spec: dict[str, Any]) -> tuple[nn.Module, Loss]:
    """spec["attention"]: sdpa, or flash, which gives transformers torch's own packed FlashAttention by its attention interface."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    mamba = model_config(Path(spec["folder"])).mamba
    if mamba and find_spec("mamba_ssm") is None:
        # it falls back to torch, which overlooks seq_idx and lets a sequence's state into the next one
        raise InputError("transformers", "packs Mamba-2 only with mamba_ssm", "install it on a GPU machine, or use --against native")

    def flash(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scaling: float, **packed: Any) -> Any:
        rows = (t[0].transpose(0, 1) for t in (q, k, v))
        return packed_attention(*rows, packed["cu_seq_lens_q"], packed["max_length_q"], scaling)[None], None

    AttentionInterface.register("torch_packed", flash)
    model = AutoModelForCausalLM.from_pretrained(
        spec["folder"],
        dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[spec["dtype"]],
        attn_implementation={"flash": "torch_packed", "sdpa": "sdpa"}[spec["attention"]],
        **({"time_step_min": 0.0} if mamba else {}),  # by default it clamps time steps, which vLLM and we do not
    )
    model.to(spec["device"]).train()

    def loss(x: Inputs) -> Tensor:
        cu, _, longest, _ = x.context.seqlens
        logits = model(
            input_ids=x.ids[None], position_ids=x.context.positions[None], use_cache=False, logits_to_keep=x.rows,
            seq_idx=x.sequences, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=longest, max_length_k=longest,
        ).logits[0]  # fmt: skip
        return F.cross_entropy(logits.float(), x.labels[x.rows])

    return model, loss


ARMS = {"exact": exact, "native": native, "transformers": transformers}


def build(spec: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    device = spec["device"]
    model, loss = ARMS[spec["arm"]](spec)

    @lru_cache(maxsize=4)
    def inputs(tokens: int) -> Inputs:
        return Inputs(packed_batch(tokens, spec["longest"], spec["vocab_size"], spec["seed"]), device)

    def steps(x: Inputs, count: int) -> float:
        for _ in range(count):
            model.zero_grad(set_to_none=True)
            value = loss(x)
            value.backward()
        return float(value.detach())

    def release() -> None:
        """Gives the device back to the other arms."""
        model.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.empty_cache()

    def leg(tokens: int, count: int, warmup: int) -> dict[str, Any]:
        x = inputs(tokens)
        if device == "cuda":
            resident = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        steps(x, warmup)
        synchronize(device)
        started = time.perf_counter()
        value = steps(x, count)
        synchronize(device)
        found = {"seconds": (time.perf_counter() - started) / count, "loss": value, "rows_scored": len(x.rows)}
        if device == "cuda":
            found |= {"peak_bytes": torch.cuda.max_memory_allocated(), "resident_bytes": resident}
        return found

    def profile(tokens: int, count: int) -> dict[str, Any]:
        x = inputs(tokens)
        steps(x, 2)
        plain, profiled = Watch(device, False), Watch(device, True)
        for watch in (plain, profiled):
            watch.begin()
            steps(x, count)
            watch.end()
        return summary(plain.seconds, profiled, count)

    def handle(command: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"leg": leg, "profile": profile}[command.pop("do")](**command)
        finally:
            release()

    gradients = sorted({str(p.grad_dtype or p.dtype) for p in model.parameters()})
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "weight_gradients": gradients, "spec": described(spec)}, handle


if __name__ == "__main__":
    serve(build)
