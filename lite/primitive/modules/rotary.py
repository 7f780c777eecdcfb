"""Rotary angles: the inverse frequencies of each scaling rule and the table of cosines and sines that the kernel reads.

Rules and their sources: "default" (Su et al. 2021, RoFormer), "linear" (position interpolation, Chen et al. 2023), "llama3" (Llama 3.1:
long waves slowed, short kept, a ramp between), "yarn" (Peng et al. 2023, NTK by parts and attention scaling). "dynamic" is
refused: its angles change as a sequence grows, so cached keys and a full prefill cannot agree.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lite.errors import InputError, nearest


@dataclass(frozen=True)
class RotaryConfig:
    head_dim: int
    theta: float
    max_positions: int
    scaling: tuple[tuple[str, Any], ...] = ()  # the checkpoint's rope parameters, without theta

    @classmethod
    def from_hf(cls, hf: dict[str, Any], head_dim: int) -> "RotaryConfig":
        """Reads both spellings: `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5)."""
        given = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
        theta = given.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0
        given["rope_type"] = given.pop("type", None) or given.get("rope_type", "default")
        rule = given["rope_type"]
        if not isinstance(rule, str) or rule not in RULES:
            why = "; its angles depend on the sequence's length, which no cached decode can follow" if rule == "dynamic" else ""
            raise InputError("config.json rope scaling", f"rule {rule!r} is not supported{why}", nearest(str(rule), RULES))
        unknown = sorted(set(given) - RULES[rule] - {"rope_type"})
        if unknown:
            raise InputError("config.json rope scaling", f"unknown key {unknown[0]!r} for {rule}", nearest(unknown[0], RULES[rule]))
        positions = hf["max_position_embeddings"]
        if rule == "yarn":
            given.setdefault("original_max_position_embeddings", positions)
        for key, value in given.items():
            if key not in ("rope_type", "truncate") and value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise InputError("config.json rope scaling", f"{key} = {value!r} is no positive number", "correct it")
        missing = sorted(key for key in RULES[rule] - OPTIONAL if given.get(key) is None)
        if missing:
            raise InputError("config.json rope scaling", f"lacks {missing[0]!r}, which {rule} needs", "add it")
        return cls(head_dim, float(theta), positions, tuple(sorted(given.items())))


RULES: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate",
    },
}  # fmt: skip
OPTIONAL = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}


def inverse_frequencies(config: RotaryConfig) -> tuple[Tensor, float]:
    """-> (angle per position, [head_dim / 2] fp32; factor on cosines and sines)."""
    scaling = dict(config.scaling)
    dim = config.head_dim
    inv_freq = 1.0 / config.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    match scaling.get("rope_type", "default"):
        case "linear":
            return inv_freq / scaling["factor"], 1.0
        case "llama3":
            return _llama3(inv_freq, scaling), 1.0
        case "yarn":
            return _yarn(inv_freq, config, scaling)
        case _:
            return inv_freq, 1.0


def _llama3(inv_freq: Tensor, scaling: dict[str, Any]) -> Tensor:
    low, high, original = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    ramp = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * inv_freq / scaling["factor"] + ramp * inv_freq


def _yarn(inv_freq: Tensor, config: RotaryConfig, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def dim_of(rotations: float) -> float:
        """The dimension whose wave turns `rotations` times over the original context."""
        return config.head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    first, last = dim_of(scaling.get("beta_fast") or 32), dim_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    ramp = ((torch.arange(config.head_dim // 2).float() - first) / max(last - first, 0.001)).clamp(0, 1)

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = scaling.get("attention_factor")
    if attention is None and scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention = magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), attention if attention is not None else magnitude(1.0)


def cos_sin_table(config: RotaryConfig, dtype: torch.dtype) -> Tensor:
    """cos | sin of every position, [max_positions, head_dim], computed in fp32 and rounded to the model dtype as vLLM's table is."""
    inv_freq, factor = inverse_frequencies(config)
    angles = torch.outer(torch.arange(config.max_positions).float(), inv_freq)
    return torch.cat([angles.cos() * factor, angles.sin() * factor], dim=-1).to(dtype)
