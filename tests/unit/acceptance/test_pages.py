"""The counts in README's table, in docs/recipes.md and in docs/vllm.md are those of the receipts in evidence/."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parents[3]
RECEIPTS = {path.stem: json.loads(path.read_text()) for path in sorted((CHECKOUT / "evidence").glob("*.json"))}
# tests of kernels and of state, and two planted errors: they count no rollout's tokens
NOT_IN_THE_TABLE = {
    "engine-sync", "fsdp", "kernels", "mamba-kernels", "mamba-upstream", "route-replay", "smollm2-one-ulp", "smollm2-stale",
}  # fmt: skip
VERL = {"verl-smollm2": "SmolLM2-135M, offloaded", "verl-qwen3": "Qwen3-8B's layers", "verl-nemotron-h": "Nemotron-3-Nano's layers",
        "verl-baseline": "baseline: verl's fsdp2 engine"}  # fmt: skip


def table(page: str, header: str) -> list[list[str]]:
    """-> the cells of each row of the page's table whose header line begins so."""
    lines = (CHECKOUT / page).read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(header))
    end = next(n for n in range(start, len(lines)) if not lines[n].startswith("|"))
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines[start + 2 : end]]


def receipts(cell: str) -> list[str]:
    """"`a-flash-eager`, `-graphs`" names a-flash-eager and a-flash-graphs."""
    names = re.findall(r"`(.+?)`", cell)
    return [names[0].rsplit("-", 1)[0] + name if name.startswith("-") else name for name in names]


def measured(name: str, end: str) -> Any:
    return next(value for what, value in RECEIPTS[name]["measurements"].items() if what.endswith(end))


def flat(counts: list) -> list[int]:
    return [n for count in counts for n in flat(count)] if isinstance(counts, list) else [counts]


def compared(name: str) -> set[tuple[int, int]]:
    """-> tokens compared over all policies, and how many of them differ: of each path."""
    receipt = RECEIPTS[name]
    if "policies" in receipt:
        paths = [[policy[path] for policy in receipt["policies"]] for path in ("score", "actor")]
        return {(sum(p["valid_tokens"] for p in path), sum(p["mismatch"] for p in path)) for path in paths}
    if name.endswith("-inference"):
        twice = [receipt["measurements"][f"decode_against_{other}"] for other in ("prefill", "pieces")]
        return {(result["valid_tokens"], result["mismatch"]) for result in twice}
    if name == "fsdp-engine":
        return {(measured(name, "valid tokens on each path"), sum(flat(measured(name, "mismatch of each rank, policy and path"))))}
    if name == "verl-baseline":
        steps = measured(name, "mismatch of tokens")
        return {(int(sum(tokens for _, tokens in steps)), int(sum(mismatch for mismatch, _ in steps)))}
    assert receipt["status"] == "pass"  # the test behind it asserts each step's counts to be 0
    return {(int(sum(measured(name, ": tokens"))), 0)}


@pytest.mark.parametrize("name", ["qwen3-flash-graphs", "qwen3-triton-graphs"])
def test_rollouts_without_vllms_extras_are_those_beside_them(name: str) -> None:
    without = json.loads((CHECKOUT / "evidence/without_extras" / f"{name}.json").read_text())
    extras = {"flashinfer-python", "nvidia-cutlass-dsl", "quack-kernels", "humming-kernels"}
    assert extras <= RECEIPTS[name]["environment"]["packages"].keys() and not extras & without["environment"]["packages"].keys()
    digests, others = ([policy["rollout_sha256"] for policy in receipt["policies"]] for receipt in (RECEIPTS[name], without))
    assert digests == others and len(set(digests)) == 3
    assert without["status"] == "pass"


ROWS = [(row, name) for row in table("README.md", "| model | attention") for name in receipts(row[-1])]


@pytest.mark.parametrize(("row", "name"), ROWS, ids=[name for _, name in ROWS])
def test_a_row_of_the_readme_has_its_receipts_counts(row: list[str], name: str) -> None:
    if RECEIPTS[name]["status"] == "inconclusive":
        assert "refused by the probe" in row
    else:
        assert {(row[-3].split()[0].strip(","), row[-2].strip("*"))} == {(f"{a:,}", f"{b:,}") for a, b in compared(name)}


def test_the_readme_has_a_row_of_every_receipt_that_counts_tokens() -> None:
    assert {name for _, name in ROWS} == RECEIPTS.keys() - NOT_IN_THE_TABLE


@pytest.mark.parametrize("name", VERL)
def test_a_row_of_the_recipes_has_the_receipts_steps(name: str) -> None:
    row = next(row for row in table("docs/recipes.md", "| model | tokens a step") if row[0].startswith(VERL[name]))
    if name == "verl-baseline":
        steps = measured(name, "mismatch of tokens")
        tokens, differing, seconds = [t for _, t in steps], "all of them", f"(step) {measured(name, 'seconds of a step')[-1]:.1f}"
        assert all(mismatch == tokens for mismatch, tokens in steps)
    else:
        third = [phase[-1] for phase in measured(name, ": seconds").values()]
        tokens, differing, seconds = measured(name, ": tokens"), "0", ", ".join(f"{t:.1f}" for t in third)
    assert row[1] == (f"{tokens[0]:,.0f} each" if len(set(tokens)) == 1 else ", ".join(f"{t:,.0f}" for t in tokens))
    assert (row[2], row[4]) == (differing, seconds)


def test_the_page_on_vllm_says_what_its_own_mode_leaves() -> None:
    ((tokens, mismatch),) = compared("qwen3-flash-plugin-off")
    assert f"{mismatch:,} of {tokens:,} tokens" in (CHECKOUT / "docs/vllm.md").read_text()
