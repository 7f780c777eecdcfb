"""A run that was broken off goes on as if it had not been: bit for bit, from the latest checkpoint that is whole."""

import itertools
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from lite.errors import InputError
from lite.runtime import checkpoint
from lite.runtime.batch import PackedBatch
from lite.runtime.config import MegatronLiteConfig, OptimizerConfig, RuntimeConfig
from lite.runtime.runtime import Handle, Runtime
from tests.checkpoints import SMALL, same
from tests.checkpoints import checkpoint as model_folder

OPTIMIZER = OptimizerConfig(lr=1e-2, lr_warmup_steps=3, lr_decay_steps=20, lr_decay_style="cosine")


def trainer(folder: Path) -> tuple[Runtime, Handle]:
    backend = MegatronLiteConfig(dtype="bf16", device="cpu", optimizer=OPTIMIZER)
    runtime = Runtime(RuntimeConfig(hf_path=str(folder), backend_cfg=backend))
    return runtime, runtime.build_model()


def step(runtime: Runtime, handle: Handle) -> None:
    """One update on a batch that the policy's version and torch's random stream decide."""
    generator = torch.Generator().manual_seed(handle.weights.require())
    ids = torch.randint(SMALL["vocab_size"], (24,), generator=generator).tolist()
    weight = torch.rand(())
    batch = PackedBatch.from_samples([(ids[:4], ids[4:15]), (ids[15:17], ids[17:])])
    runtime.zero_grad(handle)
    runtime.forward_backward(handle, batch, lambda scores, batch, ctx: (-weight * scores.logprob[batch.loss_mask].sum(), {}))
    done, _, _ = runtime.optimizer_step(handle)
    assert done
    runtime.lr_scheduler_step(handle)


def state(runtime: Runtime, handle: Handle) -> dict[str, torch.Tensor]:
    assert handle.optimizer is not None
    moments = {name: t.clone() for name, t in handle.optimizer.tensors().items()}
    return moments | {name: t.clone() for name, t in runtime.export_weights(handle)}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not same(one[name], other[name])]


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder("qwen3", tied=False)


Saved = tuple[Path, dict[str, torch.Tensor], dict[str, torch.Tensor]]


def trained(folder: Path, tmp_path: Path) -> Saved:
    """-> (root of a checkpoint after 2 steps, the state then, the state one step later)."""
    runtime, handle = trainer(folder)
    torch.manual_seed(7)
    for _ in range(2):
        step(runtime, handle)
    runtime.save_checkpoint(handle, tmp_path / "run", facts={"reward": [0.5, 1.0]})
    then = state(runtime, handle)
    step(runtime, handle)
    return tmp_path / "run", then, state(runtime, handle)


@pytest.fixture
def saved(folder: Path, tmp_path: Path) -> Saved:
    return trained(folder, tmp_path)


@pytest.mark.parametrize("family", ["qwen3", "nemotron_h"])
def test_the_next_step_has_the_bits_of_the_run_without_a_break(tmp_path, family: str) -> None:
    folder = model_folder(family)
    root, then, later = trained(folder, tmp_path)
    runtime, handle = trainer(folder)
    torch.manual_seed(1000)
    assert runtime.load_checkpoint(handle, root) == {"reward": [0.5, 1.0]}
    assert handle.weights.version == 2 and differing(state(runtime, handle), then) == []
    step(runtime, handle)
    assert handle.weights.version == 3 and differing(state(runtime, handle), later) == []


def test_a_trainer_that_had_gone_on_goes_back(folder, saved) -> None:
    """Gradients and moments of what it did meanwhile are forgotten."""
    root, _, later = saved
    runtime, handle = trainer(folder)
    for _ in range(3):
        step(runtime, handle)
    runtime.load_checkpoint(handle, root)
    step(runtime, handle)
    assert differing(state(runtime, handle), later) == []


@pytest.mark.parametrize("forgotten", ["moments", "steps", "schedule", "random stream"])
def test_what_a_resume_forgot_would_be_seen(folder, saved, monkeypatch, forgotten: str) -> None:
    root, _, later = saved
    runtime, handle = trainer(folder)
    if forgotten == "random stream":
        monkeypatch.setattr(checkpoint, "set_random_state", lambda states: None)
    torch.manual_seed(1000)
    runtime.load_checkpoint(handle, root)
    for moments in handle.optimizer.adamw.state.values():
        if forgotten == "moments":
            moments["exp_avg"].zero_()
        if forgotten == "steps":
            moments["step"].zero_()
    if forgotten == "schedule":
        handle.optimizer.adamw.param_groups[0]["lr"] *= 0.5
    step(runtime, handle)
    assert differing(state(runtime, handle), later) != []


def test_the_first_export_is_what_an_engine_had_been_given(folder, saved) -> None:
    root, then, _ = saved
    runtime, handle = trainer(folder)
    before = handle.weights.fingerprint()
    runtime.load_checkpoint(handle, root)
    exported = dict(runtime.export_weights(handle))
    assert all(same(exported[name], then[name]) for name in exported) and handle.weights.fingerprint() != before


def test_what_cannot_be_saved_writes_nothing(folder, tmp_path) -> None:
    runtime, handle = trainer(folder)
    with pytest.raises(InputError, match="keep: is 0"):
        runtime.save_checkpoint(handle, tmp_path, keep=0)
    with pytest.raises(TypeError, match="Tensor is not JSON serializable"):
        runtime.save_checkpoint(handle, tmp_path, facts={"reward": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_name_is_no_checkpoint(folder, tmp_path) -> None:
    (tmp_path / "step-final").mkdir()
    runtime, handle = trainer(folder)
    assert runtime.load_checkpoint(handle, tmp_path) is None
    assert runtime.save_checkpoint(handle, tmp_path).name == "step-00000000"
    (tmp_path / "step-00000000" / "state.json").write_text("[]")
    with pytest.raises(InputError, match="lacks 'version'"):
        runtime.load_checkpoint(handle, tmp_path)


def test_the_last_ones_are_kept(folder, tmp_path) -> None:
    runtime, handle = trainer(folder)
    assert runtime.load_checkpoint(handle, tmp_path) is None, "nothing to resume from yet"
    for _ in range(5):
        step(runtime, handle)
        runtime.save_checkpoint(handle, tmp_path, keep=2)
    assert [path.name for path in checkpoint.whole(tmp_path)] == ["step-00000004", "step-00000005"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
    runtime.load_checkpoint(handle, tmp_path / "step-00000004")
    assert handle.weights.version == 4
    with pytest.raises(InputError, match="holds step-00000005 already"):
        step(runtime, handle)
        runtime.save_checkpoint(handle, tmp_path)


def test_nothing_in_a_checkpoint_is_a_pickle(saved) -> None:
    folder = checkpoint.latest(saved[0])
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}


def damage(folder: Path, how: str) -> None:
    shard = next(folder.glob("*.safetensors"))
    if how == "cut off":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif how == "empty":
        shard.write_bytes(b"")
    elif how == "no tensors":
        shard.unlink()
    elif how == "half a state":
        (folder / checkpoint.STATE).write_text((folder / checkpoint.STATE).read_text()[:30])
    elif how == "another model":
        held = json.loads((folder / checkpoint.STATE).read_text())
        held["config"]["num_hidden_layers"] = 3
        (folder / checkpoint.STATE).write_text(json.dumps(held))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut off", "cannot be read"), ("empty", "cannot be read"), ("no tensors", "lacks"),
        ("half a state", "is no checkpoint"), ("another model", "num_hidden_layers = 3, this one has 2"),
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_checkpoint_is_refused_in_one_line(folder, saved, how: str, message: str) -> None:
    runtime, handle = trainer(folder)
    damage(checkpoint.latest(saved[0]), how)
    with pytest.raises(InputError, match=message) as error:
        runtime.load_checkpoint(handle, saved[0])
    assert "step-00000002" in str(error.value)


@pytest.mark.parametrize("how", ["cut off", "half a state"])
def test_a_damaged_checkpoint_says_how_to_take_the_one_before(folder, saved, how: str) -> None:
    root, then, later = saved
    runtime, handle = trainer(folder)
    runtime.load_checkpoint(handle, root)
    step(runtime, handle)
    runtime.save_checkpoint(handle, root)
    damage(root / "step-00000003", how)
    with pytest.raises(InputError, match=r"step-00000003: .*; move it away or delete it to go on from step-00000002"):
        runtime.load_checkpoint(handle, root)
    (root / "step-00000003").rename(root / "step-00000003.damaged")
    runtime.load_checkpoint(handle, root)
    assert differing(state(runtime, handle), then) == []
    step(runtime, handle)
    assert differing(state(runtime, handle), later) == []
    runtime.save_checkpoint(handle, root)
    damage(root / "step-00000002", how)
    with pytest.raises(InputError, match="no earlier one is there to go on from"):
        runtime.load_checkpoint(handle, root / "step-00000002")


def test_a_folder_without_a_state_is_no_checkpoint_of_ours(folder, saved) -> None:
    """The state is written last, before the folder gets its name."""
    root, then, _ = saved
    for number in (3, 7):
        (root / f"step-0000000{number}").mkdir()
        (root / f"step-0000000{number}" / "mine.safetensors").write_bytes(b"somebody's")
    runtime, handle = trainer(folder)
    runtime.load_checkpoint(handle, root)
    assert differing(state(runtime, handle), then) == []
    step(runtime, handle)
    with pytest.raises(InputError, match="step-00000003: is in the way and no checkpoint"):
        runtime.save_checkpoint(handle, root)
    step(runtime, handle)
    assert runtime.save_checkpoint(handle, root, keep=1).name == "step-00000004"
    assert sorted(path.name for path in root.iterdir()) == ["step-00000003", "step-00000004", "step-00000007"]


def test_a_failed_resume_leaves_nothing_that_runs(folder, saved) -> None:
    runtime, handle = trainer(folder)
    damage(checkpoint.latest(saved[0]), "cut off")
    with pytest.raises(InputError):
        runtime.load_checkpoint(handle, saved[0])
    with pytest.raises(InputError, match="not whole"):
        step(runtime, handle)


def test_what_a_kill_left_half_written_is_not_taken_for_whole(folder, saved) -> None:
    root, _, later = saved
    (root / "step-00000003.partial").mkdir()
    (root / "step-00000003.partial" / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"half")
    runtime, handle = trainer(folder)
    runtime.load_checkpoint(handle, root)
    step(runtime, handle)
    runtime.save_checkpoint(handle, root)
    assert differing(state(runtime, handle), later) == []
    assert [path.name for path in sorted(root.iterdir())] == ["step-00000002", "step-00000003"]


# Kills.

KILLS, STEPS = 50, 400


def run(folder: Path, root: Path, log: Path) -> None:
    """Trains on from the latest checkpoint; a line a step: its number and the sum over its state."""
    runtime, handle = trainer(folder)
    torch.manual_seed(7)
    runtime.load_checkpoint(handle, root)
    while handle.weights.require() < STEPS:
        step(runtime, handle)
        digest = sum(float(t.double().sum()) for t in state(runtime, handle).values())
        with log.open("a") as file:
            file.write(f"{handle.weights.version} {digest!r}\n")
        runtime.save_checkpoint(handle, root, keep=2)


def written(log: Path) -> int:
    return log.read_text().count("\n") if log.exists() else 0


def forked(function, *arguments) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            function(*arguments)
        finally:
            os._exit(0)
    return pid


@pytest.mark.slow
def test_fifty_kills_at_random_moments_change_no_bit(folder, tmp_path) -> None:
    """Each run is killed after a random time, in a step or in the middle of saving; whatever it logged must be what a run without
    kills logs."""
    trainer(folder)  # the probe's findings and lazy imports are then there in every fork
    draw, log, root = random.Random(0), tmp_path / "log", tmp_path / "run"
    partial = 0
    for _ in range(KILLS):
        lines = written(log)
        pid = forked(run, folder, root, log)
        if draw.random() < 0.8:  # the others are killed while they start, at whatever speed this machine has
            while written(log) < lines + draw.choice((2, 3, 4)):
                time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        partial += any(path.name.endswith(checkpoint.PARTIAL) for path in root.glob("*"))
    lines = [line.split() for line in log.read_text().splitlines()]
    reached = max(int(number) for number, _ in lines)
    assert reached > KILLS // 2 and partial > 3, "runs came forward, and some were killed while they saved"
    straight: dict[str, str] = {}
    runtime, handle = trainer(folder)
    torch.manual_seed(7)
    for _ in range(reached):
        step(runtime, handle)
        straight[str(handle.weights.version)] = repr(sum(float(t.double().sum()) for t in state(runtime, handle).values()))
    assert all(straight[number] == digest for number, digest in lines)
    numbers = [int(number) for number, _ in lines]
    repeated = sum(b <= a for a, b in itertools.pairwise(numbers))
    assert repeated <= KILLS and all(b <= a + 1 for a, b in itertools.pairwise(numbers)), "no step was skipped"
