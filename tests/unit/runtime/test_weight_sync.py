"""Weights come whole and under one version, or the engine does not run."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lite.errors import InputError
from lite.runtime.batch import PackedBatch
from lite.runtime.config import OptimizerConfig
from lite.runtime.rollout.embedded import EmbeddedEngine
from lite.runtime.rollout.engine import Sampling
from lite.runtime.runtime import Handle, Runtime
from tests.checkpoints import FAMILIES, TIES, against_trainer, answers, checkpoint, engine, make_prompts, make_samples, trainer

SAMPLING = Sampling(max_tokens=8)
LEARNS = OptimizerConfig(lr=1e-2)


def train(runtime: Runtime, handle: Handle, seed: int) -> None:
    batch = PackedBatch.from_samples(make_samples([(5, 9), (3, 4)], seed))
    runtime.zero_grad(handle)
    runtime.forward_backward(handle, batch, lambda scores, b, step: (-scores.logprob.mean(), {}))
    done, norm, _ = runtime.optimizer_step(handle)
    assert done and norm > 0


def sync(runtime: Runtime, handle: Handle, e: EmbeddedEngine) -> None:
    e.update_weights(runtime.export_weights(handle), handle.weights.require())


@pytest.mark.parametrize(("name", "tied"), [*((name, False) for name in FAMILIES), *((name, True) for name in TIES)])
def test_two_steps_two_syncs_one_policy(name: str, tied: bool) -> None:
    """A tied head is the case that practice lost: the engine kept the old head, or got the new one only at the second sync."""
    folder = checkpoint(name, tied=tied)
    runtime, handle = trainer(folder, optimizer=LEARNS)
    e, prompts = engine(folder), make_prompts([1, 6, 20])
    assert (handle.bundle.module.head.weight is handle.bundle.module.embed.weight) == tied
    prints, replies = [e.fingerprint()], [answers(e.generate(prompts, SAMPLING))]
    assert handle.weights.fingerprint() == prints[0]
    for version in (1, 2):
        train(runtime, handle, seed=version)
        sync(runtime, handle, e)
        done = e.generate(prompts, SAMPLING)
        assert handle.weights.version == e.weights.version == version
        assert {t.policy_version for t in done} == {version}
        assert handle.weights.fingerprint() == e.fingerprint()
        assert against_trainer(done, runtime, handle).exact
        prints.append(e.fingerprint())
        replies.append(answers(done))
    assert len(set(prints)) == 3
    assert replies[0] != replies[1] != replies[2]


def test_without_the_sync_the_two_sides_part() -> None:
    """What the test above proves it proves by the sync: a skipped one is seen in fingerprint and bytes."""
    runtime, handle = trainer(checkpoint(), optimizer=LEARNS)
    e = engine(checkpoint())
    train(runtime, handle, seed=1)
    assert handle.weights.fingerprint() != e.fingerprint()
    assert against_trainer(e.generate(make_prompts([6]), SAMPLING), runtime, handle).mismatch > 0


def test_a_synced_engine_shares_no_storage_with_the_trainer() -> None:
    """An engine that kept references would follow the optimizer without a sync, under the old version."""
    runtime, handle = trainer(checkpoint(), optimizer=LEARNS)
    e = engine(checkpoint())
    sync(runtime, handle, e)
    before = e.fingerprint()
    train(runtime, handle, seed=1)
    assert e.fingerprint() == before != handle.weights.fingerprint()


Stream = Iterator[tuple[str, Tensor]]
NORM = "model.norm.weight"


def replaced(stream: Stream, tensor: Tensor) -> Stream:
    return ((name, tensor if name == NORM else t) for name, t in stream)


def twice(stream: Stream) -> Stream:
    for name, tensor in stream:
        yield name, tensor
        if name == NORM:
            yield name, tensor


SPOILED = {
    "incomplete": (lambda s: ((n, t) for n, t in s if n != NORM), f"1 missing .{NORM}"),
    "twice": (twice, f"{NORM}' twice"),
    "misshapen": (lambda s: replaced(s, torch.ones(47)), rf"{NORM}' is \(47,\).*\(48,\)"),
    "NaN": (lambda s: replaced(s, torch.full((48,), torch.nan)), f"{NORM}' holds NaN or Inf in 48 places"),
    "Inf": (lambda s: replaced(s, torch.full((48,), -torch.inf)), f"{NORM}' holds NaN or Inf"),
    "whole numbers": (lambda s: replaced(s, torch.ones(48, dtype=torch.int8)), f"{NORM}' holds int8"),
    "unexpected": (lambda s: iter([*s, ("model.extra", torch.ones(1))]), "1 unexpected .model.extra"),
    "nothing": (lambda s: iter(()), "missing"),
}


@pytest.mark.parametrize("fault", SPOILED)
def test_after_a_spoiled_update_the_engine_refuses_until_a_whole_one(fault: str) -> None:
    spoil, said = SPOILED[fault]
    runtime, handle = trainer(checkpoint())
    e, prompts = engine(checkpoint()), make_prompts([6])
    expected = answers(e.generate(prompts, SAMPLING))
    with pytest.raises(InputError, match=said) as caught:
        e.update_weights(spoil(runtime.export_weights(handle)), 1)
    assert "\n" not in str(caught.value) and "weight sync" in str(caught.value)
    for use in (lambda: e.generate(prompts, SAMPLING), e.fingerprint):
        with pytest.raises(InputError, match="not whole"):
            use()
    sync(runtime, handle, e)
    assert answers(e.generate(prompts, SAMPLING)) == expected


def test_a_stream_that_breaks_off_leaves_no_half_policy() -> None:
    """The sender dies: its own error comes through, and the engine does not run on what has arrived."""
    runtime, handle = trainer(checkpoint())
    e = engine(checkpoint())

    def broken() -> Stream:
        yield next(runtime.export_weights(handle))
        raise ConnectionError("sender gone")

    with pytest.raises(ConnectionError):
        e.update_weights(broken(), 1)
    with pytest.raises(InputError, match="not whole"):
        e.generate(make_prompts([6]), SAMPLING)


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_does_not_answer_and_level_2_needs_a_sync(level: int) -> None:
    runtime, handle = trainer(checkpoint())
    e, prompts = engine(checkpoint()), make_prompts([6])
    expected = answers(e.generate(prompts, SAMPLING))
    e.sleep(level)
    with pytest.raises(InputError, match="asleep"):
        e.generate(prompts, SAMPLING)
    e.wake()
    if level == 2:
        with pytest.raises(InputError, match="sync"):
            e.generate(prompts, SAMPLING)
        sync(runtime, handle, e)
    assert answers(e.generate(prompts, SAMPLING)) == expected


def test_a_closed_engine_stays_closed() -> None:
    e = engine(checkpoint())
    e.close()
    with pytest.raises(InputError):
        e.generate(make_prompts([6]), SAMPLING)


def test_an_older_policy_can_be_synced_back() -> None:
    """A resumed run goes back in versions; the old weights must give the old answers, under the old version."""
    runtime, handle = trainer(checkpoint(), optimizer=LEARNS)
    e = engine(checkpoint())
    old = [(name, tensor.clone()) for name, tensor in runtime.export_weights(handle)]
    done = e.generate(make_prompts([4, 9]), SAMPLING)
    train(runtime, handle, seed=1)
    sync(runtime, handle, e)
    assert answers(e.generate(make_prompts([4, 9]), SAMPLING)) != answers(done)
    e.update_weights(iter(old), 0)
    again = e.generate(make_prompts([4, 9]), SAMPLING)
    assert answers(again) == answers(done)
    assert {t.policy_version for t in again} == {0}
