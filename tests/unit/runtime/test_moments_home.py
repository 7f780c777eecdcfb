"""Where AdamW's moments come into being. The meta device stands in for the other device of two: it holds no bytes and needs no GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lite.primitive.optimizer.master import MOMENTS, MasterAdamW
from tests.ranks import on_ranks


def adamw(parameter: Tensor) -> MasterAdamW:
    return MasterAdamW({"w": parameter}, lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8, clip_grad=0.0)


def sharded(mesh: str = "cpu") -> nn.Parameter:
    """A shard that rests on the CPU. mesh meta: as offloaded shards rest on the CPU under a mesh of GPUs."""
    shard = nn.Parameter(DTensor.from_local(torch.ones(2, 3), init_device_mesh("cpu", (1,)), [Shard(0)]))
    shard.device_mesh._device_type = mesh
    return shard


def moments(make: Callable[[], Tensor], to: str | None) -> list[tuple[str, tuple[int, ...], bool]]:
    """Device, shape and whether it is a shard, of each moment after a resume."""
    optimizer = adamw(make())
    if to:
        optimizer.to(torch.device(to))
    optimizer.set_steps({"w": 3})
    found = [optimizer.tensors()[f"{key}.w"] for key in MOMENTS]
    return [(t.device.type, tuple(t.shape), isinstance(t, DTensor)) for t in found]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_they_lie_beside_their_masters(device: str) -> None:
    assert moments(lambda: nn.Parameter(torch.ones(2, 3, device=device)), None) == [(device, (2, 3), False)] * 2
    (shard,) = on_ranks(1, lambda: moments(lambda: sharded(mesh=device), None))
    assert shard == [("cpu", (2, 3), True)] * 2


def test_or_where_the_optimizer_was_moved() -> None:
    """A sharded master stays with its module; its moments do not."""
    whole = moments(lambda: nn.Parameter(torch.ones(2, 3)), "meta")
    (shard,) = on_ranks(1, lambda: moments(sharded, "meta"))
    assert whole == [("meta", (2, 3), False)] * 2 and shard == [("meta", (2, 3), True)] * 2
