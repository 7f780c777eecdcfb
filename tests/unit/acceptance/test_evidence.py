"""What the documents claim of the receipts in evidence/ is in them: enough tokens, every situation met, the failing ones failing."""

import json
from pathlib import Path

import pytest

EVIDENCE = Path(__file__).parents[3] / "evidence"
RECEIPTS = {path.stem: json.loads(path.read_text()) for path in sorted(EVIDENCE.glob("*.json"))}
PASSING = [name for name, r in RECEIPTS.items() if r["status"] == "pass" and "policies" in r]
LONGEST = {"llama": 8192, "qwen3": 9300 + 160, "qwen3_moe": 9300 + 160, "nemotron_h": 9300 + 160}  # prompt and response together
ENGINE_ALONE = {"nemotron_h": "mamba-inference"}  # a family's receipt of decode against prefill
SITUATIONS = ("chunked_prefills", "mixed_batches", "joins", "preemptions")


def family(name: str) -> list[dict]:
    return [RECEIPTS[receipt] for receipt in PASSING if RECEIPTS[receipt]["subject"]["family"] == name]


@pytest.mark.parametrize("name", PASSING)
def test_a_passing_receipt_compared_enough_tokens_on_both_paths(name: str) -> None:
    receipt = RECEIPTS[name]
    command = receipt["command"]
    updates = int(command[command.index("--updates") + 1]) if "--updates" in command else 2
    assert [p["policy"] for p in receipt["policies"]] == [f"theta{n}" for n in range(updates + 1)] and len(receipt["updates"]) == updates
    for path in ("score", "actor"):
        assert sum(p[path]["valid_tokens"] for p in receipt["policies"]) >= 20_000
        assert all(p[path]["mismatch"] == p[path]["nonfinite"] == 0 for p in receipt["policies"])
    for u in receipt["updates"]:  # whoever has no gradient is frozen, or an expert that no token chose
        assert u["deployed_bytes_changed"] > 0 and u["parameters_expected"] == u["parameters_with_grad"] + len(u["without_grad"])
        assert set(u["without_grad"].values()) <= {"frozen", "no token with a gradient chose this expert"}
    assert receipt["control"]["mismatch"] > 0, "the comparison could have failed"
    assert receipt["engine"]["plugin"] == "on" and receipt["engine"]["handshake"], "no handshake, no claim"


@pytest.mark.parametrize("name", LONGEST)
def test_a_familys_receipts_met_every_situation(name: str) -> None:
    lengths = [receipt["lengths"] for receipt in family(name)]
    assert min(length["prompt"][0] for length in lengths) == 1
    assert max(length["prompt"][1] + length["response"][1] for length in lengths) == LONGEST[name]
    assert max(length["rows_max_in_batch"] for length in lengths) > 256
    alone = RECEIPTS[ENGINE_ALONE[name]]["measurements"]["counters"] if name in ENGINE_ALONE else {}
    for situation in SITUATIONS:
        assert sum(length[situation] for length in lengths) + alone.get(situation, 0) > 0, situation
    assert {(r["engine"]["attention"], r["engine"]["graphs"]) for r in family("qwen3")} == {
        (attention, graphs) for attention in ("FLASH_ATTN", "TRITON_ATTN") for graphs in ("eager", "full_decode")
    }


def test_receipts_name_no_path_of_a_machine() -> None:
    for path in EVIDENCE.glob("*.json"):
        assert not any(root in path.read_text() for root in ('"/tmp', '"/root', '"/home', '"/work')), path


def test_logprobs_come_raw_and_processed() -> None:
    modes = {r["engine"]["handshake"][0]["logprobs_mode"] for name in LONGEST for r in family(name)}
    assert modes == {"raw_logprobs", "processed_logprobs"}
