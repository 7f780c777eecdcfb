"""A token that comes 1,000 times gets the sum of 1,000 gradients. In bf16 the sum would stop at 256, where adding 1 changes nothing."""

import pytest
import torch

from lite.primitive.modules.linear import Embedding
from lite.primitive.ops.bridges import reference_ops
from lite.primitive.optimizer.master import MasterAdamW

ID, TIMES = 3, 1000


def trained_embedding() -> tuple[Embedding, MasterAdamW]:
    module = Embedding(8, 4, reference_ops(), torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(torch.randn(8, 4))
    optimizer = MasterAdamW(
        dict(module.named_parameters()), lr=1e-3, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8, clip_grad=0.0
    )
    return module, optimizer


def expect_exactly(module: Embedding, times: int) -> None:
    grad = module.weight.grad
    assert grad is not None and grad.dtype == torch.float32
    want = torch.zeros(8, 4)
    want[ID] = times
    assert torch.equal(grad, want)


def test_one_id_a_thousand_times_in_one_batch() -> None:
    module, _ = trained_embedding()
    out = module(torch.full((TIMES,), ID))
    assert out.dtype == torch.bfloat16
    out.backward(torch.ones_like(out))
    expect_exactly(module, TIMES)


def test_one_id_in_a_thousand_micro_batches() -> None:
    """Accumulation over backwards is fp32 as well: this is what grad_dtype is for."""
    module, optimizer = trained_embedding()
    for _ in range(TIMES):
        out = module(torch.tensor([ID]))
        out.backward(torch.ones_like(out))
    expect_exactly(module, TIMES)
    optimizer.zero_grad()
    assert module.weight.grad is None


def test_a_bf16_gradient_fails_the_same_check() -> None:
    """The planted error: the same parameter without grad_dtype."""
    module = Embedding(8, 4, reference_ops(), torch.bfloat16)
    with torch.no_grad():
        module.weight.zero_()
    for _ in range(TIMES):
        out = module(torch.tensor([ID]))
        out.backward(torch.ones_like(out))
    with pytest.raises(AssertionError):
        expect_exactly(module, TIMES)
    assert module.weight.grad is not None and float(module.weight.grad[ID, 0]) == 256


def test_masters_step_from_the_fp32_gradient() -> None:
    """The optimizer reads that gradient as it is: the norm it reports is the exact one."""
    module, optimizer = trained_embedding()
    out = module(torch.full((TIMES,), ID))
    out.backward(torch.ones_like(out))
    done, norm, zeros = optimizer.step(torch.device("cpu"))
    assert done and norm == 2 * TIMES and zeros == 7 * 4  # four columns of 1,000
