"""Tasks and GRPO: rewards differ inside a group, a batch without an advantage is no update, a collapsed group is no pass."""

import json

import pytest
import torch

from lite.acceptance import prove as prove_module
from lite.acceptance.grpo import advantages, policy_loss
from lite.acceptance.scoring import distinct_samples
from lite.acceptance.sides import ProveConfig
from lite.acceptance.tasks import PromptFileTask, TokenSetTask
from lite.errors import InputError
from lite.runtime.rollout.embedded import EmbeddedEngine
from lite.runtime.rollout.engine import Trajectory


class Silent:
    def __init__(self):
        self.notes = []

    def phase(self, name, total): ...

    def overall(self, done, total): ...

    def advance(self, amount): ...

    def note(self, text):
        self.notes.append(text)


def trajectory(uid, sample, ids=(1, 2)):
    return Trajectory(uid, sample, (1,), tuple(ids), torch.zeros(len(ids)), 0)


def test_advantages_are_centred_and_scaled_inside_each_group():
    rows = [trajectory("a", 0), trajectory("a", 1), trajectory("b", 0), trajectory("b", 1)]
    found = advantages(rows, [1.0, 3.0, 5.0, 5.0])
    assert found[:2] == pytest.approx([-1, 1], abs=1e-5) and found[2:] == [0.0, 0.0]


def test_the_clipped_loss_matches_its_formula_and_stops_where_it_clips():
    old = torch.tensor([-1.0, -1.0, -1.0])
    new = torch.tensor([-1.0, -0.5, -1.5], requires_grad=True)
    advantage = torch.tensor([2.0, 1.0, -1.0])
    loss = policy_loss(new, old, advantage, tokens=3)
    assert loss.item() == pytest.approx(-(2.0 + 1.2 - 0.8) / 3, abs=1e-6)
    loss.backward()
    assert new.grad.tolist() == pytest.approx([-2 / 3, 0.0, 0.0])


def test_a_group_of_equal_samples_counts_as_collapsed():
    rows = [trajectory("a", 0, (1, 2)), trajectory("a", 1, (1, 2)), trajectory("b", 0, (1, 2)), trajectory("b", 1, (1, 3))]
    assert distinct_samples(rows) == (2, 1, 3)


def test_prompts_reach_both_ends_of_the_range_and_change_by_round():
    task = TokenSetTask(100, 5, (1, 9), seed=0)
    first, second = task.prompts(0), task.prompts(1)
    assert [len(p.ids) for p in first] == [1, 3, 5, 7, 9] and {p.uid for p in first}.isdisjoint(p.uid for p in second)
    assert [p.ids for p in first] == [p.ids for p in task.prompts(0)] != [p.ids for p in second]


def test_a_batch_without_advantage_is_logged_and_redrawn(tmp_path, monkeypatch):
    """The first round's rewards agree; its prompts must not train anything."""
    reward = TokenSetTask.reward
    monkeypatch.setattr(TokenSetTask, "reward", lambda self, uid, ids: 0.5 if uid.startswith("r0-") else reward(self, uid, ids))
    progress = Silent()
    config = ProveConfig(out=tmp_path / "run", proxy="llama", groups=2, samples=2, response_tokens=8, updates=1)
    receipt = prove_module.prove(config, ["test"], progress)
    assert receipt["status"] == "pass" and len(receipt["updates"]) == 1
    assert any("no advantage" in note for note in progress.notes)


def test_rewards_that_never_vary_end_inconclusive(tmp_path, monkeypatch):
    monkeypatch.setattr(TokenSetTask, "reward", lambda self, uid, ids: 1.0)
    config = ProveConfig(out=tmp_path / "run", proxy="llama", groups=2, samples=2, response_tokens=4, updates=1)
    receipt = prove_module.prove(config, ["test"], Silent())
    assert receipt["status"] == "inconclusive" and "no advantage" in receipt["reason"]


def test_a_collapsed_group_is_reported_and_not_passed(tmp_path, monkeypatch):
    """An engine that gives every sample of a group the same stream (verl#6857)."""
    monkeypatch.setattr("lite.runtime.rollout.embedded.request_seed", lambda seed, uid, sample: 7 if uid.endswith("-0") else 100 + sample)
    config = ProveConfig(out=tmp_path / "run", proxy="llama", groups=2, samples=2, response_tokens=6, updates=1)
    receipt = prove_module.prove(config, ["test"], Silent())
    assert receipt["status"] == "inconclusive" and receipt["updates"][0]["collapsed_groups"] == 1


def test_tiny_weights_are_called_vacuous(tmp_path, monkeypatch):
    """Weights of 1e-3 pass every comparison, right or wrong; the receipt must not."""
    from lite.acceptance import sides

    write = sides.write_proxy

    def dummy(*args, **kwargs):
        monkeypatch.setattr(torch, "randn", lambda *a, _randn=torch.randn, **k: 1e-3 * _randn(*a, **k))
        write(*args, **kwargs)
        monkeypatch.undo()

    monkeypatch.setattr(sides, "write_proxy", dummy)
    receipt = prove_module.prove(ProveConfig(out=tmp_path / "run", proxy="llama", groups=2, samples=2, updates=0), ["test"], Silent())
    assert receipt["status"] == "inconclusive" and "vacuous" in receipt["reason"]


def test_a_gradient_that_is_not_finite_stops_the_run_and_keeps_what_was_found(tmp_path, monkeypatch):
    from lite.acceptance import scoring

    monkeypatch.setattr(scoring, "policy_loss", lambda own, *rest: own.sum() * float("nan"))
    receipt = prove_module.prove(ProveConfig(out=tmp_path / "run", proxy="llama", groups=2, samples=2, updates=1), ["test"], Silent())
    assert receipt["status"] == "inconclusive" and "gradient norm is nan" in receipt["reason"]
    assert receipt["policies"][0]["score"]["mismatch"] == 0 and (tmp_path / "run" / "rollout" / "theta0.safetensors").exists()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"uid": "a", "prompt_ids": ["x"], "reasoning_gym": {"dataset": "d", "entry": {}}}',
                                  '{"uid": "a", "prompt_ids": [], "reasoning_gym": {"dataset": "d", "entry": {}}}'])  # fmt: skip
def test_a_bad_prompt_line_is_named_by_file_and_line(text, tmp_path):
    good = json.dumps({"uid": "g", "prompt_ids": [1], "reasoning_gym": {"dataset": "d", "entry": {"answer": "1"}}})
    (tmp_path / "p.jsonl").write_text(f"{good}\n{text}\n")
    with pytest.raises(InputError, match=r"p\.jsonl:2"):
        PromptFileTask(tmp_path / "p.jsonl", tmp_path, 1, ())


def test_the_engine_is_not_the_trainer(tmp_path, monkeypatch):
    """Two models, so that a sync that copies nothing cannot pass."""
    seen = {}
    update = EmbeddedEngine.update_weights

    def spy(self, tensors, version):
        tensors = list(tensors)
        own = {p.data_ptr() for p in self.weights.parameters.values()}
        seen["shared"] = any(t.data_ptr() in own for _, t in tensors)
        update(self, iter(tensors), version)

    monkeypatch.setattr(EmbeddedEngine, "update_weights", spy)
    prove_module.prove(ProveConfig(out=tmp_path / "run", proxy="llama", groups=2, samples=2, updates=1), ["test"], Silent())
    assert seen == {"shared": False}
