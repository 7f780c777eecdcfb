"""Forward and backward of one packed batch: exact against native and against transformers, on one GPU. With --fsdp, --recompute or
--offload: whole training steps of the Runtime with each combination of what is asked for, against plain ones on one GPU.

    python -m benchmarks.train_step --out runs/train_step.json
    python -m benchmarks.train_step --fsdp 2 --recompute --offload --tokens 8192 --out runs/train_fsdp.json
    python -m benchmarks.train_step --profile --out runs/train_profile.json
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks import report
from benchmarks.legs import Arm, Leg, LegError, environment, median, pair_orders, ratio, write_proxy_apart
from benchmarks.packed import step_flops, unequal_lengths
from benchmarks.profiles import comparison, comparison_table
from lite.errors import InputError
from lite.model.registry import family

MEASURED_LIMIT = 790e12  # FLOP/s of one large bf16 matrix product of random data on an H200, the fastest seen
OTHERS = ("native", "transformers")


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    return report.guarded(lambda: _draw(args.draw) if args.draw else run(args), needs_cuda=args.device == "cuda" and not args.draw)


def run(args: argparse.Namespace) -> int:
    places, have = ("GPUs", torch.cuda.device_count()) if args.device == "cuda" else ("cores", os.cpu_count() or 1)
    if args.fsdp > have:
        raise InputError("--fsdp", f"asks for {args.fsdp} ranks of {have} {places}", f"give at most {have}")
    result: dict[str, Any] = {
        "benchmark": "train_step", "environment": environment(sys.argv), "arguments": report.plain(args), "finished": False,
        "definitions": {
            "flops": step_flops.__doc__, "measured_limit_flops": MEASURED_LIMIT, "loss": "minus the mean logprob of the response tokens",
            "seconds": f"of one {'forward and backward' if args.base == 'exact' else 'whole step'}, mean over --steps",
            "peak_bytes": "allocated at most, weights and gradients included",
        },
        "arms": {}, "legs": [],
    }  # fmt: skip
    if not args.profile:
        result |= {"complete": True, "summary": summarise([], args.tokens, args.against, args.base)}
    with tempfile.TemporaryDirectory() as scratch, report.Progress(args.out) as progress:
        folder = (args.model or Path(scratch) / "proxy").resolve()  # workers run elsewhere
        dtype = "bf16" if args.device == "cuda" else "fp32"
        if args.model is None:
            family(args.family)
            progress.say(f"writing a {args.family} proxy of {args.layers} layers")
            write_proxy_apart(
                args.family, folder, geometry=args.geometry, layers=args.layers, seed=args.seed,
                dtype={"bf16": "bfloat16", "fp32": "float32"}[dtype],
            )  # fmt: skip
        config = report.model_config(folder)
        kernels = args.attention if args.device == "cuda" else "reference"
        spec = {
            "folder": str(folder), "device": args.device, "dtype": dtype, "longest": args.longest, "vocab_size": config.vocab_size,
            "seed": args.seed, "kernels": kernels, "attention": args.transformers_attention,
        }  # fmt: skip

        with ExitStack() as ended:

            def start(name: str, module: str, environment: dict[str, str | None], **facts: Any) -> Arm:
                return ended.enter_context(closing(Arm(name, module, spec | facts, progress.log(name), environment)))

            (_kernels if args.base == "exact" else _trainers)(args, config, start, result, progress)
        result["finished"] = True
        report.write(args.out, result)
        if not args.profile:
            report.show(_table(result["summary"]))
            draw(args.out, result["summary"])
    measured = args.profile or result["legs"]  # no leg where --minutes left all of them out
    return 0 if measured and not any("error" in leg for leg in result["legs"]) else 1


def _kernels(args: argparse.Namespace, config: Any, start: Callable[..., Arm], result: dict[str, Any], progress: Any) -> None:
    """exact and its opponents, all alive at once."""
    arms = {name: start(name, "benchmarks.train_worker", ENVIRONMENT[name], arm=name) for name in ("exact", *args.against)}
    progress.say(f"starting {', '.join(arms)}")
    result["arms"] = {name: arm.reply(args.start_timeout) for name, arm in arms.items()}
    (_profile if args.profile else _measure)(args, config, arms, result, progress)


def _trainers(args: argparse.Namespace, config: Any, start: Callable[..., Arm], result: dict[str, Any], progress: Any) -> None:
    """plain beside one other at a time: two whole trainers are all that a GPU may hold. Those on as many ranks share their processes."""

    def begin(name: str, ranks: int) -> Arm:
        return start(name, "benchmarks.train_ranks", ENVIRONMENT["exact"] | RANKS, ranks=ranks)

    counts = sorted({settings(name)["ranks"] for name in args.against})
    plain, workers = begin("plain", 1), {ranks: begin(f"ranks{ranks}", ranks) for ranks in counts}
    progress.say(f"starting {', '.join(worker.name for worker in (plain, *workers.values()))}")
    facts = {worker.name: worker.reply(args.start_timeout) for worker in (plain, *workers.values())}

    def built(name: str, worker: Arm) -> Arm:
        progress.say(f"building {name}")
        result["arms"][name] = facts[worker.name] | worker.ask(args.start_timeout, do="build", fsdp=settings(name)["fsdp"])
        return worker

    built("plain", plain)
    for ranks, worker in workers.items():
        for name in (name for name in args.against if settings(name)["ranks"] == ranks):
            _measure(args, config, {"plain": plain, name: built(name, worker)}, result, progress)
        worker.ask(do="free")


RANKS: dict[str, str | None] = {"NCCL_NVLS_ENABLE": "0"}  # without NVLink multicast, which not every host lends


def settings(name: str) -> dict[str, Any]:
    """Of an arm of whole steps, such as fsdp2+recompute+offload. What is offloaded: shards with their optimizer's state; unsharded, masters
    and moments between steps."""
    parts = name.split("+")
    ranks = int(parts[0].removeprefix("fsdp")) if parts[0].startswith("fsdp") else 1
    names = {"recompute": "recompute", "offload": "param_offload" if ranks > 1 else "optimizer_offload"}
    return {"ranks": ranks, "fsdp": {names[part]: True for part in parts if part in names}}


# the exact arm's mode is on before anything of its process imports vllm, and off in the others
ENVIRONMENT: dict[str, dict[str, str | None]] = {
    "exact": {"VLLM_BATCH_INVARIANT": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
    **{name: {"VLLM_BATCH_INVARIANT": None, "CUBLAS_WORKSPACE_CONFIG": None, "HF_HUB_OFFLINE": "1"} for name in OTHERS},
}


def _measure(args: argparse.Namespace, config: Any, arms: dict[str, Arm], result: dict[str, Any], progress: Any) -> None:
    plan = [
        (tokens, other, pair, order)
        for pair in range(args.pairs)
        for tokens in args.tokens
        for other in arms
        if other != args.base
        for order in [pair_orders(args.base, other, args.pairs)[pair]]
    ]
    last: dict[tuple[int, str], float] = {}
    for tokens, other, pair, order in progress.over(plan, "pairs"):
        if progress.elapsed() + last.get((tokens, other), 0.0) > args.minutes * 60:
            progress.say(f"pair {pair} of {tokens} tokens against {other} would pass {args.minutes:g} minutes; left out")
            result["complete"] = False
            continue
        before = progress.elapsed()
        for position, name in enumerate(order):
            leg: Leg = {"tokens": tokens, "against": other, "pair": pair, "position": position, "arm": name}
            try:
                leg |= arms[name].ask(do="leg", tokens=tokens, count=args.steps, warmup=args.warmup)
                flops = step_flops(config, unequal_lengths(tokens, args.longest, args.seed), leg["rows_scored"])
                rate = flops["total"] / leg["seconds"]
                leg |= {"flops": flops, "tflops": rate / 1e12, "of_limit": rate / MEASURED_LIMIT}
                leg["tokens_per_second"] = tokens * leg.get("ranks", 1) / leg["seconds"]
                progress.say(f"{tokens} tokens, pair {pair}, {name}: {leg['seconds'] * 1e3:.1f} ms")
            except LegError as error:
                leg["error"], result["complete"] = str(error), False
                progress.say(str(error))
                if error.dead:
                    raise
            result["legs"].append(leg)
            result["summary"] = summarise(result["legs"], args.tokens, args.against, args.base)
            report.write(args.out, result)
        last[tokens, other] = progress.elapsed() - before


def summarise(legs: list[Leg], sizes: list[int], others: list[str], base: str = "exact") -> list[dict[str, Any]]:
    """A row a size and opponent: base / other within each pair, above 1 where the base is slower or larger."""
    rows = []
    for tokens in sizes:
        for other in others:
            own = [leg for leg in legs if leg["tokens"] == tokens and leg["against"] == other]
            values = ("seconds", "peak_bytes", "tokens_per_second", "tflops", "of_limit", "loss")
            rows.append({
                "tokens": tokens, "base": base, "against": other,
                "time": ratio(own, base, other, "seconds"), "memory": ratio(own, base, other, "peak_bytes"),
                **{name: {value: median(own, name, value) for value in values} for name in (base, other)},
            })  # fmt: skip
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    base = rows[0]["base"]
    table = Table(title=f"{base} / other, medians of pairs (above 1: {base} is slower, or needs more memory)", title_justify="left")
    values = (f"{base} tok/s", "other tok/s", f"{base} TFLOP/s", "of limit", "losses")
    for column in ("tokens", "against", "time", "each pair", "memory", *values):
        table.add_column(column, justify="right")
    for row in rows:
        exact, other = row[base], row[row["against"]]
        each = " ".join(f"{value:.2f}" for value in row["time"]["pairs"])
        table.add_row(
            str(row["tokens"]), row["against"], report.number(row["time"]["median"], ".2f"), each,
            report.number(row["memory"]["median"], ".2f"),
            report.number(exact["tokens_per_second"], ",.0f"), report.number(other["tokens_per_second"], ",.0f"),
            report.number(exact["tflops"], ".0f"), report.number(exact["of_limit"], ".0%"),
            f"{report.number(exact['loss'], '.4f')} {report.number(other['loss'], '.4f')}",
        )  # fmt: skip
    return table


def _profile(args: argparse.Namespace, config: Any, arms: dict[str, Arm], result: dict[str, Any], progress: Any) -> None:
    """Of every arm at the first size; the table compares exact with whichever is fastest, the worst ratio."""
    tokens = args.tokens[0]
    result["profile"] = {"tokens": tokens, "arms": {}}
    for name, arm in progress.over(list(arms.items()), "profiles"):
        result["profile"]["arms"][name] = arm.ask(do="profile", tokens=tokens, count=args.steps)
        report.write(args.out, result)
    sides = result["profile"]["arms"]
    fastest = min(args.against, key=lambda name: sides[name]["wall_ms"])
    result["profile"] |= {"against": fastest, "comparison": comparison(sides["exact"], sides[fastest])}
    report.show(comparison_table(f"{tokens} tokens", "exact", fastest, sides))


def _draw(file: Path) -> int:
    draw(file, report.summary_of(file, "train_step"))
    return 0


def draw(out: Path, rows: list[dict[str, Any]]) -> None:
    """Time and memory ratios by size and opponent, beside the JSON."""

    def paint(axes: list[Any]) -> None:
        labels = [f"{row['tokens']:,}\n{row['against']}" for row in rows]
        for axis, value in zip(axes, ("time", "memory"), strict=True):
            axis.bar(labels, [row[value]["median"] or 0 for row in rows], color="#4477aa")
            for x, row in enumerate(rows):
                axis.plot([x] * len(row[value]["pairs"]), row[value]["pairs"], "k.", ms=4)
            axis.axhline(1, color="0.5", lw=0.8)
            axis.set_ylabel(f"{value}: {rows[0].get('base', 'exact')} / other")

    report.figure(out, 2, paint)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.train_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.common_arguments(parser, "runs/train_step.json")
    parser.add_argument(
        "--tokens", type=report.positive, nargs="+", action=report.Distinct, default=[8192, 32768], help="packed tokens a step"
    )
    parser.add_argument("--longest", type=report.at_least_two, default=4096, help="longest sequence; lengths vary from an eighth of it")
    parser.add_argument("--steps", type=report.positive, default=5, help="timed steps a leg")
    parser.add_argument("--warmup", type=report.positive, default=2, help="untimed steps before them")
    parser.add_argument("--against", nargs="+", action=report.Distinct, choices=OTHERS, help="opponents of the exact arm (both)")
    parser.add_argument("--attention", choices=("FLASH_ATTN", "TRITON_ATTN"), default="FLASH_ATTN", help="of the exact arm")
    parser.add_argument("--transformers-attention", choices=("flash", "sdpa"), default="flash", help="torch's packed flash, or its SDPA")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the program, with reference kernels")
    parser.add_argument("--fsdp", type=report.positive, default=1, metavar="N", help="shard over N ranks, a GPU each")
    parser.add_argument("--recompute", action="store_true", help="layers run again in backward")
    parser.add_argument("--offload", action="store_true", help="shards (unsharded: masters and moments) rest on the CPU")
    args = parser.parse_args(argv)
    asked = [f"fsdp{args.fsdp}"] * (args.fsdp > 1) + ["recompute"] * args.recompute + ["offload"] * args.offload
    args.base = "plain" if asked else "exact"
    if not asked:
        args.against = args.against or list(OTHERS)
    else:
        if args.against:
            parser.error("--against is of the exact arm; leave out --fsdp, --recompute and --offload")
        args.against = ["+".join(some) for n in range(1, len(asked) + 1) for some in combinations(asked, n)]
        if args.profile:
            parser.error("--profile is of the exact arm; leave out --fsdp, --recompute and --offload")
    return args


if __name__ == "__main__":
    sys.exit(main())
