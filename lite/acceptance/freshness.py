"""Whether a receipt still shows what its gate claims: whole, of the same command, ended as expected, and of the sources as they are now.

    python -m lite.acceptance.freshness     # in a checkout: a line a gate
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lite.acceptance.gates import GATES, Gate
from lite.acceptance.receipt import changed_sources
from lite.errors import InputError

EVIDENCE = "evidence"


def lacks(gate: Gate, path: Path, checkout: Path) -> str:
    """What the receipt at path lacks to show the gate's claim for the sources in checkout; "" where it is fresh."""
    receipt = read_receipt(path)
    if receipt is None:
        return "the receipt is not whole" if path.exists() else "no receipt"
    try:
        if receipt["command"] != list(gate.command):
            return "made by another command"
        return _another_end(gate, receipt) or _changed_sources(receipt, checkout)
    except (KeyError, TypeError, AttributeError):  # JSON, but not a receipt's
        return "the receipt is not whole"


def read_receipt(path: Path) -> dict[str, Any] | None:
    """None where there is no whole one: no file, JSON that is cut off, or a run that did not come to its end (its closure comes last)."""
    try:
        receipt = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return receipt if isinstance(receipt, dict) and receipt.get("closure") else None


def _another_end(gate: Gate, receipt: dict[str, Any]) -> str:
    if receipt["status"] != gate.expected:
        return f"{receipt['status']}, not {gate.expected}: {receipt['reason']}"
    if not re.search(gate.reason, receipt["reason"]):
        return f"{gate.expected} for another reason: {receipt['reason']}"
    if receipt.get("plant") != gate.plant:
        return f"planted {receipt.get('plant')}, not {gate.plant}"
    policies = receipt.get("policies", [])
    if not all(policy[path]["valid_tokens"] for policy in policies for path in ("score", "actor")):
        return "a policy has no compared token"
    for path in ("score", "actor"):
        differing = [policy["policy"] for policy in policies if policy[path]["mismatch"] or policy[path]["nonfinite"]]
        if differing != list(gate.differs_at):
            return f"tokens differ at {', '.join(differing) or 'no policy'}, not at {', '.join(gate.differs_at) or 'none'} ({path})"
    if gate.rises is not None and (receipt["reward"].get("standard_errors") or 0.0) < gate.rises:
        return f"the reward does not rise by {gate.rises} standard errors: {receipt['reward']}"
    return ""


def _changed_sources(receipt: dict[str, Any], checkout: Path) -> str:
    changed = changed_sources(receipt["closure"], checkout)
    return f"{len(changed)} of {len(receipt['closure'])} sources changed, {changed[0]} first" if changed else ""


def evidence_lacks(gates: Iterable[Gate], checkout: Path) -> dict[str, str]:
    """`lacks` of each gate's receipt in evidence/, by the gate's name. InputError where there is no evidence/."""
    if not (checkout / EVIDENCE).is_dir():
        raise InputError(checkout, f"has no {EVIDENCE}/ and is no checkout", "run this in a checkout of the project")
    return {gate.name: lacks(gate, checkout / EVIDENCE / f"{gate.name}.json", checkout) for gate in gates}


def orphans(checkout: Path, gates: Iterable[Gate] = GATES) -> list[str]:
    """Receipts in evidence/ that belong to no gate."""
    known = {f"{gate.name}.json" for gate in gates}
    return sorted(path.name for path in (checkout / EVIDENCE).glob("*.json") if path.name not in known)


def listing(gates: Iterable[Gate], found: dict[str, str], lost: Iterable[str]) -> list[str]:
    """A line for each gate, by what its receipt lacks, and for each orphan."""
    return [
        *(f"stale   {g.name} ({found[g.name]}): {g.shows}" if found[g.name] else f"fresh   {g.name}: {g.shows}" for g in gates),
        *(f"orphan  {EVIDENCE}/{name}: no gate of that name" for name in lost),
    ]


if __name__ == "__main__":
    here = Path.cwd()
    state = evidence_lacks(GATES, here)
    print(*listing(GATES, state, orphans(here)), sep="\n")
    print(f"evidence: {sum(map(bool, state.values()))} of {len(state)} gates are stale; on a GPU `mlite gates --gpu --stale` runs those")
