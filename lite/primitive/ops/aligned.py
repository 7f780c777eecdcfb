"""The bridge between inference and training: one visible kernel and one VJP are one differentiable operation.

The visible kernel gives the value, bit for bit what inference computes, and is run once, without autograd. The VJP gives the
gradient, by the formula and with whatever training kernel is best at it; it never runs the visible kernel backwards.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class VJP:
    """A vector-Jacobian product.

    inputs   names of the visible kernel's arguments, in order
    outputs  names of what it returns, in order
    saves    which of both the backward reads; arguments that are no tensors are always kept
    backward (values by name, names of the arguments that need a gradient, gradients of the outputs by name, None where nothing
             flowed back) -> gradients of those arguments by name. Gradients of activations come in the activation's dtype,
             gradients of parameters in fp32.
    constants  outputs that carry no gradient (statistics)
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    saves: tuple[str, ...]
    backward: Callable[[dict[str, Any], frozenset[str], dict[str, Tensor | None]], dict[str, Tensor]]
    constants: tuple[str, ...] = field(default=())


def visible_forward(visible: Callable[..., Any], vjp: VJP, *inputs: Any) -> Any:
    """visible(*inputs), differentiable by vjp.

    Tensors that the VJP saves pass through saved-tensor hooks (offload, recomputation). Parameters do not: the object itself is
    kept, as FSDP2 hands it out, with its version counter; a backward that finds the weights written since the forward raises
    RuntimeError, because it would differentiate a policy that no longer exists.
    """
    return _Aligned.apply(visible, vjp, *inputs)


class _Aligned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, visible: Callable[..., Any], vjp: VJP, *inputs: Any) -> Any:
        result = visible(*inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        ctx.vjp = vjp
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(out for name, out in zip(vjp.outputs, outputs, strict=True) if name in vjp.constants))

        named = dict(zip(vjp.inputs, inputs, strict=True)) | dict(zip(vjp.outputs, outputs, strict=True))
        ctx.kept = {name: value for name, value in named.items() if not isinstance(value, Tensor)}
        ctx.parameters = {name: (named[name], named[name]._version) for name in vjp.saves if isinstance(named[name], nn.Parameter)}
        ctx.saved_names = [name for name in vjp.saves if name not in ctx.kept and name not in ctx.parameters]
        ctx.save_for_backward(*(named[name] for name in ctx.saved_names))
        return result

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> Any:
        vjp: VJP = ctx.vjp
        values = ctx.kept | dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True))
        for name, (parameter, version) in ctx.parameters.items():
            if parameter._version != version:
                raise RuntimeError(
                    f"{name} of shape {tuple(parameter.shape)} was written between forward (version {version}) and backward "
                    f"(version {parameter._version}); run the backward before the weights change"
                )
            values[name] = parameter
        needs = frozenset(name for name, need in zip(vjp.inputs, ctx.needs_input_grad[2:], strict=True) if need)
        grads = vjp.backward(values, needs, dict(zip(vjp.outputs, d_outputs, strict=True)))
        return None, None, *(grads.get(name) for name in vjp.inputs)
