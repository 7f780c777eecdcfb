"""The embedded engine's record is the trainer's own choice, token by token, however the tokens were scheduled; off, nothing is recorded."""

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lite.errors import InputError
from lite.primitive.ckpt.safetensors_files import write_checkpoint
from lite.runtime import routes
from lite.runtime.batch import PackedBatch
from lite.runtime.rollout.engine import Sampling, Trajectory
from lite.runtime.rollout.scheduler import Scheduler
from tests.checkpoints import answers, batch_of, checkpoint, engine, hf_config, make_prompts, make_tensors, trainer

FAMILIES = ["qwen3_moe", "nemotron_h"]
SAMPLING = Sampling(max_tokens=6, n=2)
TIGHT = {"cache_tokens": 96, "max_step_tokens": 24}  # prompts are cut, and the youngest request preempted


@functools.cache
def folder(name: str) -> Path:
    """The tiny hybrid has one layer with experts; this one has two, and they are not neighbours."""
    if name != "nemotron_h":
        return checkpoint(name)
    made = checkpoint(name).parent / "nemotron_h-recorded"
    shape = {"hybrid_override_pattern": "ME*E", "num_hidden_layers": 4}
    write_checkpoint(made, hf_config(name, **shape), make_tensors(name, torch.bfloat16, **shape).items())
    return made


def recorded(name: str, **options: int) -> tuple[list[Trajectory], object]:
    e = engine(folder(name), record_routes=True, **options)
    return e.generate(make_prompts([1, 40, 17, 33]), SAMPLING), e


def differing(name: str, trajectories: list[Trajectory]) -> int:
    """Choices in which the record is not what the trainer's routers choose, in a packing of its own; last tokens have no record."""
    runtime, handle = trainer(folder(name))
    order = trajectories[::-1]
    batch = batch_of(order)
    with routes.recording(handle.module) as found:
        runtime.forward_backward(handle, batch, forward_only=True)
    chosen = routes.by_layer(found, handle.bundle.layers).split(list(batch.seq_lens))
    return sum(int((mine[:-1] != t.routed_experts).sum()) for mine, t in zip(chosen, order, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("options", [{}, TIGHT], ids=["roomy", "tight"])
def test_the_record_is_the_trainers_choice(name: str, options: dict[str, int]) -> None:
    trajectories, e = recorded(name, **options)
    config = e.bundle.config
    assert not options or (e.counters.preemptions and e.counters.chunked_prefills)
    for t in trajectories:
        assert t.routed_experts.shape == (len(t.prompt_ids) + len(t.response_ids) - 1, config.layers, config.moe.k)
        assert [bool((t.routed_experts[:, i] == -1).all()) for i in range(config.layers)] == [mlp != "moe" for mlp in config.mlps]
    assert differing(name, trajectories) == 0
    t = trajectories[3]
    t.routed_experts[:, 1] = t.routed_experts[:, 1].roll(1, 0)
    assert differing(name, trajectories) > 0, "the routes of the tokens before"


def test_a_preempted_request_that_kept_its_record_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room = Scheduler._make_room

    def keeping(self: Scheduler, request: object, tokens: int) -> bool:
        kept = {id(r): list(r.routes) for r in self.running}
        every = list(self.running)
        made = make_room(self, request, tokens)
        for r in every:
            r.routes[:] = kept[id(r)]
        return made

    monkeypatch.setattr(Scheduler, "_make_room", keeping)
    assert any(len(t.routed_experts) != len(t.prompt_ids) + len(t.response_ids) - 1 for t in recorded("nemotron_h", **TIGHT)[0])


def test_recording_changes_no_answer_and_leaves_no_hook() -> None:
    trajectories, e = recorded("nemotron_h")
    plain = engine(folder("nemotron_h")).generate(make_prompts([1, 40, 17, 33]), SAMPLING)
    assert answers(trajectories) == answers(plain) and all(t.routed_experts is None for t in plain)
    assert not any(m._forward_hooks for m in e.bundle.module.modules())
    with pytest.raises(RuntimeError, match="in between"), routes.recording(e.bundle.module):
        raise RuntimeError("in between")
    assert not any(m._forward_hooks for m in e.bundle.module.modules())


def test_a_rollout_is_replayed_as_it_was_recorded() -> None:
    """From engine to trainer: the replay takes the recorded experts, and scores within roundings of bf16 what the engine returned."""
    trajectories, _ = recorded("nemotron_h")
    runtime, handle = trainer(folder("nemotron_h"))
    samples = [(t.prompt_ids, t.response_ids) for t in trajectories]

    def score(given: list[Tensor]) -> Tensor:
        batch = PackedBatch.from_samples(samples, routes=given)
        return runtime.forward_backward(handle, batch, forward_only=True).log_probs[0][batch.loss_mask]

    want = torch.cat([t.logprobs for t in trajectories])
    own = [t.routed_experts for t in trajectories]
    error = lambda given: float((score(given) - want).norm() / want.norm())
    assert error(own) < 1e-2 < 3e-2 < error([torch.where(r < 0, r, (r + 1) % 8) for r in own])


def test_an_engine_without_experts_records_none() -> None:
    with pytest.raises(InputError, match="record_routes: the model has no experts"):
        engine(checkpoint("qwen3"), record_routes=True)
