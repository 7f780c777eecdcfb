"""verl's engine interface over Megatron Lite's Runtime."""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import enable_full_determinism, postprocess_batch_func, prepare_micro_batches

from lite.errors import InputError
from lite.primitive.ops.bridges import Ops, reference_ops, vllm_ops
from lite.runtime.checkpoint import START_AGAIN
from lite.runtime.config import FsdpConfig, MegatronLiteConfig, RuntimeConfig
from lite.runtime.rollout.vllm_weights import weight_rows
from lite.runtime.runtime import Handle, Runtime, StepContext
from verl_mlite.agreement import Agreement
from verl_mlite.batches import jagged, pack
from verl_mlite.configs import TRAINER_STATE, check_checkpoint, optimizer_config

logger = logging.getLogger("verl_mlite")

SYNC = "mlite.sync"
"""Name of the first tensor of an exact weight sync: JSON as bytes, see `MliteEngine.get_per_tensor_param`."""

ANSWER = "answer.json"  # what the rollout writes when it holds the policy of a sync


def _first_48_bits(fingerprint: str) -> int:
    return int(fingerprint[:12], 16)  # a double holds them, and the mean over ranks


class EngineContext(BaseEngineCtx):
    def __enter__(self) -> "EngineContext":
        super().__enter__()
        (self.engine.runtime.train_mode if self.mode == "train" else self.engine.runtime.eval_mode)(self.engine.handle)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or error[0] is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(*error)


@EngineRegistry.register(model_type="language_model", backend="mlite", device=["cuda", "cpu"])
class MliteEngine(BaseEngine):
    """Data parallel over all ranks (FSDP2 where there are several). Methods are verl's; see `BaseEngine`."""

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any):
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        self.agreement = Agreement()
        self.synced_version: int | None = None  # of the weights that the rollout holds
        self.synced_fingerprint: str | None = None  # its own of that policy (exact mode)
        self.answers = tempfile.TemporaryDirectory(prefix="mlite-")  # of the rollout, which runs on this node
        self.saved: list[Path] = []
        lora = model_config.get("lora") or {}
        if model_config.get("lora_rank", 0) or lora.get("rank", 0) or model_config.get("lora_adapter_path"):
            raise InputError("model.lora", "adapters are not built", "train all weights: set its rank to 0 and lora_adapter_path to null")
        if model_config.mtp.enable:
            raise InputError("model.mtp.enable", "multi-token prediction is not built", "set it to False")
        check_checkpoint(checkpoint_config)

    def initialize(self) -> None:
        e, device = self.engine_config, get_device_name()
        if e.full_determinism:
            enable_full_determinism(e.seed)
        override = {k: v for k, v in self.model_config.override_config.items() if k != "attn_implementation"}
        config = MegatronLiteConfig(
            model_name=e.model_name,
            dtype={"bfloat16": "bf16", "float32": "fp32"}[e.dtype],  # type: ignore[arg-type]
            device=device,
            fsdp=FsdpConfig(recompute=e.recompute),
            optimizer=None if e.forward_only else optimizer_config(self.optimizer_config),
            override=override,
        )
        self.runtime = Runtime(RuntimeConfig(self.model_config.local_path, backend_cfg=config))
        self.handle: Handle = self.runtime.build_model(kernels(e, device))
        if self.is_param_offload_enabled:
            self.to("cpu", optimizer=self.is_optimizer_offload_enabled)
        elif self.is_optimizer_offload_enabled:
            self.to("cpu", model=False, grad=False)

    @property
    def is_param_offload_enabled(self) -> bool:
        return self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self.engine_config.optimizer_offload and not self.engine_config.forward_only

    def train_mode(self, **options: Any) -> EngineContext:
        return EngineContext(self, "train", **options)

    def eval_mode(self, **options: Any) -> EngineContext:
        return EngineContext(self, "eval", **options)

    def optimizer_zero_grad(self) -> None:
        self.runtime.zero_grad(self.handle)

    def optimizer_step(self) -> float:
        done, norm, _ = self.runtime.optimizer_step(self.handle)
        if not done:
            logger.warning("gradient norm %s: no step was made", norm)
        return norm

    def lr_scheduler_step(self) -> float:
        return self.runtime.lr_scheduler_step(self.handle)

    def forward_backward_batch(self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False) -> dict[str, Any]:
        if tu.get_non_tensor_data(data, "calculate_sum_pi_squared", False):
            raise InputError("actor.calculate_sum_pi_squared", "is not built", "set it to False")
        ranks = self.get_data_parallel_size()
        tokens = data["loss_mask"].sum().to(self.handle.device)
        dist.all_reduce(tokens, group=self.get_data_parallel_group())
        tu.assign_non_tensor(data, sp_size=1, batch_num_tokens=tokens.item(), dp_size=ranks)
        micro_batches, indices = prepare_micro_batches(data, dp_group=self.get_data_parallel_group(), same_micro_num_in_dp=True)
        micro_batches = [micro.to(self.handle.device) for micro in micro_batches]
        wanted = ["log_probs", *(["entropy"] if tu.get_non_tensor_data(data, "calculate_entropy", False) else [])]

        def loss(scores: Any, batch: Any, step: StepContext) -> tuple[Tensor, dict[str, Any]]:
            micro, values = micro_batches[step.index], {"log_probs": scores.logprob, "entropy": scores.entropy}
            output = {name: jagged(values[name], micro) for name in wanted}
            assert loss_function is not None
            value, metrics = loss_function(model_output=output, data=micro, dp_group=self.get_data_parallel_group())
            return value / ranks, metrics  # verl's is a mean over ranks, the Runtime adds them up

        packed = [pack(micro, self.engine_config.replays_routes) for micro in micro_batches]
        result = self.runtime.forward_backward(self.handle, packed, loss if loss_function else None, forward_only=forward_only)
        found = {"log_probs": result.log_probs, "entropy": result.entropy}
        parts: list[dict[str, Any]] = [
            {
                "model_output": {name: jagged(found[name][i], micro) for name in wanted},
                "loss": float(result.losses[i]) * ranks if loss_function else 1.0,
                "metrics": result.metrics[i] if loss_function else {},
            }
            for i, micro in enumerate(micro_batches)
        ]
        output = postprocess_batch_func(parts, indices, data)
        if forward_only:
            if self.synced_version is not None:  # a reference policy is never the rollout's
                self.agreement.score(output["model_output"]["log_probs"], data)
        else:
            if self.synced_version == self.handle.weights.require():
                self.agreement.actor(output["model_output"]["log_probs"], data)
            if not tu.get_non_tensor_data(data, "return_model_output", False):
                output["model_output"] = {}
        return output

    def train_batch(self, data: TensorDict, loss_function: Callable) -> dict[str, Any]:
        outputs = super().train_batch(data, loss_function)
        outputs["metrics"] |= self.agreement.take() | {"mlite/deployed_bytes_changed": [self.handle.weights.bytes_changed]}
        if self.synced_fingerprint is not None:
            found = self._answer()["fingerprint"]
            outputs["metrics"] |= {
                "mlite/synced_fingerprint": [_first_48_bits(self.synced_fingerprint)],
                "mlite/rollout_fingerprint": [_first_48_bits(found)],
                "mlite/handshake": [1],
            }
        return outputs

    def _answer(self) -> dict[str, Any]:
        """What the rollout said of the latest sync: {"version", "fingerprint", "handshake"}."""
        path = Path(self.answers.name) / ANSWER
        answer = json.loads(path.read_text()) if path.exists() else {}
        if (answer.get("version"), answer.get("fingerprint")) != (self.synced_version, self.synced_fingerprint):
            what = f"the rollout answered {answer or 'nothing'} to policy version {self.synced_version}"
            raise InputError("weight sync", what, "set engine_kwargs.vllm.worker_extension_cls as the recipes do")
        return answer

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Every tensor by its Hugging Face name, whole on every rank. In exact mode (MLITE_EXACT=1) `SYNC` comes first: what
        `verl_mlite.worker` checks, before it lets the engine go on, that vLLM now holds, and the file where it says so: {"version",
        "fingerprint", "rows", "answer"}."""
        if self.is_param_offload_enabled:
            self.to(get_device_name(), optimizer=False, grad=False)
        self.synced_version = self.handle.weights.require()
        return self._exported(), None

    def _exported(self) -> Iterator[tuple[str, Tensor]]:
        if os.environ.get("MLITE_EXACT") == "1":
            self.synced_fingerprint = self.handle.weights.fingerprint()
            facts = {
                "version": self.synced_version, "fingerprint": self.synced_fingerprint, "rows": weight_rows(self.handle.bundle),
                "answer": str(Path(self.answers.name) / ANSWER),
            }  # fmt: skip
            yield SYNC, torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8).to(self.handle.device)
        yield from self.runtime.export_weights(self.handle)

    def get_data_parallel_size(self) -> int:
        return dist.get_world_size()

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        super().to(device, model, optimizer, grad)
        self.runtime.to(self.handle, device, model=model, optimizer=optimizer, grad=grad)

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None, **_: Any
    ) -> None:
        contents, folder = set(self.checkpoint_config.save_contents), Path(local_path)
        if hdfs_path is not None:
            raise InputError("default_hdfs_dir", "is not built", "leave it null and copy the folder")
        if contents & TRAINER_STATE:
            if dist.get_rank() == 0 and folder.exists():  # of a run that was taken up before it, as verl's own engines overwrite it
                shutil.rmtree(folder)
            dist.barrier()
            self.runtime.save_checkpoint(self.handle, folder, keep=1, facts={"global_step": global_step})
        if "hf_model" in contents:
            self.runtime.save_hf(self.handle, folder / "huggingface")
        self.saved.append(folder)
        if max_ckpt_to_keep and len(self.saved) > max_ckpt_to_keep:
            old, self.saved = self.saved[:-max_ckpt_to_keep], self.saved[-max_ckpt_to_keep:]
            dist.barrier()
            if dist.get_rank() == 0:
                for path in old:
                    shutil.rmtree(path, ignore_errors=True)

    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **_: Any) -> None:
        try:
            found = self.runtime.load_checkpoint(self.handle, local_path)
        except InputError as error:
            where, what, fix = error.args
            raise InputError(where, what, way_back(Path(local_path)) if fix == START_AGAIN else fix) from None
        if found is None:
            raise InputError(local_path, "holds no checkpoint of a trainer", "save with model, optimizer and extra in save_contents")


@EngineRegistry.register(model_type="value_model", backend="mlite", device=["cuda", "cpu"])
class NoCritic(BaseEngine):
    def __init__(self, **_: Any):
        raise InputError("critic.enable", "a critic is not built for model_engine=mlite", "set critic.enable=False (GRPO needs none)")


def kernels(config: Any, device: str) -> Ops:
    """vLLM's on a GPU, which makes batch-invariant mode this process's, or the reference kernels."""
    impl = ("vllm" if device == "cuda" else "reference") if config.impl == "lite" else config.impl
    if impl == "reference":
        return reference_ops()
    from lite.primitive.kernels.vllm import enter_batch_invariance

    enter_batch_invariance()
    return vllm_ops(config.attention_backend_override or "FLASH_ATTN")


def way_back(damaged: Path) -> str:
    """verl has a folder a step, ROOT/global_step_N or ROOT/global_step_N/actor, and one checkpoint in each."""
    step = next((path for path in (damaged, *damaged.parents) if path.name.startswith("global_step_")), None)
    if step is None:
        return START_AGAIN
    earlier: dict[int, Path] = {}
    for path in step.parent.glob("global_step_*"):
        number = path.name.removeprefix("global_step_")
        if number.isdigit() and (path / damaged.relative_to(step)).is_dir():
            earlier[int(number)] = path
    before = [number for number in earlier if number < int(step.name.removeprefix("global_step_"))]
    return f"go on by trainer.resume_mode=resume_path trainer.resume_from_path={earlier[max(before)]}" if before else START_AGAIN


def write_answer(path: Path, answer: dict[str, Any]) -> None:
    """The rollout's side of `MliteEngine._answer`: whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(answer))
    part.replace(path)
