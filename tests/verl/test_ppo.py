"""verl's `main_ppo`, both trainers of it, with the embedded engine as its rollout: GRPO on tiny policies."""

import pytest

from tests.verl_runs import Metrics, train_ppo

GROUPS = 4
DIFFERENCES = {
    "training/rollout_probs_diff_max", "actor/mlite/old_mismatch", "actor/mlite/actor_mismatch", "actor/ppo_kl", "actor/pg_clipfrac",
}  # fmt: skip
SAMPLES = 16  # of a step
REPLAY = """
actor_rollout_ref.actor.engine.router_replay_mode=R3 actor_rollout_ref.rollout.enable_rollout_routing_replay=True
actor_rollout_ref.rollout.moe_load_balance_metrics_interval=1 +actor_rollout_ref.model.override_config.num_experts_per_tok=1
"""


def assert_not_vacuous(step: Metrics) -> None:
    """Equal logprobs say something where there are tokens, weights that move, and advantages: samples of a group that differ."""
    assert step["training/rollout_probs_diff_valid"] == 1
    assert step["actor/mlite/old_tokens"] == step["actor/mlite/actor_tokens"] > 0
    assert (step["actor/mlite/groups"], step["actor/mlite/collapsed_groups"]) == (GROUPS, 0)
    assert step["actor/grad_norm"] > 0
    assert step["actor/mlite/deployed_bytes_changed"] > 0


@pytest.mark.parametrize(
    ("trainer", "family", "dtype", "ranks"),
    [("v0", "qwen3", "bfloat16", 1), ("v1", "qwen3", "float32", 2), ("v0", "nemotron_h", "bfloat16", 1)],
)
def test_every_logprob_is_the_rollouts_after_every_update(data, policy, trainer, family, dtype, ranks):
    steps = train_ppo(data, policy(family, dtype), dtype, f"trainer.use_v1={trainer == 'v1'}", ranks=ranks)
    assert len(steps) == 3
    for step in steps:
        assert {name: step[name] for name in DIFFERENCES} == dict.fromkeys(DIFFERENCES, 0)
        assert_not_vacuous(step)
    assert len({step["actor/mlite/synced_fingerprint"] for step in steps}) == 3  # each batch was sampled from another policy
    assert all(step["actor/mlite/rollout_fingerprint"] == step["actor/mlite/synced_fingerprint"] for step in steps)
    assert all(step["actor/mlite/handshake"] == 1 for step in steps)


def test_weights_that_were_not_synced_are_found_by_both_counts(data, policy):
    """Not in exact mode, which ends such a run: no rollout answers for the policy (test_worker.py)."""
    fresh, stale = train_ppo(
        data, policy("qwen3", "float32"), "float32", "trainer.use_v1=False", steps=2, MLITE_TEST_SKIP_SYNC_AFTER="0", MLITE_EXACT="0"
    )  # fmt: skip
    assert (fresh["actor/mlite/old_mismatch"], fresh["actor/mlite/actor_mismatch"]) == (0, 0)
    for step in (fresh, stale):
        assert_not_vacuous(step)
    tokens = stale["actor/mlite/old_tokens"]
    assert stale["actor/mlite/old_mismatch"] > 0.9 * tokens
    assert stale["actor/mlite/actor_mismatch"] > 0.9 * tokens
    assert stale["training/rollout_probs_diff_max"] > 1e-3


def test_the_trainer_takes_the_rollouts_routes_and_ends_where_there_are_none(data, policy):
    """With one expert a token its weight is 1, in a replay as in the kernel; of several, a replay rounds the weights by itself. The third
    step's records name other experts: they are taken, and so were those before. The fourth has none."""
    *own, other = train_ppo(
        data, policy("qwen3_moe", "float32"), "float32", "trainer.use_v1=True", *REPLAY.split(), steps=4,
        ends="engine.router_replay_mode: R3, and the batch has no routes;", MLITE_TEST_RECORDS="own own other none",
    )  # fmt: skip
    assert len(own) == 2
    for step in own:
        assert {name: step[name] for name in DIFFERENCES} == dict.fromkeys(DIFFERENCES, 0)
    for step in (*own, other):
        assert_not_vacuous(step)
        fed = step["actor/mlite/old_tokens"] - SAMPLES  # an engine does not run the last token of a response
        assert step["rollout/moe/routed_expert_assignments"] == 2 * fed  # a column for each of two layers, the dense one, too
    for path in ("old", "actor"):
        assert other[f"actor/mlite/{path}_mismatch"] > 0.9 * other[f"actor/mlite/{path}_tokens"]
