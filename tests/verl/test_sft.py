"""verl's SFT trainer on this engine and on verl's own FSDP2 engine: the same checkpoint, the same data, float32."""

import pytest

from tests.verl_runs import Metrics, train_sft

MLITE = ["engine=mlite", "optim=megatron", "engine.dtype=float32"]
# verl's engines are registered for cuda only; FSDP2's needs nothing of it.
FSDP2 = ["engine.strategy=fsdp2", "engine.use_torch_compile=False", "+engine.mixed_precision={param_dtype:fp32,reduce_dtype:fp32}"]
ANYWHERE = {"VERL_ENGINE_DEVICE": "cuda"}


@pytest.fixture(scope="module")
def sharded(data, policy, tmp_path_factory):
    """Two ranks, four steps, a rate that moves, a checkpoint after the second step. -> what trains on, the folder, the metrics."""
    folder = tmp_path_factory.mktemp("sharded")
    schedule = ["optim.lr_decay_style=cosine", "optim.lr_decay_steps=6"]

    def train(*overrides: str) -> list[Metrics]:
        where = f"trainer.default_local_dir={folder}"
        return train_sft(data, policy("qwen3", "float32"), *MLITE, *schedule, where, *overrides, ranks=2, steps=4)

    return train, folder, train("trainer.save_freq=2")


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_and_gradients_are_those_of_verls_own_engine(data, policy, sharded, ranks):
    model = policy("qwen3", "float32")
    ours = sharded[2] if ranks == 2 else train_sft(data, model, *MLITE, steps=2)
    theirs = train_sft(data, model, *FSDP2, ranks=ranks, steps=2, **ANYWHERE)
    assert len(theirs) == 2
    assert ours[0]["train/loss"] == pytest.approx(theirs[0]["train/loss"], rel=1e-5)
    assert ours[0]["train/grad_norm"] == pytest.approx(theirs[0]["train/grad_norm"], rel=1e-3)
    assert ours[1]["train/loss"] == pytest.approx(theirs[1]["train/loss"], rel=1e-4)  # after the first step, at the same rate
    assert ours[1]["train/loss"] < 0.9 * ours[0]["train/loss"]


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(sharded):
    """In the same folder, so that its last checkpoint takes the place of the one that is there."""
    train, folder, whole = sharded
    resumed = train("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/global_step_2")
    figures = lambda steps: [[step["train/loss"], step["train/grad_norm"], step["train/lr"]] for step in steps]
    assert figures(resumed) == figures(whole[2:])
    assert len({step["train/lr"] for step in whole}) == 4
