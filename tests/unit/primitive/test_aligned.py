"""The bridge runs the visible kernel once and keeps parameters as themselves, whatever else autograd is asked to do around it."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lite.primitive.compare import bits
from lite.primitive.kernels import reference
from lite.primitive.kernels.vjp import torch as torch_vjp
from lite.primitive.modules.decoder import Decoder
from lite.primitive.modules.mlp import GatedMLP
from lite.primitive.ops.aligned import VJP, visible_forward
from lite.primitive.ops.bridges import Ops, reference_ops
from lite.primitive.parallel.packing import PackedSequences
from tests.tiny import tiny_bundle


class Counted:
    """A visible kernel and a backward that count their runs and remember the values that the backward was given."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self.values: dict[str, Tensor] = {}
        self.grad_enabled: list[bool] = []
        self.vjp = VJP(("x", "weight", "bias"), ("y",), ("x", "weight"), self._backward)

    def visible(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.forwards += 1
        self.grad_enabled.append(torch.is_grad_enabled())
        return reference.linear(x, weight, bias)

    def _backward(self, values: dict, needs: frozenset, d: dict) -> dict[str, Tensor]:
        self.backwards += 1
        self.values = values
        return torch_vjp.linear(values, needs, d)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return visible_forward(self.visible, self.vjp, x, weight, None)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 8, requires_grad=True)


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(3, 8))


def test_the_visible_kernel_runs_once_a_pass_and_never_backwards(x: Tensor, weight: nn.Parameter) -> None:
    op = Counted()
    y = op(x, weight)
    assert (op.forwards, op.backwards) == (1, 0)
    y.sum().backward()
    assert (op.forwards, op.backwards) == (1, 1)
    assert op.grad_enabled == [False], "the kernel must not record a graph of its own"
    assert torch.equal(bits(y.detach()), bits(reference.linear(x.detach(), weight.detach(), None)))


def test_the_visible_kernel_runs_once_without_gradients(x: Tensor, weight: nn.Parameter) -> None:
    op = Counted()
    with torch.no_grad():
        silent = op(x, weight)
    assert (op.forwards, op.backwards, silent.requires_grad) == (1, 0, False)
    assert torch.equal(bits(silent), bits(op(x, weight).detach())), "training and scoring give the same bytes"


def test_a_whole_forward_and_backward_runs_every_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model: 2 layers, so many calls of each kernel, and the backward adds none."""
    bundle, calls = tiny_bundle("llama", layers=2), dict.fromkeys(["linear", "attention", "swiglu", "token_logprobs"], 0)

    class Counting:
        def __getattr__(self, name: str) -> object:
            if name in calls:
                calls[name] += 1
            return getattr(reference, name)

    for module in bundle.module.modules():
        if isinstance(getattr(module, "ops", None), Ops):
            monkeypatch.setattr(module.ops, "visible", Counting())
    loss_of(bundle.module).backward()
    assert calls == {"linear": 8, "attention": 2, "swiglu": 2, "token_logprobs": 1}


def test_activations_pass_through_saved_tensor_hooks_and_parameters_do_not(x: Tensor, weight: nn.Parameter) -> None:
    packed: list[int] = []
    unpacked: list[int] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t.data_ptr())
        return t.clone()

    def unpack(t: Tensor) -> Tensor:
        unpacked.append(t.data_ptr())
        return t

    op = Counted()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = op(x, weight)
    assert packed == [x.data_ptr()]
    y.sum().backward()
    assert op.values["weight"] is weight, "FSDP2 needs the very object"
    assert [op.values["x"].data_ptr()] == unpacked, "the backward reads what the hook gave back"


def test_hooks_that_round_change_the_gradient_of_the_weight_only(x: Tensor, weight: nn.Parameter) -> None:
    """What goes through a hook is what the backward uses: dW = dy^T x sees the rounded x, dx = dy W sees the weight untouched."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.round(), lambda t: t):
        y = reference_ops().linear(x, weight)
    dy = torch.randn_like(y)
    y.backward(dy)
    torch.testing.assert_close(weight.grad, dy.T @ x.detach().round())
    torch.testing.assert_close(x.grad, dy @ weight.detach())


def test_a_weight_written_before_the_backward_is_an_error_that_names_it(x: Tensor, weight: nn.Parameter) -> None:
    y = reference_ops().linear(x, weight)
    with torch.no_grad():
        weight.mul_(1.0)  # the same numbers: it is the write that counts
    with pytest.raises(RuntimeError, match=r"weight of shape \(3, 8\) was written between forward \(version 0\)"):
        y.sum().backward()


def test_a_weight_written_after_the_backward_is_fine(x: Tensor, weight: nn.Parameter) -> None:
    for _ in range(3):
        reference_ops().linear(x, weight).sum().backward()
        with torch.no_grad():
            weight.add_(1.0)
    assert weight._version == 3 and weight.grad is not None


def test_an_activation_changed_in_place_is_an_error_too(weight: nn.Parameter) -> None:
    """Autograd's own check; the bridge saves activations the ordinary way, so that it holds."""
    h = torch.randn(5, 8, requires_grad=True) * 1.0
    y = reference_ops().linear(h, weight)
    h.detach().add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def loss_of(decoder: Decoder) -> Tensor:
    context = PackedSequences.of((3, 9, 5))
    generator = torch.Generator().manual_seed(5)
    ids, labels = torch.randint(0, 500, (2, 17), generator=generator)
    scores = decoder(ids, context, labels, torch.full((17,), 0.8))
    return -scores.logprob.sum() - 0.01 * scores.entropy.sum()


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    decoder.zero_grad()
    loss_of(decoder).backward()
    return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activation_checkpointing_gives_the_same_gradient_bytes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer and, inside it, the MLP once more; the recomputed activations are the same bytes, so the gradients are."""
    decoder = tiny_bundle("qwen3", dtype).module
    plain = gradients(decoder)
    runs = 0
    for module in decoder.modules():
        if isinstance(module, GatedMLP) or module in list(decoder.layers):
            forward = module.forward

            def recomputed(*args: object, forward=forward) -> object:
                nonlocal runs

                def counted(*a: object) -> object:
                    nonlocal runs
                    runs += 1
                    return forward(*a)

                return checkpoint(counted, *args, use_reentrant=False)

            monkeypatch.setattr(module, "forward", recomputed)
    again = gradients(decoder)
    assert runs > 4, "nothing was recomputed"  # 2 layers and 2 MLPs run 4 times without recomputation
    assert plain.keys() == again.keys() and len(plain) == len(list(decoder.parameters()))
    assert all(torch.equal(bits(plain[name]), bits(again[name])) and plain[name].count_nonzero() for name in plain)
