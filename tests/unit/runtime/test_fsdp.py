"""Sharded over ranks, recomputed, offloaded: the forward's bytes are those of one plain process, and so is the policy that follows.

Limits, set before the first run:
GRADIENT  norm of a difference of gradients over the norm of the gradient. Two orders of adding the same fp32 terms differ by a few
          roundings of 6e-8.
UPDATE    the same of masters over what the steps changed of them. Adam divides by |g|, so a gradient error d, relative to a typical |g|,
          becomes d / x where |g| is x times the typical one, and its L2 norm about the square root of d. In bf16 a master on the edge may
          also be rounded the other way, and every later gradient then differs by a part of a bf16 rounding (4e-3).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lite.errors import InputError
from lite.primitive.ckpt.safetensors_files import read_tensors
from lite.primitive.kernels import reference
from lite.runtime.batch import PackedBatch
from lite.runtime.config import FsdpConfig, MegatronLiteConfig, RuntimeConfig
from lite.runtime.fsdp import ShardedWeights
from lite.runtime.runtime import Runtime
from tests.checkpoints import checkpoint, make_samples, same
from tests.ranks import on_ranks
from tests.sharded import Opened, Tensors, batches, distance, equal, gradients, nll, off, opened, train, update

GRADIENT, UPDATE = 1e-6, {"fp32": 1e-3, "bf16": 1e-2}
DTYPES = ["fp32", "bf16"]


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_two_ranks_train_as_one_process_does(dtype: str) -> None:
    one, two = train(dtype, 5), on_ranks(2, train, dtype, 5)
    first, other = one[1], [steps[1] for steps in two]
    assert all(same(a, b) for a, b in zip(first["log_probs"], other[0]["log_probs"] + other[1]["log_probs"], strict=True))
    assert all(same(a, b) for a, b in zip(first["losses"], other[0]["losses"] + other[1]["losses"], strict=True))
    assert off(other[0], first) < GRADIENT and other[0]["norm"] == pytest.approx(first["norm"], rel=1e-6)
    assert other[0]["zeros"] == first["zeros"] and other[0]["changed"] == pytest.approx(first["changed"], rel=1e-3)
    moved = {name: one[5]["masters"][name] - start for name, start in one[0]["masters"].items()}
    assert equal(two[0][0]["masters"], one[0]["masters"])
    assert distance(two[0][5]["masters"], one[5]["masters"], moved) < UPDATE[dtype]
    for mine, theirs in zip(two[0][1:], two[1][1:], strict=True):
        assert mine["fingerprint"] == theirs["fingerprint"] and equal(mine["export"], theirs["export"])
        assert (mine["norm"], mine["zeros"], mine["changed"]) == (theirs["norm"], theirs["zeros"], theirs["changed"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "nemotron_h"])
def test_experts_and_scans_train_on_two_ranks_as_in_one_process(family: str) -> None:
    """The decay is a group of its own, in fp32; a router's bias is whole on every rank."""
    one, two = train("bf16", 2, family), on_ranks(2, train, "bf16", 2, family)
    first, other = one[1], [steps[1] for steps in two]
    assert all(same(a, b) for a, b in zip(first["log_probs"], other[0]["log_probs"] + other[1]["log_probs"], strict=True))
    assert off(other[0], first) < GRADIENT and other[0]["fingerprint"] == other[1]["fingerprint"]
    assert all(other[0]["export"][name].dtype == t.dtype for name, t in first["export"].items())
    moved = {name: one[2]["masters"][name] - start for name, start in one[0]["masters"].items()}
    assert distance(two[0][2]["masters"], one[2]["masters"], moved) < UPDATE["bf16"]
    again = train("bf16", 2, family, recompute=True)
    assert equal(again[1]["gradients"], first["gradients"]) and again[2]["fingerprint"] == one[2]["fingerprint"]


def planted(kind: str) -> dict[str, Any]:
    o = opened()
    parts = [part for part in o[1].module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        if kind == "a mean":
            part.set_gradient_divide_factor(2.0)
        if kind == "rounded gradients":
            part.unshard()
            for p in part.parameters():  # type: ignore[attr-defined]
                if not isinstance(p, DTensor):
                    p.grad_dtype = torch.bfloat16
            part.reshard()
    silent = kind == "a rank ignored" and dist.get_rank() == 1
    return update(o, batches(), lambda *a: (nll(*a)[0] * (0.0 if silent else 1.0), {}))


@pytest.mark.slow
def test_a_lost_rank_a_mean_and_rounded_gradients_pass_the_limit() -> None:
    kinds = ["nothing", "a rank ignored", "a mean", "rounded gradients"]
    plain = update(opened(), batches())
    found, _ = on_ranks(2, lambda: {kind: off(planted(kind), plain) for kind in kinds})
    assert found.pop("nothing") < GRADIENT
    assert all(error > 100 * GRADIENT for error in found.values()), found


SETTINGS: list[dict[str, Any]] = [
    {}, {"recompute": True}, {"reshard_after_forward": False}, {"recompute": True, "reshard_after_forward": False},
    {"param_offload": True}, {"optimizer_offload": True}, {"recompute": True, "param_offload": True},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_is_saved_without_a_bit_of_difference(dtype: str) -> None:
    """On a CPU offloading moves nothing; what is tried is the order of the moves, and FSDP2's policy."""
    runs, _ = on_ranks(2, lambda: [train(dtype, 2, **setting) for setting in SETTINGS])
    for run in runs[1:]:
        for mine, base in zip(run[1:], runs[0][1:], strict=True):
            assert equal(dict(enumerate(mine["log_probs"])), dict(enumerate(base["log_probs"])))  # type: ignore[arg-type]
            assert equal(mine["gradients"], base["gradients"]) and equal(mine["masters"], base["masters"])
            assert mine["fingerprint"] == base["fingerprint"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_process_recomputes_and_offloads_without_a_bit_of_difference(dtype: str) -> None:
    base = train(dtype, 2)
    for setting in ({"recompute": True}, {"optimizer_offload": True}):
        run = train(dtype, 2, **setting)
        assert all(equal(mine[key], want[key]) for mine, want in zip(run[1:], base[1:], strict=True) for key in ("gradients", "masters"))


def visited_and_in_place() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    in_place, o = train("bf16", 3), opened("bf16")
    optimizer = o[1].optimizer
    assert optimizer is not None
    optimizer.adamw.step = lambda: optimizer._step_on(torch.device("cpu"))  # type: ignore[assignment,method-assign]
    return in_place[1:], [update(o, batches(i)) for i in range(3)]


@pytest.mark.slow
def test_a_step_that_shards_visit_a_device_for_has_the_bits_of_a_step_in_place() -> None:
    for in_place, visited in on_ranks(2, visited_and_in_place):
        for a, b in zip(in_place, visited, strict=True):
            assert equal(a["masters"], b["masters"]) and a["fingerprint"] == b["fingerprint"]


def test_recompute_runs_each_layer_again_and_a_second_run_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    o, calls, honest = opened(recompute=True), [0], reference.swiglu
    layers, data = len(o[1].module.layers), batches(count=1)
    base = update(opened(), data)["gradients"]

    def counted(gate_up: Tensor, off: float) -> Tensor:
        calls[0] += 1
        return honest(gate_up) + (off if calls[0] > layers else 0.0)

    for error, alike in ((0.0, True), (1e-2, False)):
        calls[0] = 0
        monkeypatch.setattr(reference, "swiglu", lambda gate_up, error=error: counted(gate_up, error))
        o[0].zero_grad(o[1])
        o[0].forward_backward(o[1], data, nll)
        assert calls[0] == 2 * layers and equal(gradients(o), base) is alike


class Reduces(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def reduces(data: list[PackedBatch], together: bool) -> tuple[int, dict[str, Any]]:
    """-> (reduce-scatters of the step, its gradients)."""
    o = opened()
    total = dist.get_world_size() * 34 * 3
    loss = lambda scores, b, s: (-scores.logprob.sum() / total, {})
    with Reduces() as counted:
        for part in [data] if together else [[batch] for batch in data]:
            o[0].forward_backward(o[1], part, loss)
    return counted.count, {"gradients": gradients(o)}


def accumulations() -> tuple[Any, ...]:
    samples = [make_samples([(4, 9), (1, 5), (12, 20)], seed=3 * dist.get_rank() + i) for i in range(3)]
    apart = [PackedBatch.from_samples(part) for part in samples]
    packed = PackedBatch.from_samples([sample for part in samples for sample in part])
    return reduces([packed], True), reduces(apart, True), reduces(apart, False)


@pytest.mark.slow
def test_micro_batches_accumulate_and_are_reduced_once() -> None:
    (packed, want), (three, accumulated), (each, reduced) = on_ranks(2, accumulations)[0]
    assert packed == three == 3, "two layers, and what is around them"
    assert each == 9, "the count sees reduces in every micro-batch"
    assert off(accumulated, want) < GRADIENT and off(reduced, want) < GRADIENT


def resumed(root: Path) -> dict[str, Any]:
    o = opened()
    assert o[0].load_checkpoint(o[1], root) == {"by": root.name}
    first = {name: t.clone() for name, t in o[0].export_weights(o[1])}
    return {"first": first, "draw": torch.rand(4)} | update(o, batches(2))


def saved(root: Path, start: int) -> dict[str, Any]:
    """Two steps on data of its own, a checkpoint, what was exported then, and the step after."""
    o = opened()
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 7)
    for step in range(2):
        last = update(o, batches(start + step))
    o[0].save_checkpoint(o[1], root, facts={"by": root.name})
    return {"first": last["export"], "draw": torch.rand(4), "then": last["masters"]} | update(o, batches(2))


@pytest.mark.slow
def test_a_checkpoint_is_read_by_other_numbers_of_ranks_than_wrote_it(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    alone = saved(one, 20)
    (wrote, again, as_two), (wrote_1, again_1, _) = on_ranks(2, lambda: (saved(two, 10), resumed(two), resumed(one)))
    as_one = resumed(two)
    for first, want in ((again, wrote), (as_one, wrote), (as_two, alone)):
        assert equal(first["first"], want["first"])
        moved = {name: want["masters"][name] - want["then"][name] for name in want["then"]}
        assert off(first, want) < GRADIENT and distance(first["masters"], want["masters"], moved) < UPDATE["bf16"]
    for mine, before in ((again, wrote), (again_1, wrote_1)):
        assert equal(mine["masters"], before["masters"]) and same(mine["draw"], before["draw"])
    assert not same(again["draw"], again_1["draw"]), "each rank has a random stream of its own"
    assert not equal(alone["first"], wrote["first"]) and off(alone, wrote) > 100 * GRADIENT, "these are two runs"


def refusals() -> list[str]:
    o, rank, said = opened(), dist.get_rank(), []
    long = PackedBatch.from_samples([([1], [2] * 400)])
    for data in (batches()[: 1 + rank], [long] if rank else batches(count=2)):
        with pytest.raises(InputError) as refused:
            o[0].forward_backward(o[1], data, nll)
        said.append(str(refused.value))
    update(o, batches())
    return said


def test_ranks_that_do_not_do_the_same_are_refused_and_none_waits() -> None:
    for numbers, bad in on_ranks(2, refusals):
        assert "rank 0: 1 micro-batches with a backward; rank 1: 2 micro-batches with a backward" in numbers
        assert "a sequence of 401 tokens" in bad


def writes() -> None:
    def writing(how: str, o: Opened) -> Callable:
        def loss(*given: Any) -> Any:
            with torch.no_grad():
                if how == "a step":
                    o[1].weights.deploy({}, 7)
                elif how == "past the door":
                    o[1].weights.parameters["norm.weight"].add_(1.0)
                else:
                    o[1].module.norm.weight.add_(1.0)  # gathered: the root's weights stay so until its backward
            return nll(*given)

        return loss

    for how in ("a step", "past the door", "the gathered weights"):
        o = opened()
        with pytest.raises(RuntimeError, match="written between forward"):
            o[0].forward_backward(o[1], batches(), writing(how, o))
        if how == "a step":  # of nothing: stopped before its backward, the trainer goes on
            assert update(o, batches())["fingerprint"] == update(opened(), batches())["fingerprint"]


@pytest.mark.slow
def test_weights_written_between_forward_and_backward_are_an_error_on_every_rank() -> None:
    on_ranks(2, writes)


def score_step_score(sharded: bool) -> Tensor:
    """A forward without a backward leaves gathered weights behind, which the step makes stale."""
    o = opened(reshard_after_forward=False)
    o[0].to(o[1], "cpu")
    data = batches(count=2) if sharded else batches(count=2)[-1:]
    o[0].forward_backward(o[1], batches(count=2), nll)
    o[0].forward_backward(o[1], data, forward_only=True)
    o[0].optimizer_step(o[1])
    return o[0].forward_backward(o[1], data, forward_only=True).log_probs[-1]


@pytest.mark.slow
def test_a_score_before_a_step_leaves_no_stale_weights() -> None:
    """Of the second rank's batch; two micro-batches over two ranks add up as in one process: one addition."""
    assert same(on_ranks(2, score_step_score, True)[1], score_step_score(False))


def scored() -> tuple[set[torch.dtype], list[Tensor], str]:
    backend = MegatronLiteConfig(dtype="bf16", device="cpu", optimizer=None)
    runtime = Runtime(RuntimeConfig(checkpoint("qwen2"), backend_cfg=backend))
    handle = runtime.build_model()
    scores = runtime.forward_backward(handle, batches(), forward_only=True).log_probs
    return {p.dtype for p in handle.weights.parameters.values()}, scores, handle.weights.fingerprint()


def test_a_model_that_only_scores_is_sharded_in_its_own_dtype() -> None:
    (_, plain, fingerprint), ranks = scored(), on_ranks(2, scored)
    assert all(dtypes == {torch.bfloat16} and print_ == fingerprint for dtypes, _, print_ in ranks)
    assert all(same(a, b) for a, b in zip(ranks[0][1] + ranks[1][1], plain, strict=True))


def written(folder: Path) -> Tensors:
    o = opened()
    update(o, batches())
    o[0].save_hf(o[1], folder)
    return dict(read_tensors(folder)) | {"exported": torch.tensor(list(bytes.fromhex(o[1].weights.fingerprint())))}


@pytest.mark.slow
def test_a_saved_model_is_whole_on_every_rank_when_the_call_returns(tmp_path: Path) -> None:
    first, second = on_ranks(2, written, tmp_path)
    want = update(opened(), batches())["export"]
    assert equal(first, second) and equal({name: first[name] for name in want}, want) and len(first) == len(want) + 1


def apart(folder: Path) -> tuple[dict[str, Any], str]:
    """Three ranks, so that no matrix is cut evenly; one parameter is trained in fp32, one frozen."""
    backend = MegatronLiteConfig(dtype="bf16", device="cpu")
    bundle = Runtime(RuntimeConfig(folder, backend_cfg=backend)).bundle()
    norm = bundle.module.layers[0].mixer.q_norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().float())
    bundle.module.layers[1].mlp_norm.weight.requires_grad_(False)
    weights = ShardedWeights(bundle, FsdpConfig(), torch.bfloat16, torch.device("cpu"), True)
    weights.load(read_tensors(folder), 0, folder)
    batch, seen = PackedBatch.from_samples(make_samples([(4, 9), (1, 5)], dist.get_rank())), []
    norm.register_forward_pre_hook(lambda module, given: seen.append(module.weight.dtype))
    scores = bundle.module(batch.input_ids, batch.context, batch.labels, batch.temperatures, batch.scored_rows)
    scores.logprob.sum().backward()
    grads = {name: None if p.grad is None else p.grad.dtype for name, p in weights.parameters.items()}
    frozen = "layers.1.mlp_norm.weight"
    assert seen == [torch.float32], "what the kernel reads"
    assert grads.pop(frozen) is None and not isinstance(weights.parameters[frozen], DTensor) and set(grads.values()) == {torch.float32}
    return {name: t.clone() for name, t in weights.export()}, weights.fingerprint()


def test_frozen_parameters_and_those_of_another_dtype_have_a_place() -> None:
    folder = checkpoint("qwen3")
    given = dict(read_tensors(folder))
    (exported, print_0), (_, print_1), (_, print_2) = on_ranks(3, apart, folder)
    name = "model.layers.0.self_attn.q_norm.weight"
    assert same(exported.pop(name), given.pop(name).float()), "not rounded on the way"
    assert equal(exported, given) and print_0 == print_1 == print_2


def test_choices_that_need_a_group_are_refused_without_one() -> None:
    for fsdp, said in (({"shard": "always"}, "no process group"), ({"param_offload": True}, "sharded model")):
        with pytest.raises(InputError, match=said):
            opened(**fsdp)
    with pytest.raises(InputError, match="part of param_offload"):
        FsdpConfig(param_offload=True, optimizer_offload=True)
    alone, asked = train("bf16", 1), on_ranks(1, lambda: train("bf16", 1, shard="always", param_offload=True))[0]
    assert equal(alone[1]["gradients"], asked[1]["gradients"]) and alone[1]["fingerprint"] == asked[1]["fingerprint"]
