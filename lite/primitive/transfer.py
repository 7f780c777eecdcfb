"""Copies from a GPU to the CPU that do not wait one by one."""

import torch
from torch import Tensor


def arrived(device: torch.device) -> None:
    """Waits for what was sent to this device with non_blocking=True. torch gives such a copy from a GPU pinned memory on the CPU, which the
    bus reads and writes at its own speed, and keeps the memory for the next one."""
    if device.type == "cpu" and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def stream_of(tensor: Tensor) -> torch.cuda.Stream | None:
    """The stream that this thread uses on the tensor's GPU; None on the CPU. Another thread takes it up with `torch.cuda.stream`, or else
    queues and waits on GPU 0 and its default stream."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
