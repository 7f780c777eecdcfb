"""Rollout speed: exact against stock vLLM and, for a model with Mamba layers, against the same engine with vLLM's own decode of them
(`bi_ssu`). All are alive on one GPU, one works at a time.

    python -m benchmarks.rollout --out runs/rollout.json
    python -m benchmarks.rollout --family nemotron_h --layers 7 --out runs/rollout_hybrid.json
    python -m benchmarks.rollout --profile --concurrency 32 --out runs/rollout_profile.json
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import report
from benchmarks.legs import Arm, Leg, LegError, environment, median, pair_orders, ratio, write_proxy_apart
from benchmarks.profiles import comparison, comparison_table
from lite.errors import InputError
from lite.model.registry import family
from lite.runtime.rollout.vllm_cache import cache_bytes

OTHERS = ("stock", "bi_ssu")
NOT_IN_BI_SSU = {"ExactMambaMixer2"}  # what its worker leaves out of the plugin
SIZES = {"max_model_len", "max_num_batched_tokens", "max_num_seqs", "kv_cache_memory_bytes", "gpu_memory_utilization"}


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    return report.guarded(lambda: _draw(args.draw) if args.draw else run(args), needs_cuda=not args.draw)


def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch, report.Progress(args.out) as progress:
        folder = (args.model or Path(scratch) / "proxy").resolve()  # workers run elsewhere
        if args.model is None:
            family(args.family)
            progress.say(f"writing a {args.family} proxy of {args.layers} layers")
            write_proxy_apart(args.family, folder, geometry=args.geometry, layers=args.layers, dtype="bfloat16", seed=args.seed)
        config = report.model_config(folder)
        args.against = opponents(args.against, config)
        result, spec = new_result(args), engine_spec(args, folder, config)
        arms = {
            name: Arm(name, "benchmarks.rollout_worker", spec | {"arm": name}, progress.log(name), arm_environment(name, args.profile))
            for name in ("exact", *args.against)
        }
        measure(args, arms, result, progress)
    return 0 if result["finished"] and (args.profile or result["legs"]) else 1


def opponents(asked: list[str] | None, config: Any) -> list[str]:
    """The arms that exact is paired with; asked None: all that the model has."""
    if asked and "bi_ssu" in asked and config.mamba is None:
        raise InputError("--against", "bi_ssu for a model without Mamba layers", "leave it out: it would be the exact arm")
    return asked or list(OTHERS if config.mamba else OTHERS[:1])


def new_result(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "benchmark": "rollout", "environment": environment(sys.argv), "arguments": report.plain(args), "finished": False,
        "definitions": {
            "tokens_per_second": "generated tokens over the whole leg, prefill included",
            "decode_tokens_per_second": "generated tokens less one a request, over the leg less a leg that generates a single token",
            "ratio": "exact / other within each pair, median over pairs; below 1 where exact is slower",
        },
        "legs": [],
    }  # fmt: skip


def engine_spec(args: argparse.Namespace, folder: Path, config: Any) -> dict[str, Any]:
    """The sizes of all engines."""
    sequences, length = max(args.concurrency), args.input + args.output
    return {
        "folder": str(folder), "attention": args.attention, "vocab_size": config.vocab_size, "sequences": sequences,
        "step_tokens": args.step_tokens, "max_model_len": length, "cache_bytes": cache_bytes(config, sequences, length),
        "hybrid": config.mamba is not None,
    }  # fmt: skip


def arm_environment(name: str, in_process: bool) -> dict[str, str | None]:
    """Set before the worker starts, so before it imports vllm. Only a profile takes an arm's engine process away."""
    common: dict[str, str | None] = {
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else None,
    }  # fmt: skip
    inherited = (
        "VLLM_BATCH_INVARIANT", "MLITE_EXACT", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_FLASHINFER_SAMPLER", "CUBLAS_WORKSPACE_CONFIG",
    )  # fmt: skip
    plugin = {} if name == "stock" else {"VLLM_BATCH_INVARIANT": "1", "MLITE_EXACT": "1"}
    return common | dict.fromkeys(inherited) | plugin


def measure(args: argparse.Namespace, arms: dict[str, Arm], result: dict[str, Any], progress: report.Progress) -> None:
    """Waits for the arms, runs legs or profiles, ends the arms. arms: exact and those of args.against."""
    try:
        progress.say(f"starting {', '.join(arms)}")
        result["arms"] = {name: arm.reply(args.start_timeout) for name, arm in arms.items()}
        sides = {name: result["arms"][name]["options"] for name in arms}
        result["options_that_differ"] = {
            key: {name: side[key] for name, side in sides.items()}
            for key in sides["exact"]
            if any(side[key] != sides["exact"][key] for side in sides.values())
        }
        report.write(args.out, result)
        if problem := _unclaimed(result):
            raise LegError(f"nothing is claimed: {problem}", dead=True)
        (_profile if args.profile else _legs)(args, arms, result, progress)
    finally:
        for arm in arms.values():
            arm.close()


def _unclaimed(result: dict[str, Any]) -> str:
    """Why these arms do not show what they are named for; "" where they do."""
    if unequal := SIZES & set(result["options_that_differ"]):
        return f"{sorted(unequal)} differ"
    if not result["arms"]["exact"]["handshake"]:
        return "no handshake from the plugin"
    replaced = {name: set(arm["options"]["replaced"]) for name, arm in result["arms"].items()}
    expected = {"exact": replaced["exact"], "bi_ssu": replaced["exact"] - NOT_IN_BI_SSU, "stock": set()}
    wrong = [f"{name} runs {sorted(found)} of the plugin" for name, found in replaced.items() if found != expected[name]]
    return "; ".join(wrong)


def _legs(args: argparse.Namespace, arms: dict[str, Arm], result: dict[str, Any], progress: report.Progress) -> None:
    for concurrency in args.concurrency:
        for name, arm in arms.items():
            arm.ask(do="leg", concurrency=concurrency, length=max(1, args.input // 8), output=min(32, args.output), seed=concurrency)
            progress.say(f"warmed up {name} at {concurrency}")
    plan = [
        (concurrency, other, pair, order)
        for pair in range(args.pairs)
        for concurrency in args.concurrency
        for other in args.against
        for order in [pair_orders("exact", other, args.pairs)[pair]]
    ]
    last: dict[tuple[int, str], float] = {}
    result |= {"complete": True, "summary": summarise([], args.concurrency, args.against)}
    for concurrency, other, pair, order in progress.over(plan, "pairs"):
        if progress.elapsed() + last.get((concurrency, other), 0.0) > args.minutes * 60:
            progress.say(f"pair {pair} at {concurrency} against {other} would pass {args.minutes:g} minutes; left out")
            result["complete"] = False
            continue
        before = progress.elapsed()
        for position, name in enumerate(order):
            leg: Leg = {"concurrency": concurrency, "against": other, "pair": pair, "position": position, "arm": name}
            seed = 1_000_000 * (args.seed + 1) + 10_000 * pair + 5_000 * args.against.index(other) + concurrency
            leg |= arms[name].ask(do="leg", concurrency=concurrency, length=args.input, output=args.output, seed=seed)
            progress.say(f"concurrency {concurrency}, pair {pair}, {name}: {leg['tokens_per_second']:.0f} tok/s in {leg['seconds']:.1f} s")
            result["legs"].append(leg)
            result["summary"] = summarise(result["legs"], args.concurrency, args.against)
            report.write(args.out, result)
        last[concurrency, other] = progress.elapsed() - before
    result["finished"] = True
    report.write(args.out, result)
    report.show(_table(result["summary"]))
    draw(args.out, result["summary"])


def summarise(legs: list[Leg], concurrencies: list[int], others: list[str]) -> list[dict[str, Any]]:
    """A row a concurrency and opponent: exact / other within each pair, below 1 where exact is slower."""
    rows = []
    for concurrency in concurrencies:
        for other in others:
            own = [leg for leg in legs if leg["concurrency"] == concurrency and leg["against"] == other]
            values = ("tokens_per_second", "decode_tokens_per_second")
            rows.append({
                "concurrency": concurrency, "against": other,
                **{name: {value: median(own, name, value) for value in values} for name in ("exact", other)},
                "ratio": ratio(own, "exact", other, "tokens_per_second"),
                "decode_ratio": ratio(own, "exact", other, "decode_tokens_per_second"),
            })  # fmt: skip
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="generated tok/s; exact / other is the median of the pairs (below 1: exact is slower)", title_justify="left")
    ratios = ("exact / other", "each pair", "decode only")
    for column in ("concurrency", "against", "other", "exact", *ratios, "other decode", "exact decode"):
        table.add_column(column, justify="right")
    for row in rows:
        other, exact = row[row["against"]], row["exact"]
        table.add_row(
            str(row["concurrency"]), row["against"],
            *(report.number(side["tokens_per_second"], ",.0f") for side in (other, exact)),
            report.number(row["ratio"]["median"], ".3f"), " ".join(f"{value:.3f}" for value in row["ratio"]["pairs"]),
            report.number(row["decode_ratio"]["median"], ".3f"),
            *(report.number(side["decode_tokens_per_second"], ",.0f") for side in (other, exact)),
        )  # fmt: skip
    return table


def _profile(args: argparse.Namespace, arms: dict[str, Arm], result: dict[str, Any], progress: report.Progress) -> None:
    """At the first concurrency: one prefill, and steps that only decode."""
    concurrency = args.concurrency[0]
    result["profile"] = {"concurrency": concurrency, "arms": {}}
    for name, arm in progress.over(list(arms.items()), "profiles"):
        result["profile"]["arms"][name] = arm.ask(do="profile", concurrency=concurrency, length=args.input, steps=args.steps, seed=7)
        report.write(args.out, result)
    found = result["profile"]["arms"]
    result["profile"]["against"] = {other: {} for other in args.against}
    for other in args.against:
        for window in ("prefill", "decode"):
            sides = {name: found[name][window] for name in ("exact", other)}
            result["profile"]["against"][other][window] = comparison(sides["exact"], sides[other])
            title = f"prefill of {args.input} tokens" if window == "prefill" else f"decode at concurrency {concurrency}"
            report.show(comparison_table(title, "exact", other, sides))
    result["finished"] = True
    report.write(args.out, result)


def _draw(file: Path) -> int:
    draw(file, report.summary_of(file, "rollout"))
    return 0


def draw(out: Path, rows: list[dict[str, Any]]) -> None:
    """tok/s of each pair's arms, and their ratio, by concurrency and opponent, beside the JSON."""

    def paint(axes: list[Any]) -> None:
        labels, places = [f"{row['concurrency']}\n{row['against']}" for row in rows], range(len(rows))
        for shift, label, color in ((-0.2, "other", "#bbbbbb"), (0.2, "exact", "#4477aa")):
            sides = [row["exact" if label == "exact" else row["against"]] for row in rows]
            axes[0].bar([x + shift for x in places], [side["tokens_per_second"] or 0 for side in sides], 0.4, label=label, color=color)
        axes[0].set_ylabel("generated tok/s")
        axes[0].legend(frameon=False)
        for other in dict.fromkeys(row["against"] for row in rows):
            own = [(x, row["ratio"]["median"]) for x, row in enumerate(rows) if row["against"] == other]
            axes[1].plot(*zip(*own, strict=True), "o-", label=f"exact / {other}")
        for x, row in enumerate(rows):
            axes[1].plot([x] * len(row["ratio"]["pairs"]), row["ratio"]["pairs"], "k.", ms=4)
        axes[1].axhline(1, color="0.5", lw=0.8)
        axes[1].set_ylim(bottom=0)
        axes[1].set_ylabel("exact / other, each pair and median")
        axes[1].legend(frameon=False)
        for axis in axes:
            axis.set_xticks(list(places), labels)
            axis.set_xlabel("concurrency, against")

    report.figure(out, 2, paint)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.rollout", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.common_arguments(parser, "runs/rollout.json")
    parser.add_argument("--input", type=report.positive, default=8192, help="prompt tokens (8192)")
    parser.add_argument("--output", type=report.positive, default=1024, help="generated tokens (1024)")
    parser.add_argument(
        "--concurrency", type=report.positive, nargs="+", action=report.Distinct, default=[1, 8, 32, 64], help="at once (1 8 32 64)"
    )
    parser.add_argument("--step-tokens", type=report.positive, default=8192, help="max_num_batched_tokens of all arms (8192)")
    parser.add_argument("--against", nargs="+", action=report.Distinct, choices=OTHERS, help="all that the model has, where not given")
    parser.add_argument("--attention", choices=("FLASH_ATTN", "TRITON_ATTN"), default="FLASH_ATTN", help="of the exact arm and bi_ssu")
    parser.add_argument("--steps", type=report.positive, default=20, help="decode steps in the profile's window (20)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
