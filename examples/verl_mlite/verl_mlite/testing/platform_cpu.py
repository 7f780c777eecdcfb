"""A platform of verl whose device is the CPU. Importing it registers it; VERL_PLATFORM=cpu chooses it."""

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import verl
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import distributed

from lite.errors import InputError

VERIFIED = "0.9.1"
MEMORY = 1 << 34  # what verl is told that the device has


def require_verified_version() -> None:
    """This module replaces functions of verl's."""
    if verl.__version__ != VERIFIED:
        raise InputError("verl", f"{verl.__version__} has not been tried on a CPU", f"install verl=={VERIFIED}")


require_verified_version()


class CpuModule(types.ModuleType):
    """torch.cpu, and those of torch.cuda's functions which verl calls and torch.cpu lacks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return MEMORY, MEMORY

    def _nothing(self, *_: Any) -> int:
        return 0

    empty_cache = ipc_collect = set_device = set_per_process_memory_fraction = _nothing
    max_memory_allocated = max_memory_reserved = memory_allocated = memory_reserved = _nothing

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """See `PlatformBase`, whose methods these are."""

    device_name = vendor_name = "cpu"
    device_module = CpuModule("verl_mlite_cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:  # type: ignore[override] - verl only ever hands it to torch
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"  # verl counts workers by it, and Ray is told that there are some

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def _nothing(self, *_: Any) -> None:
        return None

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _nothing


# verl asks for the backend "cpu:gloo,cpu:gloo" here, which torch refuses. Nothing else of verl is replaced.
_initialize = distributed.initialize_global_process_group_ray


def initialize_over_gloo(timeout_second: int | None = None, backend: str = "gloo") -> tuple[int, ...]:
    _initialize(timeout_second, backend)
    return tuple(int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("RANK", 0), ("WORLD_SIZE", 1)))


distributed.initialize_global_process_group = distributed.initialize_global_process_group_ray = initialize_over_gloo
