"""One optimizer step: fp32 masters move as torch's AdamW moves them, and the deployed image is what they round to."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from lite.primitive.ckpt.safetensors_files import write_checkpoint
from lite.primitive.optimizer.master import update_norm
from lite.runtime.batch import PackedBatch
from tests.checkpoints import DTYPES, hf_config, make_samples, make_tensors, same, trainer
from tests.training import BASE, backward, batch, image_is_rounded_masters, opened


@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_are_fp32_and_the_image_is_what_they_round_to(dtype: str) -> None:
    """Before the first step and after each; updates below a bf16 step are kept in the masters and add up."""
    o = opened(dtype, lr=1e-4)
    assert image_is_rounded_masters(o[1])
    start = {name: m.clone() for name, m in o[1].optimizer.masters.items()}
    for seed in range(3):
        backward(o, batch(seed))
        assert o[0].optimizer_step(o[1])[0]
        assert image_is_rounded_masters(o[1])
    masters = o[1].optimizer.masters
    assert {m.dtype for m in masters.values()} == {torch.float32}
    assert all(not same(masters[name], start[name]) for name in masters)
    moved = math.sqrt(sum(float((masters[name] - start[name]).square().sum()) for name in start))
    assert update_norm(start, masters) == pytest.approx(moved, rel=1e-5)
    if dtype == "bf16":
        assert any(not same(m, m.bfloat16().float()) for m in masters.values())


def test_masters_keep_what_the_checkpoint_holds_beyond_the_image(tmp_path: Path) -> None:
    """An fp32 checkpoint trained in bf16: the master starts at the checkpoint's value and not at the rounded one."""
    tensors = make_tensors("qwen2", torch.float32)
    write_checkpoint(tmp_path / "model", hf_config("qwen2"), tensors.items())
    _, handle = trainer(tmp_path / "model", "bf16", BASE)
    assert same(handle.optimizer.masters["norm.weight"], tensors["model.norm.weight"])
    assert same(handle.optimizer.masters["layers.0.mixer.qkv.bias"][64:96], tensors["model.layers.0.self_attn.k_proj.bias"])
    assert image_is_rounded_masters(handle)


def test_three_steps_are_torch_adamw_with_decay_on_matrices_only() -> None:
    """Independent copies, one AdamW over the matrices and one over norms and biases, fed the very same gradients."""
    o = opened("fp32", weight_decay=0.3)
    copies = {name: nn.Parameter(m.clone()) for name, m in o[1].optimizer.masters.items()}
    settings = {"lr": BASE.lr, "betas": (BASE.adam_beta1, BASE.adam_beta2), "eps": BASE.adam_eps}
    matrices = torch.optim.AdamW([p for n, p in copies.items() if "norm" not in n and "bias" not in n], weight_decay=0.3, **settings)
    vectors = torch.optim.AdamW([p for n, p in copies.items() if "norm" in n or "bias" in n], weight_decay=0.0, **settings)
    assert sum(len(a.param_groups[0]["params"]) for a in (matrices, vectors)) == len(copies)
    for seed in range(3):
        for name, grad in backward(o, batch(seed)).items():
            copies[name].grad = grad
        o[0].optimizer_step(o[1])
        matrices.step()
        vectors.step()
    assert all(same(m, copies[name].detach()) for name, m in o[1].optimizer.masters.items())


def test_masters_that_visit_a_device_take_the_same_steps_also_those_that_come_late() -> None:
    """A parameter without a gradient in the first step has no moments until its own first."""
    in_place, visited = opened("fp32"), opened("fp32")
    late, optimizer = "layers.1.mlp.down.weight", visited[1].optimizer
    optimizer.adamw.step = lambda: optimizer._step_on(torch.device("cpu"))
    for seed in range(3):
        for o in (in_place, visited):
            backward(o, batch(seed))
            if seed == 0:
                o[1].optimizer.parameters[late].grad = None
            o[0].optimizer_step(o[1])
    assert in_place[1].optimizer.steps() == visited[1].optimizer.steps() and in_place[1].optimizer.steps()[late] == 2
    assert all(same(m, visited[1].optimizer.masters[name]) for name, m in in_place[1].optimizer.masters.items())


def test_decay_alone_shrinks_matrices_and_leaves_vectors() -> None:
    """Zero gradients: what moves is decay, by the factor 1 - lr * decay."""
    o = opened("fp32", lr=0.1, weight_decay=0.5)
    before = {name: m.clone() for name, m in o[1].optimizer.masters.items()}
    backward(o, batch(), lambda scores, b, step: (scores.logprob.sum() * 0.0, {}))
    done, norm, zeros = o[0].optimizer_step(o[1])
    assert (done, norm) == (True, 0.0) and zeros == sum(m.numel() for m in before.values())
    for name, master in o[1].optimizer.masters.items():
        torch.testing.assert_close(master, before[name] * (0.95 if master.ndim > 1 else 1.0), rtol=1e-6, atol=0)


def test_clipping_scales_all_gradients_by_one_factor_and_reports_the_norm_before() -> None:
    """The clipped step equals a step of torch on gradients divided by norm / limit; below the limit nothing is touched."""
    grads = backward(opened("fp32"), batch())
    total = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    for limit in (total / 10, total * 10):
        o = opened("fp32", clip_grad=limit)
        backward(o, batch())
        done, norm, _ = o[0].optimizer_step(o[1])
        assert done and norm == pytest.approx(total, rel=1e-5)
        factor = min(1.0, limit / (total + 1e-6))
        for name, p in o[1].module.named_parameters():
            torch.testing.assert_close(p.grad, grads[name] * factor, rtol=1e-5, atol=0)
            moment = o[1].optimizer.adamw.state[o[1].optimizer.masters[name]]["exp_avg"]
            torch.testing.assert_close(moment, (1 - BASE.adam_beta1) * grads[name] * factor, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_the_learning_rate_follows_its_closed_form(style: str) -> None:
    lr, low, start, warm, end = 1e-3, 1e-4, 2e-4, 4, 12
    o = opened(lr=lr, min_lr=low, lr_warmup_init=start, lr_warmup_steps=warm, lr_decay_steps=end, lr_decay_style=style)

    def expected(step: int) -> float:
        if step < warm:
            return start + (lr - start) * step / warm
        done = min(1.0, (step - warm) / (end - warm))
        return {"constant": lr, "linear": lr + (low - lr) * done, "cosine": low + (lr - low) * (1 + math.cos(math.pi * done)) / 2}[style]

    group = o[1].optimizer.adamw.param_groups
    assert [g["lr"] for g in group] == pytest.approx([expected(0)] * 2)
    for step in range(1, 16):
        backward(o, batch())
        o[0].optimizer_step(o[1])
        assert o[0].lr_scheduler_step(o[1]) == pytest.approx(expected(step), rel=1e-9)
        assert [g["lr"] for g in group] == pytest.approx([expected(step)] * 2, rel=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_micro_batches_add_up_to_the_whole_batch(dtype: str) -> None:
    """Three micro-batches against one. fp32: 1e-5 of each tensor's largest entry, the reordering of fp32 sums. bf16: 2 %, as
    gradients of activations are rounded alike but each micro-batch's weight gradients are summed apart, in fp32."""
    samples = make_samples([(4, 9), (1, 5), (12, 20)])
    whole = backward(opened(dtype), PackedBatch.from_samples(samples))
    parts = backward(opened(dtype), [PackedBatch.from_samples([s]) for s in samples])
    assert {g.dtype for g in parts.values()} == {torch.float32}
    for name, grad in whole.items():
        limit = {"fp32": 1e-5, "bf16": 2e-2}[dtype] * float(grad.abs().max())
        assert float((parts[name] - grad).abs().max()) <= limit, name
