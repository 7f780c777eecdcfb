"""verl's SFT trainer on this engine and on verl's own FSDP2 engine: the same checkpoint, the same data, float32."""

import pytest

from tests.verl_runs import Metrics, train_sft

MLITE = ["engine=mlite", "optim=megatron", "engine.dtype=float32"]
# verl's engines are registered for cuda only; FSDP2's needs nothing of it.
FSDP2 = ["engine.strategy=fsdp2", "engine.use_torch_compile=False", "+engine.mixed_precision={param_dtype:fp32,reduce_dtype:fp32}"]
ON_CPU = {"VERL_ENGINE_DEVICE": "cuda"}


def assert_same_training(ours: list[Metrics], theirs: list[Metrics]) -> None:
    """Two steps: the second one's loss depends on the first one's update."""
    assert len(ours) == len(theirs) == 2
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["train/global_tokens"] == other["train/global_tokens"]
    assert ours[0]["train/loss"] == pytest.approx(theirs[0]["train/loss"], rel=1e-5)
    assert ours[0]["train/grad_norm"] == pytest.approx(theirs[0]["train/grad_norm"], rel=1e-3)
    assert ours[1]["train/loss"] == pytest.approx(theirs[1]["train/loss"], rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_and_gradients_are_those_of_verls_own_engine(data, policy, ranks):
    model = policy("qwen3", "float32")
    ours = train_sft(data, model, *MLITE, ranks=ranks, steps=2)
    assert_same_training(ours, train_sft(data, model, *FSDP2, ranks=ranks, steps=2, **ON_CPU))


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(data, policy, tmp_path):
    """Two ranks, and a learning rate that moves: the schedule is resumed, too."""

    def train(folder: str, *overrides: str) -> list[list[float]]:
        common = [*MLITE, f"trainer.default_local_dir={tmp_path}/{folder}", "optim.lr_decay_style=cosine", "optim.lr_decay_steps=6"]
        steps = train_sft(data, policy("qwen3", "float32"), *common, *overrides, ranks=2, steps=4)
        return [[step["train/loss"], step["train/grad_norm"], step["train/lr"]] for step in steps]

    whole = train("whole", "trainer.save_freq=2")
    resumed = train("resumed", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/whole/global_step_2")
    assert resumed == whole[2:]
    assert len({rate for _, _, rate in whole}) == 4
