"""The tables of docs/speed.md are those of the results in evidence/benchmarks/."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parents[3]
RESULTS = {path.stem: json.loads(path.read_text()) for path in sorted((CHECKOUT / "evidence/benchmarks").glob("*.json"))}
PAGE = (CHECKOUT / "docs/speed.md").read_text().splitlines()


def each(ratio: dict[str, Any]) -> str:
    return " ".join(f"{value:.2f}" for value in ratio["pairs"])


def rollout_row(row: dict[str, Any]) -> str:
    other, exact = row[row["against"]]["tokens_per_second"], row["exact"]["tokens_per_second"]
    ratios = f"{row['ratio']['median']:.2f} | {each(row['ratio'])} | {row['decode_ratio']['median']:.2f}"
    return f"| {row['concurrency']} | {row['against']} | {other:,.0f} | {exact:,.0f} | {ratios} |"


def step_row(row: dict[str, Any]) -> str:
    base, time = row[row["base"]], f"{row['time']['median']:.2f} | {each(row['time'])} | {row['memory']['median']:.2f}"
    if row["base"] == "exact":
        speed = f"{base['tokens_per_second']:,.0f} | {base['tflops']:.0f} | {base['of_limit']:.0%}"
        return f"| {row['tokens']:,} | {row['against']} | {time} | {speed} |"
    other = row[row["against"]]
    return f"| {row['against']} | {time} | {other['tokens_per_second']:,.0f} | {other['peak_bytes'] / 1e9:.1f} |"


def measured(row: dict[str, Any]) -> bool:
    """Whether a pair of this row fitted into --minutes."""
    return bool(row["time" if "time" in row else "ratio"]["pairs"])


@pytest.mark.parametrize("name", [name for name, result in RESULTS.items() if "summary" in result])
def test_a_table_on_the_page_has_the_results_rows_in_order(name: str) -> None:
    result = RESULTS[name]
    rows = [{"rollout": rollout_row, "train_step": step_row}[result["benchmark"]](row) for row in result["summary"] if measured(row)]
    assert rows and result["finished"] and (not result["complete"] or len(rows) == len(result["summary"]))
    starts = [n for n in range(len(PAGE)) if PAGE[n : n + len(rows)] == rows]
    assert len(starts) == 1, rows
    start = starts[0]
    assert PAGE[start - 1].startswith("|---") and not PAGE[start + len(rows)].startswith("|"), "the table has other rows, too"


def test_every_table_and_commit_on_the_page_is_of_a_result() -> None:
    part = PAGE[PAGE.index("## Measured") : PAGE.index("## How it is measured")]
    assert sum(line.startswith("|---") for line in part) == sum("summary" in result for result in RESULTS.values()) > 0
    commits = {result["environment"]["git"]["commit"][:7] for result in RESULTS.values()}
    assert set(re.findall(r"\b[0-9a-f]{7}\b", "\n".join(part))) == commits


def test_results_are_of_a_commit_and_name_no_path_of_a_machine() -> None:
    for name, result in RESULTS.items():
        assert result["environment"]["git"]["commit"] and not result["environment"]["git"]["dirty"], name
        assert not any(root in json.dumps(result) for root in ('"/tmp', '"/root', '"/home', '"/work')), name
