"""What must not happen in training: a step on broken gradients, a backward over other weights, a forward that leaves traces."""

import math

import pytest
import torch

from lite.errors import InputError
from lite.primitive.compare import bits
from lite.runtime.batch import PackedBatch
from tests.checkpoints import DTYPES, FAMILIES, checkpoint, make_samples, same, trainer
from tests.training import BASE, backward, batch, image_is_rounded_masters, nll, opened, snapshot, unchanged


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, steps_before: int) -> None:
    """One bad element of one bias; masters, moments, image and version stay, byte for byte, and the next good step works."""
    o = opened()
    for _ in range(steps_before):
        backward(o, batch())
        o[0].optimizer_step(o[1])
    before, print_before = snapshot(o[1]), o[1].weights.fingerprint()
    backward(o, batch())
    dict(o[1].module.named_parameters())["layers.1.mixer.qkv.bias"].grad[3] = bad
    done, norm, _ = o[0].optimizer_step(o[1])
    assert done is False and not math.isfinite(norm)
    assert unchanged(snapshot(o[1]), before)
    assert (o[1].weights.version, o[1].weights.fingerprint()) == (steps_before, print_before)
    backward(o, batch())
    assert o[0].optimizer_step(o[1])[0] is True
    assert o[1].weights.version == steps_before + 1 and image_is_rounded_masters(o[1])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_backward_over_weights_written_since_its_forward_is_an_error(name: str) -> None:
    """The gradient would belong to a policy that no longer exists. The write here is the step of an earlier gradient."""
    o = opened(name=name)
    backward(o, batch())
    version = o[1].weights.version

    def writes(scores, b, step):
        o[0].optimizer_step(o[1])
        return nll(scores, b, step)

    with pytest.raises(RuntimeError, match="written between forward"):
        o[0].forward_backward(o[1], batch(), writes)
    assert o[1].weights.version == version + 1  # the step itself was done


@pytest.mark.parametrize("with_loss", [True, False])
def test_scoring_leaves_no_gradient_and_the_same_bytes(with_loss: bool) -> None:
    o = opened()
    before = snapshot(o[1])
    only = o[0].forward_backward(o[1], batch(), nll if with_loss else None, forward_only=True)
    assert only.requires_grad == [False] and len(only.losses) == int(with_loss)
    assert all(p.grad is None for p in o[1].module.parameters())
    both = o[0].forward_backward(o[1], batch(), nll)
    assert both.requires_grad == [True] and all(p.grad is not None for p in o[1].module.parameters())
    assert same(only.log_probs[0], both.log_probs[0]) and same(only.entropy[0], both.entropy[0])
    assert not both.log_probs[0].requires_grad
    assert unchanged(snapshot(o[1]), before)


@pytest.mark.parametrize("train", [True, False])
def test_train_and_eval_mode_score_alike(train: bool) -> None:
    """There is no dropout: a mode that changed a byte would part trainer and engine."""
    o = opened()
    fresh = o[0].forward_backward(o[1], batch(), forward_only=True).log_probs[0]
    (o[0].train_mode if train else o[0].eval_mode)(o[1])
    assert o[1].module.training is train
    assert same(o[0].forward_backward(o[1], batch(), forward_only=True).log_probs[0], fresh)


@pytest.mark.parametrize("dtype", DTYPES)
def test_deploy_counts_exactly_the_bytes_it_changed(dtype: str) -> None:
    """A flipped low bit is one byte, a changed sign one, two flipped bits of one element two; a change below the image's precision none."""
    _, handle = opened(dtype)
    masters = {name: p.detach().float().clone() for name, p in handle.module.named_parameters()}
    before = {name: bits(p.detach()).clone() for name, p in handle.module.named_parameters()}
    handle.weights.deploy(masters, 1)
    assert handle.weights.bytes_changed == 0 and handle.weights.version == 1
    flat = masters["embed.weight"].view(-1)
    image = bits(flat.to(DTYPES[dtype]))
    image[:2] ^= 1
    image[2] ^= 0x0101
    flat[:3] = image.view(DTYPES[dtype])[:3].float()
    flat[7] = -flat[7]
    handle.weights.deploy(masters, 2)
    assert handle.weights.bytes_changed == 1 + 1 + 2 + 1
    after = {name: bits(p.detach()) for name, p in handle.module.named_parameters()}
    assert sum(int((before[n] != after[n]).sum()) for n in before) == 4
    if dtype == "bf16":
        masters["norm.weight"] *= 1 + 1e-5
        handle.weights.deploy(masters, 3)
        assert handle.weights.bytes_changed == 0 and handle.weights.version == 3


def test_a_step_deploys_as_the_next_version_and_changes_the_logprobs() -> None:
    o = opened()
    before = o[0].forward_backward(o[1], batch(), forward_only=True)
    backward(o, batch())
    o[0].optimizer_step(o[1])
    after = o[0].forward_backward(o[1], batch(), forward_only=True)
    assert (before.weights_version, after.weights_version) == (0, 1)
    assert not same(before.log_probs[0], after.log_probs[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_five_steps_of_fine_tuning_bring_the_loss_down(name: str) -> None:
    """The whole chain learns: each step's loss is below the one before it, and the fifth well below the first."""
    runtime, handle = trainer(checkpoint(name), "bf16", BASE)
    data = PackedBatch.from_samples(make_samples([(4, 9), (1, 5), (12, 20)]))
    losses = []
    for _ in range(6):
        runtime.zero_grad(handle)
        losses.append(float(runtime.forward_backward(handle, data, nll).losses[0]))
        assert runtime.optimizer_step(handle)[0]
    assert losses == sorted(losses, reverse=True)
    assert losses[5] < 0.7 * losses[0] and handle.weights.version == 6


def test_losses_metrics_and_step_context_come_one_a_micro_batch() -> None:
    o = opened()
    seen = []

    def loss(scores, b, step):
        seen.append((step.index, step.num_microbatches, step.forward_only))
        return nll(scores, b, step)[0], {"tokens": int(b.loss_mask.sum())}

    result = o[0].forward_backward(o[1], [batch(1), batch(2)], loss, num_microbatches=2)
    assert seen == [(0, 2, False), (1, 2, False)]
    assert result.metrics == [{"tokens": 34}, {"tokens": 34}] and result.losses[0] != result.losses[1]
    assert torch.isfinite(torch.stack(result.losses)).all()


def test_a_step_without_a_gradient_is_refused() -> None:
    runtime, handle = opened("fp32")
    with pytest.raises(InputError, match="no parameter has a gradient"):
        runtime.optimizer_step(handle)
    assert handle.weights.version == 0
