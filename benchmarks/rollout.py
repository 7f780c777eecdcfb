"""Rollout speed: exact against stock vLLM, both alive on one GPU, one working at a time.

    python -m benchmarks.rollout --out runs/rollout.json
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
from lite.model.registry import family

ARMS = ("exact", "stock")
SIZES = {"max_model_len", "max_num_batched_tokens", "max_num_seqs", "kv_cache_memory_bytes", "gpu_memory_utilization"}


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    return report.guarded(lambda: _draw(args.draw) if args.draw else run(args), needs_cuda=not args.draw)


def run(args: argparse.Namespace) -> int:
    result = new_result(args)
    with tempfile.TemporaryDirectory() as scratch, report.Progress(args.out) as progress:
        folder = (args.model or Path(scratch) / "proxy").resolve()  # workers run elsewhere
        if args.model is None:
            family(args.family)
            progress.say(f"writing a {args.family} proxy of {args.layers} layers")
            write_proxy_apart(args.family, folder, geometry=args.geometry, layers=args.layers, dtype="bfloat16", seed=args.seed)
        spec = engine_spec(args, folder, report.model_config(folder))
        arms = {
            name: Arm(name, "benchmarks.rollout_worker", spec | {"arm": name}, progress.log(name), arm_environment(name, args.profile))
            for name in ARMS
        }
        measure(args, arms, result, progress)
    return 0 if result["finished"] else 1


def new_result(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "benchmark": "rollout", "environment": environment(sys.argv), "arguments": report.plain(args), "finished": False,
        "definitions": {
            "tokens_per_second": "generated tokens over the whole leg, prefill included",
            "decode_tokens_per_second": "generated tokens less one a request, over the leg less a leg that generates a single token",
            "ratio": "exact / stock within each pair, median over pairs; below 1 where exact is slower",
        },
        "legs": [],
    }  # fmt: skip


def engine_spec(args: argparse.Namespace, folder: Path, config: Any) -> dict[str, Any]:
    """The sizes of both engines. The cache holds every request to its end, with a tenth to spare, so neither arm preempts."""
    sequences, length = max(args.concurrency), args.input + args.output
    bytes_a_token = 2 * 2 * config.layers * config.kv_heads * config.head_dim  # keys and values in bf16
    return {
        "folder": str(folder), "attention": args.attention, "vocab_size": config.vocab_size, "sequences": sequences,
        "step_tokens": args.step_tokens, "max_model_len": length, "cache_bytes": int(1.1 * sequences * (length + 64) * bytes_a_token),
    }  # fmt: skip


def arm_environment(name: str, in_process: bool) -> dict[str, str | None]:
    """Set before the worker starts, so before it imports vllm. Only a profile takes stock's engine process away from it."""
    common: dict[str, str | None] = {
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else None,
    }  # fmt: skip
    inherited = (
        "VLLM_BATCH_INVARIANT", "MLITE_EXACT", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_FLASHINFER_SAMPLER", "CUBLAS_WORKSPACE_CONFIG",
    )  # fmt: skip
    exact = {"VLLM_BATCH_INVARIANT": "1", "MLITE_EXACT": "1"} if name == "exact" else {}
    return common | dict.fromkeys(inherited) | exact


def measure(args: argparse.Namespace, arms: dict[str, Arm], result: dict[str, Any], progress: report.Progress) -> None:
    """Waits for the arms, runs legs or profiles, ends the arms. arms: by the names in ARMS."""
    try:
        progress.say(f"starting {', '.join(arms)}")
        result["arms"] = {name: arm.reply(args.start_timeout) for name, arm in arms.items()}
        sides = {name: result["arms"][name]["options"] for name in ARMS}
        result["options_that_differ"] = {
            key: {name: sides[name][key] for name in ARMS} for key in sides["stock"] if sides["stock"][key] != sides["exact"][key]
        }
        unequal = SIZES & set(result["options_that_differ"])
        if unequal or not result["arms"]["exact"]["handshake"]:
            result["finished"] = False
            report.write(args.out, result)
            raise LegError(f"nothing is claimed: {sorted(unequal) or 'no handshake from the plugin'}", dead=True)
        report.write(args.out, result)
        (_profile if args.profile else _legs)(args, arms, result, progress)
    finally:
        for arm in arms.values():
            arm.close()


def _legs(args: argparse.Namespace, arms: dict[str, Arm], result: dict[str, Any], progress: report.Progress) -> None:
    for concurrency in args.concurrency:
        for name, arm in arms.items():
            arm.ask(do="leg", concurrency=concurrency, length=max(1, args.input // 8), output=min(32, args.output), seed=concurrency)
            progress.say(f"warmed up {name} at {concurrency}")
    last = dict.fromkeys(args.concurrency, 0.0)
    plan = [(c, pair, order) for pair, order in enumerate(pair_orders(*ARMS, args.pairs)) for c in args.concurrency]
    result |= {"complete": True, "summary": summarise([], args.concurrency)}
    for concurrency, pair, order in progress.over(plan, "pairs"):
        if progress.elapsed() + last[concurrency] > args.minutes * 60:
            progress.say(f"pair {pair} at {concurrency} would pass {args.minutes:g} minutes; left out")
            result["complete"] = False
            continue
        before = progress.elapsed()
        for position, name in enumerate(order):
            leg: Leg = {"concurrency": concurrency, "pair": pair, "position": position, "arm": name}
            seed = 1_000_000 * (args.seed + 1) + 10_000 * pair + concurrency
            leg |= arms[name].ask(do="leg", concurrency=concurrency, length=args.input, output=args.output, seed=seed)
            progress.say(f"concurrency {concurrency}, pair {pair}, {name}: {leg['tokens_per_second']:.0f} tok/s in {leg['seconds']:.1f} s")
            result["legs"].append(leg)
            result["summary"] = summarise(result["legs"], args.concurrency)
            report.write(args.out, result)
        last[concurrency] = progress.elapsed() - before
    result["finished"] = True
    report.write(args.out, result)
    report.show(_table(result["summary"]))
    draw(args.out, result["summary"])


def summarise(legs: list[Leg], concurrencies: list[int]) -> list[dict[str, Any]]:
    rows = []
    for concurrency in concurrencies:
        own = [leg for leg in legs if leg["concurrency"] == concurrency]
        values = ("tokens_per_second", "decode_tokens_per_second")
        rows.append({
            "concurrency": concurrency,
            **{name: {value: median(own, name, value) for value in values} for name in ARMS},
            "ratio": ratio(own, "exact", "stock", "tokens_per_second"),
            "decode_ratio": ratio(own, "exact", "stock", "decode_tokens_per_second"),
        })  # fmt: skip
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="generated tok/s; exact / stock is the median of the pairs (below 1: exact is slower)", title_justify="left")
    for column in ("concurrency", "stock", "exact", "exact / stock", "each pair", "decode only", "stock decode", "exact decode"):
        table.add_column(column, justify="right")
    for row in rows:
        stock, exact = row["stock"], row["exact"]
        table.add_row(
            str(row["concurrency"]),
            *(report.number(side["tokens_per_second"], ",.0f") for side in (stock, exact)),
            report.number(row["ratio"]["median"], ".3f"), " ".join(f"{value:.3f}" for value in row["ratio"]["pairs"]),
            report.number(row["decode_ratio"]["median"], ".3f"),
            *(report.number(side["decode_tokens_per_second"], ",.0f") for side in (stock, exact)),
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
    for window in ("prefill", "decode"):
        sides = {name: found[name][window] for name in ARMS}
        result["profile"][window] = comparison(sides["exact"], sides["stock"])
        title = f"prefill of {args.input} tokens" if window == "prefill" else f"decode at concurrency {concurrency}"
        report.show(comparison_table(title, "exact", "stock", sides))
    result["finished"] = True
    report.write(args.out, result)


def _draw(file: Path) -> int:
    draw(file, report.summary_of(file))
    return 0


def draw(out: Path, rows: list[dict[str, Any]]) -> None:
    """tok/s of both arms, and their ratio, by concurrency, beside the JSON."""

    def paint(axes: list[Any]) -> None:
        labels, places = [str(row["concurrency"]) for row in rows], range(len(rows))
        for shift, (name, color) in zip((-0.2, 0.2), (("stock", "#bbbbbb"), ("exact", "#4477aa")), strict=True):
            axes[0].bar([x + shift for x in places], [row[name]["tokens_per_second"] or 0 for row in rows], 0.4, label=name, color=color)
        axes[0].set_ylabel("generated tok/s")
        axes[0].legend(frameon=False)
        axes[1].plot(places, [row["ratio"]["median"] for row in rows], "o-", color="#4477aa")
        for x, row in enumerate(rows):
            axes[1].plot([x] * len(row["ratio"]["pairs"]), row["ratio"]["pairs"], "k.", ms=4)
        axes[1].axhline(1, color="0.5", lw=0.8)
        axes[1].set_ylim(0, 1.1)
        axes[1].set_ylabel("exact / stock, each pair and median")
        for axis in axes:
            axis.set_xticks(list(places), labels)
            axis.set_xlabel("concurrency")

    report.figure(out, 2, paint)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.rollout", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.common_arguments(parser, "runs/rollout.json")
    parser.add_argument("--input", type=report.positive, default=8192, help="prompt tokens (8192)")
    parser.add_argument("--output", type=report.positive, default=1024, help="generated tokens (1024)")
    parser.add_argument("--concurrency", type=report.positive, nargs="+", default=[1, 8, 32, 64], help="requests at once (1 8 32 64)")
    parser.add_argument("--step-tokens", type=report.positive, default=8192, help="max_num_batched_tokens of both arms (8192)")
    parser.add_argument("--attention", choices=("FLASH_ATTN", "TRITON_ATTN"), default="FLASH_ATTN", help="of the exact arm")
    parser.add_argument("--steps", type=report.positive, default=20, help="decode steps in the profile's window (20)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
