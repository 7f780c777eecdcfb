"""When a receipt may say "pass": each rule is broken once."""

import copy

import pytest

from lite.acceptance.receipt import verdict


def path(grad: bool) -> dict:
    return {"requires_grad": grad, "dtype": "float32", "valid_tokens": 100, "mismatch": 0, "nonfinite": 0}


def good():
    policies = [{"policy": f"theta{k}", "score": path(False), "actor": path(True), "fingerprint": {"engine": str(k), "trainer": str(k)},
                 "collapsed_groups": 0}
                for k in range(3)]  # fmt: skip
    updates = [{"step": k, "grad_norm": 1.0, "master_update_norm": 0.1, "deployed_bytes_changed": 9, "nonzero_advantages": 4,
                "parameters_expected": 5, "parameters_with_grad": 5, "without_grad": {}}
               for k in (1, 2)]  # fmt: skip
    return policies, updates, [0.5, 0.3]


def test_the_unbroken_receipt_passes():
    assert verdict(*good(), random_weights=True, control_mismatch=7, stopped=None)[0] == "pass"


BREAKS = [
    ("fail", "differ", lambda p, u, r: p[2]["score"].update(mismatch=1)),
    ("fail", "differ", lambda p, u, r: p[0]["actor"].update(mismatch=1)),
    ("fail", "not finite", lambda p, u, r: p[1]["actor"].update(nonfinite=1)),
    ("fail", "bfloat16", lambda p, u, r: p[1]["actor"].update(dtype="bfloat16")),
    ("fail", "gradient", lambda p, u, r: p[1]["actor"].update(requires_grad=False)),
    ("fail", "gradient", lambda p, u, r: p[1]["score"].update(requires_grad=True)),
    ("fail", "different weights", lambda p, u, r: p[1]["fingerprint"].update(engine="0")),
    ("fail", "no gradient", lambda p, u, r: u[0].update(parameters_with_grad=4, without_grad={"lm_head.weight": None})),
    ("inconclusive", "distinct", lambda p, u, r: p[2].update(collapsed_groups=1)),
    ("inconclusive", "changed nothing", lambda p, u, r: u[1].update(deployed_bytes_changed=0)),
    ("inconclusive", "changed nothing", lambda p, u, r: u[1].update(master_update_norm=0.0)),
    ("inconclusive", "changed nothing", lambda p, u, r: u[1].update(nonzero_advantages=0)),
    ("inconclusive", "vacuous", lambda p, u, r: r.__setitem__(1, 0.019)),
]


@pytest.mark.parametrize(("status", "reason", "break_it"), BREAKS)
def test_each_broken_rule_is_named(status, reason, break_it):
    policies, updates, ratios = copy.deepcopy(good())
    break_it(policies, updates, ratios)
    found, why = verdict(policies, updates, ratios, random_weights=True, control_mismatch=7, stopped=None)
    assert found == status and reason in why


def test_a_run_that_stopped_early_is_inconclusive_unless_it_failed_before():
    policies, updates, ratios = good()
    why = "update 2: the gradient norm is nan"
    assert verdict(policies, updates, ratios, True, 7, why) == ("inconclusive", why)
    policies[0]["actor"]["nonfinite"] = 1
    assert verdict(policies, updates, ratios, True, 7, why)[0] == "fail"


def test_a_comparison_that_does_not_see_wrong_positions_proves_nothing():
    found, why = verdict(*good(), random_weights=False, control_mismatch=0, stopped=None)
    assert found == "inconclusive" and "vacuous" in why
