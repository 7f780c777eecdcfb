"""One process, verl's own data structures and losses, a tiny Qwen3: what the engine makes of a batch, and what it gives back."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import McoreOptimizerConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.losses import sft_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding
from verl_mlite.agreement import _groups
from verl_mlite.batches import pack
from verl_mlite.engine import SYNC, MliteEngine
from verl_mlite.engine_config import MliteEngineConfig

from lite.errors import InputError
from lite.primitive.compare import bits
from lite.runtime import routes
from lite.runtime.batch import PackedBatch
from lite.runtime.config import MegatronLiteConfig, RuntimeConfig
from lite.runtime.runtime import Runtime
from tests.checkpoints import checkpoint, make_samples

LENGTHS = [(4, 9), (1, 5), (12, 20), (7, 1), (3, 14), (2, 2)]


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Any:
    dist.init_process_group("gloo", f"file://{tmp_path_factory.mktemp('store')}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def engine(contents: tuple[str, ...] = ("model", "optimizer", "extra"), lora: int = 0, family: str = "qwen3", **config: Any) -> MliteEngine:
    model = SimpleNamespace(
        local_path=str(checkpoint(family, "fp32")), override_config={"attn_implementation": "sdpa"},
        mtp=SimpleNamespace(enable=False), get=lambda key, default=None: {"lora_rank": lora}.get(key, default),
    )  # fmt: skip
    made = MliteEngine(
        model,
        MliteEngineConfig(dtype="float32", **config),
        None if config.get("forward_only") else McoreOptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0),
        CheckpointConfig(save_contents=list(contents), load_contents=list(contents)),
    )
    made.initialize()
    return made


def samples() -> list[tuple[list[int], list[int]]]:
    return make_samples(LENGTHS)


def padded_batch(**tensors: torch.Tensor) -> TensorDict:
    """As an RL trainer has it: prompts padded on the left, responses on the right."""
    width, height = max(p for p, _ in LENGTHS), max(r for _, r in LENGTHS)
    left = [[0] * (width - len(p)) + p for p, _ in samples()]
    right = [r + [0] * (height - len(r)) for _, r in samples()]
    mask = [[0] * (width - p) + [1] * (p + r) + [0] * (height - r) for p, r in LENGTHS]
    attention = torch.tensor(mask)
    return TensorDict({
        "input_ids": torch.tensor([a + b for a, b in zip(left, right, strict=True)]), "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0), "prompts": torch.tensor(left), "responses": torch.tensor(right),
        "response_mask": attention[:, width:], **tensors,
    }, batch_size=len(LENGTHS))  # fmt: skip


def rl_batch(budget: int = 64, temperature: Any = 1.0, **tensors: torch.Tensor) -> TensorDict:
    data = left_right_2_no_padding(padded_batch(**tensors))
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=budget, calculate_entropy=True)
    if isinstance(temperature, torch.Tensor):
        data["temperature"] = temperature
    else:
        tu.assign_non_tensor(data, temperature=temperature)
    tu.assign_non_tensor_stack(data, "uid", ["a", "a", "b", "b", "c", "c"])
    return data


def sft_batch(budget: int = 64) -> TensorDict:
    jagged = lambda rows: torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
    data = TensorDict({
        "input_ids": jagged([p + r for p, r in samples()]), "loss_mask": jagged([[0] * p + [1] * r for p, r in LENGTHS]),
    }, batch_size=len(LENGTHS))  # fmt: skip
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=budget, temperature=1.0)
    return data


def direct(temperature: float = 1.0) -> list[torch.Tensor]:
    """Each response's logprobs by the Runtime alone."""
    runtime = Runtime(
        RuntimeConfig(checkpoint("qwen3", "fp32"), backend_cfg=MegatronLiteConfig(dtype="fp32", device="cpu", optimizer=None))
    )
    batch = PackedBatch.from_samples(samples(), temperature)
    scores = runtime.forward_backward(runtime.build_model(), batch, forward_only=True).log_probs[0][batch.loss_mask]
    return list(scores.split([r for _, r in LENGTHS]))


def responses(output: dict[str, Any], data: TensorDict, name: str = "log_probs") -> list[torch.Tensor]:
    """As the trainer slices them out of the model output."""
    rows = no_padding_2_padding(output["model_output"][name], data)
    return [row[:n] for row, (_, n) in zip(rows, LENGTHS, strict=True)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def test_a_packed_micro_batch_scores_the_rows_that_the_trainer_reads() -> None:
    batch, want = pack(rl_batch()), PackedBatch.from_samples(samples())
    for name in ("input_ids", "loss_mask"):
        assert torch.equal(getattr(batch, name), getattr(want, name))
    assert batch.seq_lens == want.seq_lens and torch.equal(batch.labels[batch.loss_mask], want.labels[want.loss_mask])
    assert torch.equal(pack(sft_batch()).loss_mask, want.loss_mask)


def test_scores_are_the_runtimes_in_any_packing() -> None:
    """verl#6280: two micro-batch budgets."""
    e = engine(forward_only=True)
    for budget in (36, 64, 1000):
        data = rl_batch(budget)
        with e.eval_mode():
            output = e.infer_batch(data)
        assert same(responses(output, data), direct())
        assert all((row > 0).all() for row in responses(output, data, "entropy"))


def test_each_sample_may_have_a_temperature_of_its_own() -> None:
    e, data = engine(forward_only=True), rl_batch(temperature=torch.tensor([0.5, 1.0, 0.5, 1.0, 0.5, 1.0]))
    cold, warm = direct(0.5), direct(1.0)
    assert same(responses(e.infer_batch(data), data), [cold[0], warm[1], cold[2], warm[3], cold[4], warm[5]])


def train(e: MliteEngine, steps: int, budget: int = 64) -> list[dict[str, Any]]:
    found = []
    for _ in range(steps):
        with e.train_mode():
            found.append(e.train_batch(sft_batch(budget), lambda **given: sft_loss(None, **given)))
            e.lr_scheduler_step()
    return found


def test_the_loss_is_a_mean_over_all_tokens_however_they_are_packed() -> None:
    """verl sums the micro-batches' losses."""
    tokens = sum(r for _, r in LENGTHS)
    want = -sum(float(row.sum()) for row in direct()) / tokens
    few, many = (train(engine(), 1, budget)[0] for budget in (1000, 33))
    assert len(few["loss"]) == 1 < len(many["loss"])
    assert sum(few["loss"]) == pytest.approx(want, rel=1e-5) and sum(many["loss"]) == pytest.approx(want, rel=1e-5)
    assert few["metrics"]["grad_norm"] == pytest.approx(many["metrics"]["grad_norm"], rel=1e-4)
    assert few["model_output"] == {}, "kept, they would fill the memory"


def test_counts_tell_a_single_differing_bit_and_a_collapsed_group() -> None:
    height = max(r for _, r in LENGTHS)
    rollout = torch.stack([torch.nn.functional.pad(row, (0, height - len(row))) for row in direct()])
    tokens = sum(r for _, r in LENGTHS)
    e = engine()
    e.get_per_tensor_param()
    for flip, mismatch in ((0, 0), (1, 1)):
        given = rollout.clone()
        given.view(torch.int32)[2, 5] ^= flip
        with e.eval_mode():
            e.infer_batch(rl_batch(rollout_log_probs=given))
        e.agreement.actor(e.infer_batch(rl_batch())["model_output"]["log_probs"], rl_batch(rollout_log_probs=given))
        counts = {name: value[0] for name, value in e.agreement.take().items()}
        assert (counts["mlite/old_mismatch"], counts["mlite/old_tokens"]) == (mismatch, tokens)
        assert (counts["mlite/actor_mismatch"], counts["mlite/actor_tokens"]) == (mismatch, tokens)
        assert (counts["mlite/groups"], counts["mlite/collapsed_groups"]) == (3, 0)
    jagged = torch.nested.as_nested_tensor([torch.tensor(row) for row in ([1, 2], [1, 2], [3], [4, 5], [6])], layout=torch.jagged)
    answers = TensorDict({"responses": jagged}, batch_size=5)
    tu.assign_non_tensor_stack(answers, "uid", ["a", "a", "b", "b", "alone"])
    assert _groups(answers) == (2, 1)


def test_a_checkpoint_resumes_with_the_bits_of_the_unbroken_run(tmp_path: Path) -> None:
    unbroken, broken = engine(), engine(("model", "optimizer", "extra", "hf_model"))
    want = train(unbroken, 3)
    train(broken, 2)
    broken.save_checkpoint(str(tmp_path / "global_step_2"), global_step=2)
    resumed = engine()
    resumed.load_checkpoint(str(tmp_path / "global_step_2"), del_local_after_load=False)
    assert train(resumed, 1)[0]["loss"] == want[2]["loss"]
    assert resumed.handle.weights.fingerprint() == unbroken.handle.weights.fingerprint()
    assert (tmp_path / "global_step_2" / "huggingface" / "config.json").exists()


def test_a_save_replaces_that_of_a_run_taken_up_before_it(tmp_path: Path) -> None:
    for _ in range(2):
        e = engine()
        train(e, 1)
        e.save_checkpoint(str(tmp_path / "global_step_1"), global_step=1)
    resumed = engine()
    resumed.load_checkpoint(str(tmp_path / "global_step_1"))
    assert resumed.handle.weights.fingerprint() == e.handle.weights.fingerprint()


def routed(records: list[torch.Tensor]) -> TensorDict:
    data = rl_batch()
    data["routed_experts"] = torch.nested.as_nested_tensor(records, layout=torch.jagged)
    return data


def test_recorded_routes_are_taken_and_must_be_there() -> None:
    """As verl hands them on: zeros in the row of a sequence's last token, and all over in a sample that only pads the batch."""
    live, replay = (engine(family="qwen3_moe", forward_only=True, router_replay_mode=mode) for mode in ("disabled", "R3"))
    data = rl_batch(1000)
    with routes.recording(live.handle.module) as chosen:
        want = responses(live.infer_batch(data), data)
    order = [i for part in prepare_micro_batches(rl_batch(1000))[1] for i in part]
    lengths = [p + r for p, r in LENGTHS]
    rows = routes.by_layer(chosen, live.handle.bundle.layers).clamp(min=0).int().split([lengths[i] for i in order])
    records = [rows[order.index(i)].clone() for i in range(len(LENGTHS))]
    for record in records:
        record[-1] = 0
    got = responses(replay.infer_batch(routed(records)), data)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(got, want, strict=True))

    other = [record.clone() for record in records]
    other[1][2] = (other[1][2] + 1) % live.handle.bundle.config.moe.experts
    changed = responses(replay.infer_batch(routed(other)), data)
    assert not torch.equal(changed[1], got[1]) and torch.equal(bits(changed[0]), bits(got[0]))

    padding = routed([torch.zeros_like(records[0]), *records[1:]])
    with pytest.raises(InputError, match="are not"):
        replay.infer_batch(padding)
    padding["response_mask"][0] = 0
    assert torch.equal(bits(responses(replay.infer_batch(padding), data)[1]), bits(got[1]))
    with pytest.raises(InputError, match="no routes"):
        replay.infer_batch(rl_batch())


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    e = engine()
    for step in range(3):
        train(e, 1)
        e.save_checkpoint(str(tmp_path / f"global_step_{step}"), global_step=step, max_ckpt_to_keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step_1", "global_step_2"]


def test_an_exact_sync_says_first_what_it_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    e = engine(forward_only=True)
    names = [name for name, _ in e.get_per_tensor_param(layered_summon=False, base_sync_done=True)[0]]
    assert SYNC not in names and names == [name for name, _ in e.runtime.export_weights(e.handle)]
    monkeypatch.setitem(os.environ, "MLITE_EXACT", "1")
    (first, facts), *rest = e.get_per_tensor_param()[0]
    said = json.loads(bytes(facts.tolist()))
    assert first == SYNC and [name for name, _ in rest] == names == [hf for hf, _, _ in said["rows"]]
    assert said["fingerprint"] == e.handle.weights.fingerprint() and said["version"] == 0


def test_what_is_not_built_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="adapters"):
        engine(lora=8)
    with pytest.raises(InputError, match=r"critic\.enable"):
        EngineRegistry.new("value_model", "mlite", model_config=None, engine_config=None, optimizer_config=None, checkpoint_config=None)
    for contents, said in ((("model",), "save_contents"), (("hf_model",), None)):
        e = engine(contents)
        if said:
            with pytest.raises(InputError, match=said):
                e.save_checkpoint(str(tmp_path / "x"))
        else:
            e.save_checkpoint(str(tmp_path / "x"))
            with pytest.raises(InputError, match="holds no checkpoint"):
                e.load_checkpoint(str(tmp_path / "x"))
    with pytest.raises(InputError, match="hdfs"):
        engine().save_checkpoint(str(tmp_path / "y"), hdfs_path="there")
    data = rl_batch()
    tu.assign_non_tensor(data, calculate_sum_pi_squared=True)
    with pytest.raises(InputError, match="sum_pi_squared"):
        engine(forward_only=True).infer_batch(data)
