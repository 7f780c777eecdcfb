"""Backwards of the visible kernels, by the formula; a module a training library.

Every backward takes (values by name, names that need a gradient, gradients of the outputs by name) and returns gradients by name, as
`ops.aligned.VJP` says.
"""

from typing import Any

from torch import Tensor

Values = dict[str, Any]
Needs = frozenset[str]
Grads = dict[str, Tensor | None]
