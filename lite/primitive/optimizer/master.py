"""fp32 masters and torch's AdamW over them. The forward never reads a master; it reads the deployed image made from it."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.optim.adamw import adamw

from lite.errors import InputError
from lite.primitive.transfer import arrived

MOMENTS = ("exp_avg", "exp_avg_sq")


class MasterAdamW:
    """AdamW on the fp32 masters of a model's trainable parameters.

    parameters: the deployed image by name; the masters are copies of them, zero until whoever loads the model fills them. Of a sharded
    model: the shards of the masters (DTensors), which are then stepped themselves, every rank its own.
    Vectors (norms, biases) take no weight decay, matrices do.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        clip_grad: float,
    ):
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.masters: dict[str, Tensor] = {
            name: p if isinstance(p, DTensor) else torch.zeros(p.shape, dtype=torch.float32, device=p.device)
            for name, p in self.parameters.items()
        }
        self.clip_grad = clip_grad
        self.home: torch.device | None = None  # where moments rest between steps; None: beside their masters
        for p in self.parameters.values():
            p.grad_dtype = torch.float32  # gradients of a bf16 image accumulate in fp32
        matrices = [m for m in self.masters.values() if m.ndim > 1]
        vectors = [m for m in self.masters.values() if m.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        on_gpu = all(m.is_cuda for m in self.masters.values())  # one kernel there, without the foreach form's copies of the moments
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=on_gpu)

    def step(self, device: torch.device) -> tuple[bool, float, int]:
        """One update of the masters from the parameters' gradients. -> (done, gradient norm before clipping, zero elements).

        device: where it is computed. What rests elsewhere visits it tensor by tensor, so that where a run keeps its state changes no bit.
        A norm that is not finite leaves masters and moments as they were: done is False.
        """
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if not grads:
            raise InputError("optimizer", "no parameter has a gradient", "run forward_backward with a loss first")
        norm, zeros = _norm_and_zeros(list(grads.values()), device)
        if not math.isfinite(norm):
            return False, norm, zeros
        if self.clip_grad > 0:
            first = next(iter(grads.values()))
            nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self.clip_grad, torch.tensor(norm, device=first.device))
        if all(place.type == device.type for place in (self.home or device, *(t.device for t in self.tensors().values()))):
            for name, grad in grads.items():
                self.masters[name].grad = grad
            self.adamw.step()
        else:
            self._step_on(device)
        return True, norm, zeros

    def _step_on(self, device: torch.device) -> None:
        """As `adamw.step` does for tensors of that device, one after the other."""
        grads = {self.masters[name]: p.grad for name, p in self.parameters.items() if p.grad is not None}
        for group in self.adamw.param_groups:
            for master in (m for m in group["params"] if m in grads):
                self._visit(device, group, master, grads[master])
        arrived(torch.device("cpu"))

    @torch.no_grad()
    def _visit(self, device: torch.device, group: Mapping[str, Any], master: Tensor, grad: Tensor) -> None:
        state = self.adamw.state[master] or self._begin(master, 0)
        held = [_local(t) for t in (master, state["exp_avg"], state["exp_avg_sq"], state["step"], grad)]
        m, exp_avg, exp_avg_sq, step, gradient = visiting = [t.to(device, non_blocking=True) for t in held]
        beta1, beta2 = group["betas"]
        adamw(
            [m], [gradient], [exp_avg], [exp_avg_sq], [], [step], fused=device.type == "cuda", amsgrad=False, beta1=beta1, beta2=beta2,
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        for there, here in zip(held[:4], visiting[:4], strict=True):
            if there is not here:
                there.copy_(here, non_blocking=True)

    def tensors(self) -> dict[str, Tensor]:
        """Masters and moments by name, the objects themselves: what a checkpoint holds. What no step has reached has no moments."""
        found = {f"master.{name}": master for name, master in self.masters.items()}
        for name, master in self.masters.items():
            found |= {f"{key}.{name}": self.adamw.state[master][key] for key in MOMENTS if master in self.adamw.state}
        return found

    def steps(self) -> dict[str, int]:
        """How many steps each master has taken, by name."""
        return {name: int(self.adamw.state[master]["step"]) for name, master in self.masters.items() if master in self.adamw.state}

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Makes room for the moments of the masters named, so that `tensors` can be filled; forgets those of the others."""
        self.adamw.state.clear()
        for name, count in steps.items():
            self._begin(self.masters[name], count)

    def _begin(self, master: Tensor, step: int) -> dict[str, Tensor]:
        home = self.home or master.device
        where: dict[str, Any] = {"device": home, "pin_memory": home.type == "cpu" and (master.is_cuda or _local(master).is_pinned())}
        state = {"step": torch.tensor(float(step), **where), **{key: torch.zeros_like(master, **where) for key in MOMENTS}}
        self.adamw.state[master] = state
        return state

    def to(self, device: torch.device) -> None:
        """Moves moments, and masters that are the optimizer's own; these stay the same objects. Later moments come into being there."""
        self.home = device
        for master in self.masters.values():
            if master.device != device and not isinstance(master, DTensor):  # a shard moves with its module
                torch.utils.swap_tensors(master, master.to(device, non_blocking=True))
            state = self.adamw.state.get(master, {})
            state.update({key: value.to(device, non_blocking=True) for key, value in state.items()})
        arrived(device)

    def zero_grad(self) -> None:
        for name, p in self.parameters.items():
            p.grad = self.masters[name].grad = None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _norm_and_zeros(grads: list[Tensor], device: torch.device) -> tuple[float, int]:
    """L2 norm over all gradients, and how many of their elements are 0; of shards: over all ranks. Computed on that device."""
    norm = torch.linalg.vector_norm(torch.stack([nn.utils.get_total_norm([g.to(device)]) for g in grads]))
    zeros = sum(g.numel() - int(g.count_nonzero()) for g in map(_local, grads))
    if isinstance(norm, DTensor):
        counted = DTensor.from_local(torch.tensor(zeros, device=device), norm.device_mesh, [Partial()])
        norm, zeros = norm.full_tensor(), int(counted.full_tensor())
    return float(norm), zeros


def lr_schedule(
    optimizer: torch.optim.Optimizer,
    *,
    lr: float,
    min_lr: float,
    warmup_init: float,
    warmup_steps: int,
    decay_steps: int | None,
    style: Literal["constant", "linear", "cosine"],
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warmup from warmup_init to lr, then constant, or linear or half-cosine down to min_lr at decay_steps."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (warmup_init + (lr - warmup_init) * step / warmup_steps) / lr
        if style == "constant" or decay_steps is None:
            return 1.0
        done = min((step - warmup_steps) / max(decay_steps - warmup_steps, 1), 1.0)
        left = 1.0 - done if style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return (min_lr + (lr - min_lr) * left) / lr

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def update_norm(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """L2 norm of the difference of two sets of masters."""
    return math.sqrt(sum(float((after[name] - before[name]).double().square().sum()) for name in before))
