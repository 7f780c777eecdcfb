"""What verl's own configurations say, and that the engine does it: the optimizer, where state rests, determinism, recomputation."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import pytest
from verl.trainer.config import CheckpointConfig
from verl.workers.config import HFModelConfig, McoreOptimizerConfig
from verl.workers.config.model import MtpConfig
from verl.workers.engine import base
from verl_mlite import engine as subject
from verl_mlite.configs import optimizer_config
from verl_mlite.engine import MliteEngine

from lite.errors import InputError
from lite.runtime.config import OptimizerConfig
from lite.runtime.runtime import Runtime
from tests.checkpoints import checkpoint
from tests.verl_engine import engine, rl_batch, train

pytestmark = pytest.mark.usefixtures("group")

GIVEN: dict[str, Any] = {
    "lr": 3e-4, "min_lr": 2e-5, "weight_decay": 0.07, "clip_grad": 0.3, "betas": (0.8, 0.95), "lr_warmup_init": 1e-6, "lr_warmup_steps": 5,
    "lr_decay_steps": 30, "lr_decay_style": "cosine", "lr_warmup_steps_ratio": 0.5, "total_training_steps": 40,
}  # fmt: skip
WANTED = OptimizerConfig(
    lr=3e-4, min_lr=2e-5, weight_decay=0.07, clip_grad=0.3, adam_beta1=0.8, adam_beta2=0.95, lr_warmup_init=1e-6, lr_warmup_steps=5,
    lr_decay_steps=30, lr_decay_style="cosine",
)  # fmt: skip


def test_each_of_verls_optimizer_keys_reaches_the_runtime() -> None:
    assert engine(optim=McoreOptimizerConfig(**GIVEN)).runtime.config.backend_cfg.optimizer == WANTED
    defaults = {f.name for f in fields(OptimizerConfig) if getattr(WANTED, f.name) == f.default}
    assert defaults == {"optimizer", "adam_eps"}, "a key at its default shows nothing; verl has no eps, and adam is the only optimizer"
    with pytest.raises(InputError, match=r"OptimizerConfig\.optimizer: 'sgd'"):
        optimizer_config(McoreOptimizerConfig(optimizer="sgd"))


@pytest.mark.parametrize(
    ("given", "warmup", "decay"),
    [
        ({"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.25, "total_training_steps": 40}, 10, 40),
        ({"lr_warmup_steps": None, "lr_warmup_steps_ratio": 0.25, "total_training_steps": 40}, 10, 40),
        ({"lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.25, "lr_decay_steps": 20, "total_training_steps": 40}, 5, 20),
        ({"lr_warmup_steps": 3, "lr_warmup_steps_ratio": 0.25, "total_training_steps": 40}, 3, 40),
        ({"lr_decay_steps": 30, "total_training_steps": 40}, 0, 30),
        ({"lr_warmup_steps_ratio": 0.25}, 0, None),  # verl has not counted the steps
    ],
)
def test_warmup_may_be_a_share_of_the_decay_and_that_ends_with_the_steps(given: dict[str, Any], warmup: int, decay: int | None) -> None:
    got = optimizer_config(McoreOptimizerConfig(**given))
    assert (got.lr_warmup_steps, got.lr_decay_steps) == (warmup, decay)


GPU = "gpu"
Move = tuple[str, bool, bool, bool]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[Move]:
    """What the Runtime was asked to move, in order: (where, model, optimizer, gradients). Nothing goes to a GPU, which is not there."""
    made: list[Move] = []
    honest = Runtime.to

    def to(runtime: Runtime, handle: Any, device: str, *, model: bool, optimizer: bool, grad: bool) -> None:
        if model or optimizer or grad:
            made.append((device, model, optimizer, grad))
        if device != GPU:
            honest(runtime, handle, device, model=model, optimizer=optimizer, grad=grad)

    monkeypatch.setattr(Runtime, "to", to)
    return made


def taken(moves: list[Move]) -> list[Move]:
    found = moves.copy()
    moves.clear()
    return found


def moved(made: Iterable[Move]) -> list[Move]:
    return [move for move in made if any(move[1:])]


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("params", [False, True])
def test_what_is_offloaded_rests_on_the_cpu_and_visits_the_gpu(
    moves: list[Move], monkeypatch: pytest.MonkeyPatch, params: bool, moments: bool
) -> None:
    e = engine(param_offload=params, optimizer_offload=moments)
    assert taken(moves) == moved([("cpu", params, moments, params)])
    assert (e.handle.optimizer.home is not None) is moments, "moments come into being where they rest"
    for module in (base, subject):
        monkeypatch.setattr(module, "get_device_name", lambda: GPU)
    train(e, 1)
    assert taken(moves) == moved([(GPU, params, moments, params), ("cpu", params, moments, params)])
    with e.eval_mode():
        e.infer_batch(rl_batch())
    assert taken(moves) == moved([(GPU, params, False, False), ("cpu", params, False, False)])
    e.get_per_tensor_param()
    assert taken(moves) == moved([(GPU, params, False, False)])


def test_a_reference_offloads_its_parameters_and_has_no_moments(moves: list[Move]) -> None:
    engine(forward_only=True, optimizer_offload=True)
    assert taken(moves) == []
    engine(forward_only=True, optimizer_offload=True, param_offload=True)
    assert taken(moves) == [("cpu", True, False, True)]


def test_full_determinism_is_verls_own_under_the_engines_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(subject, "enable_full_determinism", seeds.append)
    engine(forward_only=True, seed=7)
    assert seeds == []
    engine(forward_only=True, seed=7, full_determinism=True)
    assert seeds == [7]


def test_recompute_runs_each_layer_twice_and_changes_no_bit() -> None:
    trained = {}
    for recompute in (None, "full"):
        e, runs = engine(impl_cfg={"recompute": recompute}), []
        layers = e.handle.module.layers
        for i, layer in enumerate(layers):
            layer.mixer.register_forward_hook(lambda *_, i=i, runs=runs: runs.append(i))
        train(e, 1, budget=1000)  # one micro-batch
        trained[recompute] = sorted(runs), e.handle.weights.fingerprint()
    once, twice = trained[None], trained["full"]
    assert once[0] == list(range(len(layers))) and twice[0] == sorted(once[0] * 2) and once[1] == twice[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lora_rank": 8}, r"model\.lora: adapters"),
        ({"lora": {"rank": 8}}, r"model\.lora: adapters"),
        ({"lora_adapter_path": "/adapter"}, r"model\.lora: adapters"),
        ({"mtp": MtpConfig(enable=True)}, r"model\.mtp\.enable: "),
    ],
)
def test_the_engine_itself_refuses_what_it_would_train_otherwise(change: dict[str, Any], said: str) -> None:
    """Preflight is not run by everyone."""
    common = {"path": str(checkpoint("qwen3", "fp32")), "load_tokenizer": False, "override_config": {"attn_implementation": "sdpa"}}
    MliteEngine(HFModelConfig(**common), None, None, CheckpointConfig())
    with pytest.raises(InputError, match=said):
        MliteEngine(HFModelConfig(**common | change), None, None, CheckpointConfig())
