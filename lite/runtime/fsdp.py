"""Data parallel by torch's FSDP2. Each rank holds a shard of every fp32 master; gathering rounds it to the model dtype, as
`DeployedWeights.deploy` does, so what a forward reads is the deployed image, byte for byte. Gradients are summed over the ranks in fp32.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.utils.checkpoint import checkpoint

from lite.errors import InputError
from lite.model.protocol import ModelBundle
from lite.primitive.ckpt.hf_weights import LoadReport, export_weights
from lite.primitive.ckpt.spec import Part, as_rows
from lite.primitive.modules.decoder import Decoder
from lite.runtime.config import FsdpConfig
from lite.runtime.weights import DeployedWeights, differing_bytes


def sharding_wanted(config: FsdpConfig) -> bool:
    """Whether a model is sharded over the process group. InputError for a choice that needs one where there is none."""
    initialized = dist.is_available() and dist.is_initialized()
    wanted = initialized and (config.shard == "always" or dist.get_world_size() > 1)
    if config.shard == "always" and not wanted:
        raise InputError("fsdp.shard", "is always, and there is no process group", "call torch.distributed.init_process_group first")
    if config.param_offload and not wanted:
        raise InputError("fsdp.param_offload", "needs a sharded model", "set shard: always in a process group, or optimizer_offload")
    return wanted


def recompute(layers: Iterable[nn.Module]) -> None:
    """Each layer keeps its inputs only and runs again in backward, on the same bytes: kernels draw no random numbers.

    Its forward is replaced; the module is not wrapped (`checkpoint_wrapper`), which would change the parameters' names. FSDP2's hooks stay
    outside, so the second run finds the weights that the backward has gathered.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)  # type: ignore[method-assign]


def shard(model: Decoder, config: FsdpConfig, dtype: torch.dtype, device: torch.device, trained: bool) -> None:
    """Turns the trainable parameters into fp32 shards (trained False: shards of their own dtype), a group a layer and one for the rest.

    A module whose own parameters have another dtype than the model is a group of its own. Frozen parameters stay whole on every rank.
    """
    # a kernel may return rows of a buffer that it padded; nothing here writes to activations, which is what FSDP2 warns of
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.param_offload else OffloadPolicy()
    frozen = {p for p in model.parameters() if not p.requires_grad}
    groups: list[tuple[nn.Module, torch.dtype, bool | None]] = []
    for name, part in model.named_modules():
        dtypes = {p.dtype for p in part.parameters(recurse=False) if p.requires_grad}
        if len(dtypes) > 1:
            raise InputError(f"fsdp: {name}", f"trains parameters of {len(dtypes)} dtypes", "give each dtype a module of its own")
        if not dtypes <= {dtype}:
            groups.append((part, dtypes.pop(), config.reshard_after_forward))
    groups += [(layer, dtype, config.reshard_after_forward) for layer in model.layers]
    groups.append((model, dtype, None))  # what is last in forward is first in backward: FSDP2 keeps the root's gathered
    for part, image, reshard in groups:
        for p in part.parameters():
            if trained and p.requires_grad and not isinstance(p, DTensor):
                torch.utils.swap_tensors(p, nn.Parameter(p.detach().float()))  # the object stays: a tied head is one parameter
        policy = MixedPrecisionPolicy(param_dtype=image, reduce_dtype=torch.float32, cast_forward_inputs=False)
        group: FSDPModule = fully_shard(  # type: ignore[assignment]
            part, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload, ignored_params=frozen
        )
        group.set_gradient_divide_factor(1.0)  # losses add up over ranks as over micro-batches: a sum, not a mean
        group.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        # what autograd sees is the gathered parameter, and it would round our fp32 gradients to its own dtype
        group.unshard()
        for p in part.parameters():
            if p.requires_grad:
                p.grad_dtype = torch.float32
        group.reshard()


class ShardedWeights(DeployedWeights):
    """`parameters` are the masters, sharded by rows over the ranks (DTensors), and what is frozen.

    Loading, exporting and fingerprinting are collective: every rank calls them, reads the same tensors and gets whole ones. This rank's
    rows of the image are kept (2 bytes a parameter over the ranks), to tell what a step changed.
    """

    def __init__(self, bundle: ModelBundle, config: FsdpConfig, dtype: torch.dtype, device: torch.device, trained: bool):
        super().__init__(bundle)
        self.device = device
        self.shapes = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in self.parameters.items()}
        shard(bundle.module, config, dtype, device, trained)
        self.parameters = dict(bundle.module.named_parameters())
        self.rows = {name: _rows(p) for name, p in self.parameters.items()}
        self.images: dict[str, Tensor] = {}

    @torch.no_grad()
    def load(
        self, tensors: Iterable[tuple[str, Tensor]], version: int, where: object, masters: Mapping[str, Tensor] | None = None
    ) -> LoadReport:
        """See `DeployedWeights.load`. Each rank writes its own rows, before they are rounded."""
        self.version = None

        def write(part: Part, tensor: Tensor) -> Tensor:
            whole, mine, local = self.shapes[part.native], self.rows[part.native], as_rows(_local(self.parameters[part.native]))
            each = len(as_rows(whole)) // len(whole)  # an expert is sharded whole
            low, high = max(part.start, mine.start * each), min(part.start + len(tensor), mine.stop * each)
            if low < high:
                rows = local[low - mine.start * each : high - mine.start * each]
                rows.copy_(tensor[low - part.start : high - part.start].reshape(rows.shape))
            return tensor  # each rank looks at all of it, so that all of them refuse it

        report = self._load(self.shapes, tensors, version, where, write)
        self.deploy({}, version)
        return report

    @torch.no_grad()
    def deploy(self, masters: Mapping[str, Tensor], version: int) -> None:
        """Frees what is still gathered of the masters as they were; the next forward gathers and rounds them as they are."""
        self.version = None
        for part in self.bundle.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        changed = 0
        for name, parameter in self.parameters.items():
            if isinstance(parameter, DTensor):
                image = parameter.to_local().to(self.shapes[name].dtype, copy=True)
                changed += differing_bytes(self.images.get(name, image), image)
                self.images[name] = image
        mesh = next(p.device_mesh for p in self.parameters.values() if isinstance(p, DTensor))
        total = DTensor.from_local(torch.tensor(changed, device=mesh.device_type), mesh, [Partial()])
        self.bytes_changed = int(total.full_tensor())
        self.version = version

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor) of the deployed image, whole, gathered one parameter at a time."""
        b = self.bundle
        return export_weights(b.weights, b.config, b.layers, _Gathered(self))


class _Gathered(dict[str, Tensor]):
    """The image of any parameter by name. Parts of a fused one are asked for one after another, so the latest is kept."""

    def __init__(self, weights: ShardedWeights):
        super().__init__()
        self.weights = weights

    @torch.no_grad()
    def __missing__(self, name: str) -> Tensor:
        self.clear()
        image = self.weights.parameters[name].to(self.weights.shapes[name].dtype)
        whole = image.to(self.weights.device).full_tensor() if isinstance(image, DTensor) else image  # type: ignore[attr-defined]
        self[name] = whole
        return whole


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _rows(parameter: Tensor) -> range:
    """Which rows of a parameter this rank holds."""
    if not isinstance(parameter, DTensor):
        return range(len(parameter))
    numbers = torch.arange(len(parameter), device=parameter.device_mesh.device_type)
    mine = distribute_tensor(numbers, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local().tolist()
    return range(mine[0], mine[-1] + 1) if mine else range(0)


def agree(what: Any, where: str) -> None:
    """Every rank calls this with what it is about to do. InputError on each where they differ: one that ran fewer steps than the others
    would leave them waiting."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, what)
    if any(other != told[0] for other in told):
        raise InputError(where, "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(told)), "do the same on every rank")
