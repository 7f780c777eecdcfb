"""The trainer: builds a model, scores and differentiates packed batches, steps the optimizer, exports weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lite.errors import InputError
from lite.model.protocol import ModelBundle, ModelProtocol
from lite.model.registry import family, family_of
from lite.primitive.ckpt.hf_config import layer_count, load_hf_config
from lite.primitive.ckpt.safetensors_files import read_tensors, write_checkpoint
from lite.primitive.ckpt.spec import Skip
from lite.primitive.kernels.probe import probe_kernels
from lite.primitive.modules.head import TokenScores
from lite.primitive.ops.bridges import Ops, reference_ops
from lite.primitive.optimizer.master import MasterAdamW, lr_schedule
from lite.primitive.transfer import arrived
from lite.runtime import checkpoint, resume, routes
from lite.runtime.batch import PackedBatch
from lite.runtime.config import RuntimeConfig, from_dict
from lite.runtime.fsdp import ShardedWeights, agree, recompute, sharding_wanted
from lite.runtime.handle import ForwardResult, Handle, LossFn, StepContext
from lite.runtime.weights import DeployedWeights

__all__ = ["ForwardResult", "Handle", "LossFn", "Runtime", "StepContext", "create_runtime"]


class Runtime:
    """protocol and hf_config may be replaced before build_model."""

    def __init__(self, config: RuntimeConfig):
        self.config = config
        self.folder = Path(config.hf_path)
        self.config_on_disk = load_hf_config(self.folder)
        self.hf_config = {**self.config_on_disk, **config.backend_cfg.override}
        name = config.backend_cfg.model_name
        self.family = family_of(self.hf_config.get("model_type")) if name == "auto" else name
        self.protocol: ModelProtocol = family(self.family)

    def bundle(self, ops: Ops | None = None) -> ModelBundle:
        """A model on the configured device, parameters not loaded. ops: the kernels it runs, the reference set by default."""
        cfg = self.config.backend_cfg
        for axis, ranks in vars(cfg.parallel).items():
            if ranks not in (1, None):
                raise InputError(f"parallel.{axis}", f"{ranks} ranks are not built yet", "set it to 1")
        impl_cfg: Any = from_dict(self.protocol.ImplConfig, cfg.impl_cfg, "impl_cfg")
        model_cfg = self.protocol.build_model_config(self.hf_config)
        with torch.device(cfg.torch_device):
            bundle = self.protocol.build_model(
                model_cfg, impl_cfg=impl_cfg, parallel=cfg.parallel, kernels=ops or reference_ops(), dtype=cfg.torch_dtype
            )
        left_out = range(bundle.layers, layer_count(self.config_on_disk))
        bundle.weights += tuple(Skip(f"*.layers.{i}.*", "a layer beyond the overridden number") for i in left_out)
        return bundle

    def build_model(self, ops: Ops | None = None, page: int = 16) -> Handle:
        """Built, probed and loaded, as policy version 0. Without an optimizer in the config it scores only. In a process group of several
        ranks its weights are sharded over them (`FsdpConfig`), and every method that returns weights or changes them is collective.
        page: the engine's, for the probe.

        Raises ProbeError where a kernel breaks its promise on this device, InputError for a checkpoint that does not fit.
        """
        cfg = self.config.backend_cfg
        ops = ops or reference_ops()
        bundle = self.bundle(ops)
        probes = probe_kernels(ops.visible, bundle.module.probe_shapes(), cfg.torch_dtype, cfg.torch_device, page)
        if cfg.fsdp.recompute:
            recompute(bundle.module.layers)
        sharded = sharding_wanted(cfg.fsdp)
        trained = cfg.optimizer is not None
        weights = ShardedWeights(bundle, cfg.fsdp, cfg.torch_dtype, cfg.torch_device, trained) if sharded else DeployedWeights(bundle)
        optimizer = schedule = None
        if (o := cfg.optimizer) is not None:
            optimizer = MasterAdamW(
                weights.parameters,
                lr=o.lr, weight_decay=o.weight_decay, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps, clip_grad=o.clip_grad,
            )  # fmt: skip
            schedule = lr_schedule(
                optimizer.adamw, lr=o.lr, min_lr=o.min_lr, warmup_init=o.lr_warmup_init, warmup_steps=o.lr_warmup_steps,
                decay_steps=o.lr_decay_steps, style=o.lr_decay_style,
            )  # fmt: skip
        report = weights.load(read_tensors(self.folder), 0, self.folder, optimizer.masters if optimizer else None)
        if optimizer is not None and cfg.fsdp.optimizer_offload:
            optimizer.to(torch.device("cpu"))
        return Handle(bundle, weights, report, probes, cfg.torch_device, optimizer, schedule)

    def train_mode(self, handle: Handle) -> None:
        handle.module.train()

    def eval_mode(self, handle: Handle) -> None:
        handle.module.eval()

    def forward_backward(
        self,
        handle: Handle,
        data: PackedBatch | Sequence[PackedBatch],
        loss_fn: LossFn | None = None,
        *,
        num_microbatches: int | None = None,
        forward_only: bool = False,
    ) -> ForwardResult:
        """Scores every micro-batch and, unless forward_only, adds the gradient of its loss.

        Losses add up over the micro-batches, and over the ranks where there are several: loss_fn returns this micro-batch's share of the
        whole. Every rank gives as many micro-batches, of its own samples; ranks talk about gradients once, in the last one's backward.
        Without a loss_fn the batch is scored (forward_only must be set). Raises RuntimeError where loss_fn wrote the weights, InputError
        on every rank where the ranks' numbers of micro-batches differ or one's batch is refused. A sharded model is of no use after an
        error in the middle of a backward: build it anew.
        """
        batches = [data] if isinstance(data, PackedBatch) else list(data)
        if num_microbatches not in (None, len(batches)):
            raise InputError("forward_backward", f"{len(batches)} micro-batches, {num_microbatches} announced", "give as many as announced")
        if loss_fn is None and not forward_only:
            raise InputError("forward_backward", "no loss function for a backward", "give loss_fn or set forward_only")
        result, ranks = ForwardResult(handle.weights.require()), checkpoint.ranks() if isinstance(handle.module, FSDPModule) else 1
        self._check(handle, batches, "scored" if forward_only else "with a backward")
        for index, batch in enumerate(batches):
            batch = batch.to(handle.device)
            if isinstance(handle.module, FSDPModule):
                handle.module.set_requires_gradient_sync(index == len(batches) - 1)
            stamp = handle.weights.stamp()
            with torch.set_grad_enabled(not forward_only):
                scores: TokenScores = handle.module(
                    batch.input_ids, batch.context, batch.labels, batch.temperatures, batch.scored_rows, routes=batch.routed_experts
                )
                result.requires_grad.append(scores.logprob.requires_grad)
                if loss_fn is not None:
                    loss, metrics = loss_fn(scores, batch, StepContext(index, len(batches), forward_only, ranks))
                    if not forward_only:
                        if handle.weights.stamp() != stamp:  # shards: the backward would gather others than the forward did
                            raise RuntimeError("the weights were written between forward and backward; run the backward first")
                        loss.backward()
                    result.losses.append(loss.detach())
                    result.metrics.append(metrics)
            result.log_probs.append(scores.logprob.detach())
            result.entropy.append(scores.entropy.detach())
        return result

    def _check(self, handle: Handle, batches: Sequence[PackedBatch], how: str) -> None:
        """InputError for a batch that this model cannot run, or ranks that do not run the same."""
        routed = sum(batch.routed_experts is not None for batch in batches)
        plan = f"{len(batches)} micro-batches {how}{' along recorded routes' if routed else ''}"
        try:
            if routed not in (0, len(batches)):
                what = f"{routed} of {len(batches)} micro-batches have routed_experts"
                raise InputError("forward_backward", what, "give all of them their routes, or none")
            for batch in batches:
                self._check_batch(handle, batch)
        except InputError as error:
            plan = str(error)
            raise
        finally:  # a rank with a bad batch tells the others, which would wait for it
            if isinstance(handle.module, FSDPModule):
                agree(plan, "forward_backward")

    def _check_batch(self, handle: Handle, batch: PackedBatch) -> None:
        config = handle.bundle.config
        longest, limit = max(batch.seq_lens), config.max_positions
        if longest > limit:
            raise InputError("PackedBatch.seq_lens", f"a sequence of {longest} tokens, the model allows {limit}", "shorten it")
        scored = batch.labels if batch.loss_mask is None else batch.labels[batch.loss_mask]
        for name, tokens in (("input_ids", batch.input_ids), ("labels", scored)):
            low, top = int(tokens.min()), int(tokens.max())
            if low < 0 or top >= config.vocab_size:
                wrong = low if low < 0 else top
                raise InputError(f"PackedBatch.{name}", f"token {wrong} is outside the {config.vocab_size} words", "check the tokenizer")
        if batch.position_ids is not None and not 0 <= int(batch.position_ids.min()) <= int(batch.position_ids.max()) < limit:
            raise InputError("PackedBatch.position_ids", f"leave 0 .. {limit - 1}", "count from 0 in each sequence")
        if batch.routed_experts is not None:
            routes.check(batch.routed_experts, batch.loss_mask, config)

    def zero_grad(self, handle: Handle) -> None:
        self._optimizer(handle).zero_grad()

    def optimizer_step(self, handle: Handle) -> tuple[bool, float, int]:
        """Steps the masters and deploys them as the next policy version. -> (done, gradient norm, zero elements in the gradient)."""
        optimizer = self._optimizer(handle)
        done, norm, zeros = optimizer.step(handle.device)
        if done:
            handle.weights.deploy(optimizer.masters, handle.weights.require() + 1)
        return done, norm, zeros

    def lr_scheduler_step(self, handle: Handle) -> float:
        """-> the learning rate of the next step."""
        self._optimizer(handle)
        assert handle.schedule is not None
        handle.schedule.step()
        return float(handle.schedule.get_last_lr()[0])

    def _optimizer(self, handle: Handle) -> MasterAdamW:
        if handle.optimizer is None:
            raise InputError("runtime", "was built without an optimizer", "set MegatronLiteConfig.optimizer")
        return handle.optimizer

    def export_weights(self, handle: Handle) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, deployed tensor): what an engine is synced with. Views of the parameters: they change with the next step."""
        handle.weights.require()
        return handle.weights.export()

    def save_hf(self, handle: Handle, folder: Path) -> None:
        """A checkpoint of the deployed weights that transformers and vLLM open; the tokenizer's files come along."""
        config = {k: v for k, v in self.hf_config.items() if k not in ("dtype", "torch_dtype")}
        config["dtype"] = str(self.config.backend_cfg.torch_dtype).removeprefix("torch.")
        tensors = self.export_weights(handle)
        if checkpoint.first_rank():
            write_checkpoint(folder, config, tensors, beside=self.folder)
        for _ in tensors:  # what the others gather with the first
            pass
        checkpoint.barrier()

    def save_checkpoint(self, handle: Handle, path: Path | str, *, keep: int = 3, facts: dict[str, Any] | None = None) -> Path:
        """Writes path/step-N, N the policy's version: masters, moments, schedule, random streams, and what is deployed without a master.
        Keeps the last `keep`. facts: the caller's own, anything JSON can hold. -> the folder."""
        return resume.save(handle, self._optimizer(handle), self.hf_config, Path(path), keep, facts or {})

    def load_checkpoint(self, handle: Handle, path: Path | str) -> dict[str, Any] | None:
        """Resumes from path, a checkpoint, or from the latest in it. -> the caller's facts; None, and nothing changed, where path holds no
        checkpoint yet. The next step has the bits that it would have had without the break; on another number of ranks than wrote it, the
        weights do, while gradients add up in another order and random streams are this run's own.

        Raises InputError for a checkpoint of another model or one that is damaged; a failed load leaves weights that cannot be run.
        """
        return resume.load(handle, self._optimizer(handle), self.hf_config, Path(path))

    def to(self, handle: Handle, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves parameters, masters with their moments, and gradients."""
        target = torch.device(device)
        if model:
            # FSDP2 may copy a shard within the CPU right after the move, before it has arrived
            handle.module.to(target, non_blocking=not isinstance(handle.module, FSDPModule))
            handle.device = target
        for p in handle.module.parameters():
            if grad and p.grad is not None:
                p.grad = p.grad.to(target, non_blocking=True)
        if optimizer and handle.optimizer is not None:
            handle.optimizer.to(target)
        arrived(target)


def create_runtime(config: RuntimeConfig | dict[str, Any]) -> Runtime:
    """config: a RuntimeConfig or its keys. Raises InputError for unknown keys, an unreadable checkpoint or an unknown family."""
    return Runtime(from_dict(RuntimeConfig, config, "RuntimeConfig") if isinstance(config, dict) else config)
