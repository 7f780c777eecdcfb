"""Pairs, their ratios and their order; workers that answer, fail and die."""

import sys

import pytest

from benchmarks import rollout
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


@pytest.mark.skipif(rollout.report.guarded(lambda: 0, True) == 0, reason="a CUDA device is here")
def test_without_a_gpu_both_programs_exit_2_and_say_so(capsys, monkeypatch):
    from benchmarks import train_step

    monkeypatch.setattr(sys, "argv", ["x"])
    for program in (rollout, train_step):
        assert program.main([]) == 2
        assert capsys.readouterr().err.startswith("no CUDA device")
