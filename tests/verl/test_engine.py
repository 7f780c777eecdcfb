"""One process, verl's own data structures and losses, a tiny Qwen3: what the engine makes of a batch, and what it gives back."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.losses import ppo_loss, sft_loss
from verl.workers.utils.padding import no_padding_2_padding
from verl_mlite.agreement import _groups
from verl_mlite.batches import pack
from verl_mlite.engine import SYNC, MliteEngine

from lite.errors import InputError
from lite.primitive.ckpt.hf_weights import deployed, fingerprint
from lite.primitive.compare import bits
from lite.runtime import routes
from lite.runtime.batch import PackedBatch
from tests.checkpoints import checkpoint
from tests.gradients import assert_gradient
from tests.unit.model.test_against_transformers import GRADIENT_LIMIT, our_gradients, their_model
from tests.verl_engine import LENGTHS, direct, engine, responses, rl_batch, same, samples, sft_batch, train

pytestmark = pytest.mark.usefixtures("group")


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
        assert same(responses(output, data, "entropy"), direct(name="entropy"))


def test_each_sample_may_have_a_temperature_of_its_own() -> None:
    e, data = engine(forward_only=True), rl_batch(temperature=torch.tensor([0.5, 1.0, 0.5, 1.0, 0.5, 1.0]))
    cold, warm = direct(0.5), direct(1.0)
    assert same(responses(e.infer_batch(data), data), [cold[0], warm[1], cold[2], warm[3], cold[4], warm[5]])


def test_the_loss_is_a_mean_over_all_tokens_however_they_are_packed() -> None:
    """verl sums the micro-batches' losses."""
    tokens = sum(r for _, r in LENGTHS)
    want = -sum(float(row.sum()) for row in direct()) / tokens
    few, many = (train(engine(), 1, budget)[0] for budget in (1000, 33))
    assert len(few["loss"]) == 1 < len(many["loss"])
    assert sum(few["loss"]) == pytest.approx(want, rel=1e-5) and sum(many["loss"]) == pytest.approx(want, rel=1e-5)
    assert few["metrics"]["grad_norm"] == pytest.approx(many["metrics"]["grad_norm"], rel=1e-4)
    assert few["model_output"] == {}, "kept, they would fill the memory"


def gradients(e: MliteEngine, data: TensorDict, loss: Callable) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """-> what the engine returns, and the gradients by the checkpoint's names."""
    e.optimizer_zero_grad()
    tu.assign_non_tensor(data, return_model_output=True)
    output = e.forward_backward_batch(data, loss)
    return output, our_gradients(e.handle)


def test_verls_loss_with_entropy_in_it_has_the_gradient_that_transformers_has() -> None:
    """At a ratio of 1; every token's advantage is another one, of either sign."""
    mask = torch.tensor([[1.0] * n + [0.0] * (max(r for _, r in LENGTHS) - n) for _, n in LENGTHS])
    advantages, old = torch.randn(mask.shape) * mask, torch.zeros(mask.shape)
    old[mask.bool()] = torch.cat(direct())
    data = rl_batch(36, old_log_probs=old, advantages=advantages)
    tu.assign_non_tensor(data, global_batch_size=len(LENGTHS))
    actor = ActorConfig(strategy="mlite", rollout_n=1, use_dynamic_bsz=True, entropy_coeff=0.5)
    output, ours = gradients(engine(), data, lambda **given: ppo_loss(actor, **given))
    assert len(output["loss"]) > 1 and same(responses(output, data, "entropy"), direct(name="entropy"))

    model, want = their_model(checkpoint("qwen3", "fp32")), torch.zeros(())
    for (prompt, response), advantage in zip(samples(), advantages, strict=True):
        log_p = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logprob, entropy = log_p.gather(1, torch.tensor(response)[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        ratio = (logprob - logprob.detach()).exp()
        want = want - (advantage[: len(response)] * ratio + 0.5 * entropy).sum() / mask.sum()
    want.backward()
    assert sum(output["loss"]) == pytest.approx(want.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert_gradient(ours[name], parameter.grad, GRADIENT_LIMIT, name)


def test_micro_batches_of_a_fixed_size_give_what_those_of_a_token_budget_do() -> None:
    e, budget, fixed = engine(), sft_batch(33), sft_batch()
    fixed.pop("max_token_len_per_gpu")
    tu.assign_non_tensor(fixed, use_dynamic_bsz=False, micro_batch_size_per_gpu=3)
    (want, theirs), (got, ours) = (gradients(e, data, lambda **given: sft_loss(None, **given)) for data in (budget, fixed))
    assert len(got["loss"]) == len(LENGTHS) // 3 < len(want["loss"])
    assert sum(got["loss"]) == pytest.approx(sum(want["loss"]), rel=1e-6)
    assert same(*(list(output["model_output"]["log_probs"].unbind()) for output in (got, want)))
    for name, gradient in theirs.items():
        assert_gradient(ours[name], gradient, GRADIENT_LIMIT, name)
    scored = rl_batch()
    scored.pop("max_token_len_per_gpu")
    tu.assign_non_tensor(scored, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    assert same(responses(e.infer_batch(scored), scored), direct())


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


def test_counts_of_several_passes_add_up_until_they_are_taken() -> None:
    """One pass that differs is not hidden by the next, which agrees."""
    e, data = engine(), rl_batch()
    with e.eval_mode():
        scores = e.infer_batch(data)["model_output"]["log_probs"]
    right = no_padding_2_padding(scores, data)
    for found in (right + 1, right):
        e.agreement.score(scores, rl_batch(rollout_log_probs=found))
    tokens = sum(n for _, n in LENGTHS)
    counts = e.agreement.take()
    assert (counts["mlite/old_mismatch"], counts["mlite/old_tokens"]) == ([tokens], [2 * tokens]) and not e.agreement.take()


@pytest.mark.parametrize("part", ["actor", "."])
def test_a_damaged_checkpoint_names_the_step_before_it(tmp_path: Path, part: str) -> None:
    e = engine()
    for step in (8, 9, 10):
        train(e, 1)
        e.save_checkpoint(str(tmp_path / f"global_step_{step}" / part), global_step=step)
    (shard,) = (tmp_path / "global_step_10" / part).glob("step-*/*.safetensors")
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(InputError, match=f"go on by trainer.resume_mode=resume_path trainer.resume_from_path={tmp_path}/global_step_9$"):
        engine().load_checkpoint(str(tmp_path / "global_step_10" / part))
    shutil.rmtree(tmp_path / "global_step_8")
    shutil.rmtree(tmp_path / "global_step_9")
    with pytest.raises(InputError, match="start again"):
        engine().load_checkpoint(str(tmp_path / "global_step_10" / part))


def test_a_checkpoint_resumes_with_the_bits_of_the_unbroken_run(tmp_path: Path) -> None:
    unbroken, broken = engine(), engine()
    want = train(unbroken, 3)
    train(broken, 2)
    broken.save_checkpoint(str(tmp_path / "global_step_2"), global_step=2)
    resumed = engine()
    resumed.load_checkpoint(str(tmp_path / "global_step_2"), del_local_after_load=False)
    assert train(resumed, 1)[0]["loss"] == want[2]["loss"]
    assert resumed.handle.weights.fingerprint() == unbroken.handle.weights.fingerprint()


@pytest.mark.parametrize("contents", [("hf_model",), ("model", "optimizer", "extra", "hf_model")])
def test_a_saved_hf_model_is_a_whole_checkpoint_of_the_trained_policy(policy: Any, tmp_path: Path, contents: tuple[str, ...]) -> None:
    source, folder = policy("qwen3", "float32"), tmp_path / "global_step_1" / "huggingface"
    e = engine(contents, folder=source)
    before = e.handle.weights.fingerprint()
    train(e, 1)
    e.save_checkpoint(str(folder.parent), global_step=1)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")  # nothing but the folder says what they are
    assert fingerprint(deployed(theirs.state_dict().items())) == e.handle.weights.fingerprint() != before
    config = lambda path: json.loads((path / "config.json").read_text())
    assert config(folder) == config(source) | {"dtype": "float32"} and config(folder)["vocab_size"]
    beside = [file for file in source.iterdir() if file.name != "config.json" and file.suffix != ".safetensors"]
    assert {"tokenizer.json", "tokenizer_config.json"} <= {file.name for file in beside}
    assert all((folder / file.name).read_bytes() == file.read_bytes() for file in beside)


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
    moe = checkpoint("qwen3_moe", "fp32")
    live, replay = (engine(folder=moe, forward_only=True, router_replay_mode=mode) for mode in ("disabled", "R3"))
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
    with pytest.raises(InputError, match=r"critic\.enable"):
        EngineRegistry.new("value_model", "mlite", model_config=None, engine_config=None, optimizer_config=None, checkpoint_config=None)
    with pytest.raises(InputError, match=r"checkpoint\.save_contents: holds \['model'\]; name all of"):
        engine(("model",))
    e = engine(("hf_model",))
    e.save_checkpoint(str(tmp_path / "x"))
    with pytest.raises(InputError, match="holds no checkpoint"):
        e.load_checkpoint(str(tmp_path / "x"))
    with pytest.raises(InputError, match="hdfs"):
        engine().save_checkpoint(str(tmp_path / "y"), hdfs_path="there")
    data = rl_batch()
    tu.assign_non_tensor(data, calculate_sum_pi_squared=True)
    with pytest.raises(InputError, match="sum_pi_squared"):
        engine(forward_only=True).infer_batch(data)
