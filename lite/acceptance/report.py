"""report.md: the receipt for people."""

from pathlib import Path
from typing import Any

from lite.acceptance.plots import gone


def write_report(out: Path, receipt: dict[str, Any], plots: list[str]) -> None:
    lines = _lines(receipt, plots)
    if names := gone(out, receipt):
        lines += ["", f"In no plot, since their rollout or their scores are gone: {', '.join(names)}."]
    (out / "report.md").write_text("\n".join(lines) + "\n")


def _lines(r: dict[str, Any], plots: list[str]) -> list[str]:
    s, e, length = r["subject"], r["engine"], r["lengths"]
    lines = [
        f"# {r['status'].upper()}: {r['reason']}",
        "",
        f"`{' '.join(r['command'])}`" + (f", planted error: **{r['plant']}**" if r["plant"] else ""),
        "",
        f"- Model: {s['family']}, {s['layers']} layers, {s['parameters']:,} parameters, {s['weights']} weights, {s['dtype']}",
        f"- Engine: {e['name']}, {r['kernels']['set']} kernels, attention {e['attention']}, graphs {e['graphs']}, page {e['page']}",
        f"- Device: {r['environment']['device']}, {r['environment']['threads']} threads, torch {r['environment']['torch']}",
        f"- Prompts {length['prompt'][0]} to {length['prompt'][1]} tokens, responses {length['response'][0]} to {length['response'][1]}; "
        f"{length['sequences']} sequences, at most {length['rows_max_in_batch']} rows a step, "
        f"{length['chunked_prefills']} chunked prefills, {length['mixed_batches']} mixed batches, {length['joins']} joins, "
        f"{length['preemptions']} preemptions",
        f"- Reward: {r['task']}",
        f"- Each mixer's output is {min(s['mixer_to_residual_rms']):.3f} to {max(s['mixer_to_residual_rms']):.3f} of the residual's rms",
        "",
        "## Logprobs, compared by bytes",
        "",
        "| policy | path | valid tokens | mismatch | not finite | largest difference |",
        "|---|---|---|---|---|---|",
    ]
    for p in r["policies"]:
        for path, what in (("score", "score (no grad)"), ("actor", "actor (grad)")):
            v = p[path]
            lines.append(f"| {p['policy']} | {what} | {v['valid_tokens']} | {v['mismatch']} | {v['nonfinite']} | {v['max_abs']} |")
    lines += [f"| | first mismatch | `{first}` | | | |" for first in _first_mismatches(r)[:1]]
    lines += [
        "",
        "## Updates",
        "",
        "| step | loss | gradient norm | master update norm | deployed bytes changed | non-zero advantages "
        "| groups (collapsed, without advantage) | distinct samples | parameters with gradient |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for u in r["updates"]:
        lines.append(
            f"| {u['step']} | {u['loss']:.4g} | {u['grad_norm']:.4g} | {u['master_update_norm']:.4g} | {u['deployed_bytes_changed']:,} "
            f"| {u['nonzero_advantages']} of {u['samples']} | {u['groups']} ({u['collapsed_groups']}, {u['zero_advantage_groups']}) "
            f"| {u['distinct_samples']} | {u['parameters_with_grad']} of {u['parameters_expected']}"
            + (f" ({len(u['without_grad'])} frozen or of {u['idle_experts']} experts without a token)" if u["without_grad"] else "")
            + " |"
        )
    probes = r["kernels"]["probes"]
    reported = [p for p in probes if not p["ok"]]
    lines += ["", "## Probes", "", f"{len(probes)} checks of the kernels' promises on this device, {len(reported)} not kept."]
    lines += [f"- {p['kernel']} {p['check']} at {p['shape']}: first differing row {p['first_row']}" for p in reported]
    if (trend := r["reward"])["policies"]:
        change = "no spread" if trend["standard_errors"] is None else f"{trend['standard_errors']:+.1f} standard errors"
        ends = f"Mean of the first {trend['policies']} policies {trend['first']:.4f}, of the last {trend['last']:.4f}: {change}."
        lines += ["", "## Reward", "", ends]
    total = sum(r["seconds"].values())
    shares = (f"| {phase} | {seconds:.1f} | {seconds / total:.0%} |" for phase, seconds in r["seconds"].items())
    lines += ["", "## Seconds", "", "| phase, over all policies | seconds | share |", "|---|---|---|", *shares]
    lines += ["", *(f"![{plot}]({plot})" for plot in plots)] if plots else ["", "No plots: matplotlib is not installed."]
    return lines


def _first_mismatches(r: dict[str, Any]) -> list[dict[str, Any]]:
    return [p[path]["first_mismatch"] for p in r["policies"] for path in ("score", "actor") if p[path]["first_mismatch"]]
