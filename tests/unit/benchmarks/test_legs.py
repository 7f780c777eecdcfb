"""Pairs, their ratios and their order; workers that answer, fail and die."""

import json
import sys

import pytest

from benchmarks import report, rollout
from benchmarks.legs import Arm, LegError, median, pair_orders, ratio

FAKE = "tests.unit.benchmarks.fake_worker"
SPEC = {"vocab_size": 50, "step_tokens": 64}


def leg(pair, arm, seconds):
    return {"pair": pair, "arm": arm, "seconds": seconds}


def test_pairs_alternate():
    assert pair_orders("A", "B", 3) == [("A", "B"), ("B", "A"), ("A", "B")]


def test_the_ratio_is_the_median_of_the_pairs_whatever_the_order_of_legs():
    legs = [leg(0, "A", 2.0), leg(0, "B", 1.0), leg(1, "B", 2.0), leg(1, "A", 6.0), leg(2, "A", 8.0), leg(2, "B", 8.0)]
    assert ratio(legs, "A", "B", "seconds") == {"median": 2.0, "pairs": [2.0, 3.0, 1.0]}
    assert median(legs, "A", "seconds") == 6.0


def test_planted_swapped_arms_turn_the_ratio_over():
    legs = [leg(pair, arm, seconds) for pair in range(3) for arm, seconds in (("A", 4.0), ("B", 1.0))]
    swapped = [leg(x["pair"], {"A": "B", "B": "A"}[x["arm"]], x["seconds"]) for x in legs]
    assert ratio(legs, "A", "B", "seconds")["median"] == 4.0
    assert ratio(swapped, "A", "B", "seconds")["median"] == 0.25


def test_a_pair_that_lacks_a_leg_gives_no_ratio():
    legs = [leg(0, "A", 2.0), {"pair": 0, "arm": "B", "error": "out of memory"}]
    assert ratio(legs, "A", "B", "seconds") == {"median": None, "pairs": []}


@pytest.fixture
def arm(tmp_path):
    started = []

    def start(**spec):
        started.append(Arm("stock", FAKE, SPEC | {"arm": "stock", "token_seconds": 1e-4} | spec, tmp_path / "log"))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_a_worker_answers_and_survives_a_failed_leg(arm):
    worker = arm(token_seconds=0.02)  # what a busy machine adds to a leg is less than the difference
    assert worker.reply(30)["handshake"] == []
    with pytest.raises(LegError, match="stock: RuntimeError: out of memory") as failed:
        worker.ask(do="fail")
    assert not failed.value.dead
    found = worker.ask(do="leg", concurrency=2, length=8, output=5, seed=1)
    assert found["generated"] == 10 and found["tokens_per_second"] == pytest.approx(10 / found["seconds"])
    assert found["decode_tokens_per_second"] == pytest.approx(8 / (found["seconds"] - found["prefill_seconds"]))
    assert "chatter" in worker.log.read_text()


def test_a_worker_that_cannot_be_built_says_why_in_one_line_and_then_is_dead(arm):
    worker = arm(broken=True)
    with pytest.raises(LegError, match="stock: ValueError: no such engine"):
        worker.reply(30)
    with pytest.raises(LegError, match=r"died: .*log: ") as failed:
        worker.reply(30)
    assert failed.value.dead


def run_rollout(tmp_path, spec, *flags):
    args = rollout._arguments(["--out", str(tmp_path / "r.json"), "--input", "64", "--output", "32", "--concurrency", "1", "2", *flags])
    times, result = {"exact": 4e-4, "stock": 2e-4}, rollout.new_result(args)
    with report.Progress(args.out) as progress:
        arms = {
            name: Arm(name, FAKE, SPEC | {"arm": name, "token_seconds": times[name]} | spec.get(name, {}), progress.log(name))
            for name in rollout.ARMS
        }
        rollout.measure(args, arms, result, progress)
    return json.loads(args.out.read_text())


def test_rollout_reports_what_was_planted(tmp_path):
    pytest.importorskip("matplotlib")
    found = run_rollout(tmp_path, {})
    assert found["finished"] and found["complete"] and found["options_that_differ"] == {"async_scheduling": {"exact": False, "stock": True}}
    assert [(x["arm"], x["pair"]) for x in found["legs"] if x["concurrency"] == 2] == [
        ("exact", 0), ("stock", 0), ("stock", 1), ("exact", 1), ("exact", 2), ("stock", 2),
    ]  # fmt: skip
    row = found["summary"][1]
    assert row["concurrency"] == 2 and 0.4 < row["ratio"]["median"] < 0.85 and len(row["ratio"]["pairs"]) == 3
    assert (tmp_path / "r.png").stat().st_size > 1000


def test_rollout_claims_nothing_where_sizes_differ(tmp_path):
    with pytest.raises(LegError, match="max_num_seqs"):
        run_rollout(tmp_path, {"stock": {"options": {"max_num_seqs": 1}}})


def test_time_that_is_used_up_ends_the_run_with_a_result(tmp_path):
    found = run_rollout(tmp_path, {}, "--minutes", "0")
    assert found["finished"] and not found["complete"] and found["legs"] == []


@pytest.mark.skipif(rollout.report.guarded(lambda: 0, True) == 0, reason="a CUDA device is here")
def test_without_a_gpu_both_programs_exit_2_and_say_so(capsys, monkeypatch):
    from benchmarks import train_step

    monkeypatch.setattr(sys, "argv", ["x"])
    for program in (rollout, train_step):
        assert program.main([]) == 2
        assert capsys.readouterr().err.startswith("no CUDA device")
