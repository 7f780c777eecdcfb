"""The receipt: what was run, on what, and what came of it; written whole or not at all."""

import hashlib
import inspect
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lite.primitive.kernels.visible import VisibleKernels

SCHEMA = 1
ROOT = Path(__file__).resolve().parents[2]  # the checkout, or where a wheel was installed
# what draws a result or runs a proof from outside takes no part in it; "gate" is gates, gate_runner and gate_report
NOT_IN_CLOSURE = (
    "lite.cli", "lite.acceptance.progress", "lite.acceptance.report", "lite.acceptance.plots", "lite.acceptance.gate",
    "lite.acceptance.freshness",
)  # fmt: skip


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".partial")
    scratch.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")
    os.replace(scratch, path)


def _finite(content: Any) -> Any:
    """NaN and Inf, which JSON lacks, by name."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return str(content) if isinstance(content, float) and not math.isfinite(content) else content


def closure(whole: bool = False) -> dict[str, str]:
    """sha256 of every lite source that this process has loaded, by path relative to the repository (also from a wheel). whole: of all there
    are, for a run whose work is done by processes that this one has started."""
    loaded = {name for name in sys.modules if name == "lite" or name.startswith("lite.")}
    found = {}
    for file in sorted((ROOT / "lite").rglob("*.py")):
        path = file.relative_to(ROOT)
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        if (whole or name in loaded) and not name.startswith(NOT_IN_CLOSURE):
            found[path.as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def changed_sources(made: dict[str, str], root: Path) -> list[str]:
    """Which sources of a closure are not in root as they were."""
    files = {path: root / path for path in made}
    return [path for path, file in files.items() if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != made[path]]


def kernel_sources(kernels: VisibleKernels) -> dict[str, str]:
    """sha256 of the source of each visible kernel's module, by kernel name. A set may lack those that no model of its own calls."""
    contract = [name for name, value in vars(VisibleKernels).items() if inspect.isfunction(value) and not name.startswith("_")]
    names = [name for name in contract if name in vars(kernels)]
    found = {}
    for name in names:
        home = inspect.getmodule(vars(kernels)[name])
        assert isinstance(home, ModuleType) and home.__file__ is not None
        found[name] = hashlib.sha256(Path(home.__file__).read_bytes()).hexdigest()
    return found


def weights_sha256(folder: Path) -> str:
    """Over the checkpoint's weight files, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()


def git_state() -> dict[str, Any] | None:
    """The checkout that this package runs from; None where it was installed from a wheel."""
    if not (ROOT / ".git").exists():
        return None
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        status = subprocess.run(["git", "status", "--porcelain", "lite"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit, "dirty": bool(status.strip())}


PACKAGES = {  # beside torch: what brings kernels, or changes which ones vLLM chooses
    "vllm", "triton", "transformers", "transformer-engine", "mamba-ssm", "causal-conv1d", "flashinfer-python", "nvidia-cutlass-dsl",
    "quack-kernels", "humming-kernels", "megatron-core", "verl",
}  # fmt: skip


def environment(device: torch.device, config: dict[str, Any]) -> dict[str, Any]:
    """packages: those of PACKAGES that are installed, each in the version that an import would take. variables: what vLLM and cuBLAS are
    told by the process's environment."""
    from importlib.metadata import distributions, version

    installed = {d.name.lower().replace("_", "-") for d in distributions()}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "safetensors": version("safetensors"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({torch.backends.cpu.get_cpu_capability()})",
        "threads": torch.get_num_threads(),
        "packages": {name: version(name) for name in sorted(PACKAGES & installed)},  # the first on sys.path, where there are two
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(("VLLM_", "MLITE_EXACT", "CUBLAS"))},
        "config": config,
    }


def verdict(
    policies: list[dict[str, Any]],
    updates: list[dict[str, Any]],
    ratios: list[float],
    random_weights: bool,
    control_mismatch: int | None,
    stopped: str | None,
) -> tuple[str, str]:
    """-> (status, reason). A mismatch fails; what would make a pass vacuous is inconclusive; the rest passes.

    ratios: what each mixer and MLP adds to the residual, by rms. control_mismatch: tokens that differ where the trainer scores theta0
    once more with an error planted; a comparison that does not see that sees nothing. stopped: why the run ended
    before its last policy, or what none of its sequences met; None otherwise.
    """
    for policy in policies:
        for path in ("score", "actor"):
            p = policy[path]
            if p["mismatch"] or p["nonfinite"]:
                counts = f"{p['mismatch']} of {p['valid_tokens']} tokens differ, {p['nonfinite']} are not finite"
                return "fail", f"{policy['policy']} {path}: {counts}"
            if p["dtype"] != "float32":
                return "fail", f"{policy['policy']} {path}: logprobs are {p['dtype']}, not float32"
        if policy["actor"]["requires_grad"] is not True or policy["score"]["requires_grad"] is not False:
            return "fail", f"{policy['policy']}: the paths were not one without and one with gradient"
        if policy["fingerprint"]["engine"] != policy["fingerprint"]["trainer"]:
            return "fail", f"{policy['policy']}: engine and trainer hold different weights"
    for u in updates:
        unexcused = [name for name, reason in u["without_grad"].items() if reason is None]
        if u["parameters_with_grad"] + len(u["without_grad"]) != u["parameters_expected"] or unexcused:
            return "fail", f"update {u['step']}: no gradient for {', '.join(unexcused[:3])}"
        if not (u["grad_norm"] > 0 and u["master_update_norm"] > 0 and u["deployed_bytes_changed"] > 0 and u["nonzero_advantages"] > 0):
            return "inconclusive", f"update {u['step']} changed nothing that is deployed, so the next policy proves nothing"
    if stopped is not None:
        return "inconclusive", stopped
    for policy in policies:
        if policy["collapsed_groups"]:
            return "inconclusive", f"{policy['policy']}: {policy['collapsed_groups']} groups hold fewer than two distinct samples"
    if not control_mismatch:
        return "inconclusive", "vacuous: the planted control changes no logprob of theta0, so equal logprobs prove nothing"
    if random_weights and min(ratios) < 0.02:
        return "inconclusive", f"vacuous: a mixer or MLP moves the residual by {min(ratios):.4f} of its rms, under 0.02"
    tokens = sum(p["score"]["valid_tokens"] for p in policies)
    return "pass", f"{tokens} tokens under {len(policies)} policies have the same bytes on both paths"
