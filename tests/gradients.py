"""The one criterion by which a gradient passes, and the proof, made on every use, that it can fail."""

import torch
from torch import Tensor


def relative_l2(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in fp64; where want is zero: 0 for a zero, infinity for anything else."""
    assert got.shape == want.shape, (got.shape, want.shape)
    error, size = (got.double() - want.double()).norm(), want.double().norm()
    if size == 0:
        return 0.0 if error == 0 else float("inf")
    return float(error / size)  # NaN stays NaN, and is below no limit


def passes(got: Tensor, want: Tensor, limit: float) -> bool:
    return relative_l2(got, want) <= limit


def assert_gradient(got: Tensor, want: Tensor, limit: float, name: str) -> None:
    """got passes, and got that is 5% or 25% too large does not: the criterion would notice a factor of that size."""
    assert passes(got, want, limit), f"{name}: relative L2 error {relative_l2(got, want):.3g}, limit {limit:.3g}"
    if torch.count_nonzero(want):
        for factor in (1.05, 1.25):
            assert not passes(got * factor, want, limit), f"{name}: a gradient scaled by {factor} passes, so the criterion proves nothing"
