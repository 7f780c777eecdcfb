"""Where a window of GPU time goes: kernels by group, and what is left idle.

Kernels are read from the profiler's trace (those inside CUDA graphs are in it), and a group is told from the kernel's name. A fused kernel
counts where the first matching pattern puts it.
"""

import json
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

# In this order: an attention kernel's template also names cutlass and softmax, an activation's also elementwise; vLLM's expert kernels
# include routing, and parts of Mamba-2's scan are products.
PATTERNS = {
    "mamba": r"chunk_(scan|state|cumsum)|state_passing|bmm_chunk|selective_scan|causal_conv1d",
    "experts": r"moe|expert|grouped_topk",
    "attention": r"flash(?!infer)|fmha|attention|sdpa|batch(prefill|decode)|reshape_and_cache|reduce_segments|prepare_varlen",
    "norm": r"rms_?norm|layer_?norm|rsqrt",
    "activation": r"act_and_mul|silu|swiglu|gelu|sigmoid",
    "rotary": r"rotary|rope|triton_\w*(cos|sin)_|triton_poi_fused_\w*cat",
    "sampling/logprob": (
        r"softmax|top_?k|top_?p|logprob|argmax|exponential|distribution|gumbel|sampl|rank|penalt|nll_loss|cross_entropy|ge_sum"
    ),
    "gemm": r"gemm|gemv|matmul|nvjet|cutlass|cublas|splitk|bmm_kernel|xmma|wgmma|_mm_",
    "copies/elementwise": (
        r"memcpy|memset|elementwise|copy|cat|fill|index|scatter|gather|embedding|reduce|triton_|arange|cumsum|scan|sort|mean_kernel|slot_mapping"
    ),
}
GROUPS = (*PATTERNS, "other")
_COMPILED = {group: re.compile(pattern, re.IGNORECASE) for group, pattern in PATTERNS.items()}
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Kernel(NamedTuple):
    name: str
    start: float  # microseconds
    duration: float


def group_of(name: str) -> str:
    return next((group for group, pattern in _COMPILED.items() if pattern.search(name)), "other")


def kernels_in(trace: Path) -> list[Kernel]:
    """Of a Chrome trace as torch.profiler exports it."""
    events = json.loads(trace.read_text())["traceEvents"]
    return [Kernel(e["name"], float(e["ts"]), float(e["dur"])) for e in events if e.get("cat") in _ON_DEVICE]


def busy(kernels: Sequence[Kernel]) -> float:
    """Microseconds in which at least one kernel ran: streams overlap."""
    total, end = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start):
        total += max(0.0, kernel.start + kernel.duration - max(end, kernel.start))
        end = max(end, kernel.start + kernel.duration)
    return total


class Watch:
    """Times what runs between begin and end, the device drained at both, and records its kernels where profiled."""

    def __init__(self, device: str, profiled: bool):
        self.device = device
        self.profiler = torch.profiler.profile(activities=[_activity(device)]) if profiled else None
        self.seconds = 0.0
        self.kernels: list[Kernel] = []

    def begin(self) -> None:
        synchronize(self.device)
        if self.profiler:
            self.profiler.start()
        self._started = time.perf_counter()

    def end(self) -> None:
        synchronize(self.device)
        self.seconds = time.perf_counter() - self._started
        if self.profiler:
            self.profiler.stop()
            with tempfile.TemporaryDirectory() as folder:
                self.profiler.export_chrome_trace(str(Path(folder) / "trace.json"))
                self.kernels = kernels_in(Path(folder) / "trace.json")


def _activity(device: str) -> Any:
    return torch.profiler.ProfilerActivity.CUDA if device == "cuda" else torch.profiler.ProfilerActivity.CPU


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def summary(plain_seconds: float, watch: Watch, steps: int) -> dict[str, Any]:
    """Milliseconds a step. plain_seconds: of the same window without the profiler, whose own cost would pass for idle time."""
    groups: dict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in watch.kernels:
        group = group_of(kernel.name)
        groups[group] += kernel.duration
        launches[group] += 1
        by_name[kernel.name].append(kernel.duration)
    busy_ms, wall_ms = busy(watch.kernels) / 1e3 / steps, plain_seconds * 1e3 / steps
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:20]
    return {
        "steps": steps,
        "wall_ms": wall_ms,
        "profiled_wall_ms": watch.seconds * 1e3 / steps,
        "busy_ms": busy_ms,
        "idle_ms": max(0.0, wall_ms - busy_ms),
        "groups_ms": {group: groups[group] / 1e3 / steps for group in GROUPS if group in groups},
        "launches": {group: launches[group] / steps for group in GROUPS if group in launches},
        "kernels": [
            {"name": name, "group": group_of(name), "ms": sum(times) / 1e3 / steps, "launches": len(times) / steps}
            for name, times in longest
        ],
    }


def comparison(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Group by group, how much longer ours takes, in ms a step and as a share of the whole difference; idle is one of the groups."""
    whole = ours["wall_ms"] - theirs["wall_ms"]
    rows = {}
    for group in (*GROUPS, "idle"):
        a, b = (side["idle_ms"] if group == "idle" else side["groups_ms"].get(group, 0.0) for side in (ours, theirs))
        if a or b:
            rows[group] = {"ours_ms": a, "theirs_ms": b, "difference_ms": a - b, "share": (a - b) / whole if whole else None}
    return {"difference_ms": whole, "groups": rows}


def comparison_table(title: str, ours: str, theirs: str, sides: dict[str, dict[str, Any]]) -> Table:
    found = comparison(sides[ours], sides[theirs])
    table = Table(title=f"{title}: ms a step", title_justify="left")
    for column in ("group", theirs, f"{ours}", "difference", "share", f"launches {theirs}", f"launches {ours}"):
        table.add_column(column, justify="left" if column == "group" else "right")
    for group, row in found["groups"].items():
        share = "" if row["share"] is None else f"{row['share']:.0%}"
        counts = [f"{sides[name]['launches'].get(group, 0):.0f}" if group != "idle" else "" for name in (theirs, ours)]
        table.add_row(group, f"{row['theirs_ms']:.3f}", f"{row['ours_ms']:.3f}", f"{row['difference_ms']:+.3f}", share, *counts)
    table.add_row("wall", *(f"{sides[name]['wall_ms']:.3f}" for name in (theirs, ours)), f"{found['difference_ms']:+.3f}", "", "", "")
    return table
