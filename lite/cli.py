"""The `mlite` command: parses, draws progress, prints the result. Exit 0 pass, 1 fail, 2 inconclusive or bad input."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from lite.errors import InputError

UsageError: Any = typer.BadParameter.__base__  # click's, or typer's own copy of it in newer versions
EXIT = {"pass": 0, "fail": 1, "inconclusive": 2}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Megatron Lite: every rollout token's logprob, the same bytes in the trainer.",
)

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result to FILE as JSON.")]


@app.command()
def prove(
    model: Annotated[Path | None, typer.Option(metavar="PATH", help="Checkpoint folder (config.json and safetensors).")] = None,
    proxy: Annotated[str | None, typer.Option(metavar="FAMILY", help="A small random model of this family instead.")] = None,
    geometry: Annotated[str, typer.Option(metavar="tiny|real", help="Size of the proxy's layers.")] = "tiny",
    layers: Annotated[int | None, typer.Option(min=1, help="Number of layers (the checkpoint's first ones).")] = None,
    engine: Annotated[str, typer.Option(metavar="embedded|vllm", help="Rollout engine.")] = "embedded",
    plugin: Annotated[str, typer.Option(metavar="on|off", help="vLLM plugin; the embedded engine needs none.")] = "on",
    attention: Annotated[str | None, typer.Option(metavar="BACKEND", help="vLLM's: TRITON_ATTN or FLASH_ATTN.")] = None,
    graphs: Annotated[str, typer.Option(metavar="eager|full_decode", help="CUDA graphs of the engine.")] = "eager",
    updates: Annotated[int, typer.Option(min=0, help="Policy updates between rollouts.")] = 2,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="JSONL prompts with reasoning-gym entries.")] = None,
    prompt_tokens: Annotated[str, typer.Option(metavar="A:B", help="Shortest and longest random prompt.")] = "1:40",
    response_tokens: Annotated[int, typer.Option(metavar="N", help="Longest response.")] = 24,
    groups: Annotated[int, typer.Option(metavar="N", help="Prompts a policy.")] = 4,
    samples: Annotated[int, typer.Option(metavar="N", help="Responses a prompt.")] = 4,
    dtype: Annotated[str, typer.Option(metavar="bf16|fp32", help="The model's dtype.")] = "bf16",
    temperature: Annotated[float, typer.Option(help="Sampling temperature, above 0.")] = 1.0,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-4,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and sampling.")] = 0,
    plant: Annotated[str | None, typer.Option(metavar="KIND", help="Plant a known error; the proof must then fail.")] = None,
    save_every: Annotated[int, typer.Option(metavar="N", help="Updates between two checkpoints of the run.")] = 10,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the latest checkpoint in --out.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Result folder, runs/TIME by default.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Prove that trainer and engine give each token's logprob the same bytes, before and after every update.

    Writes DIR/receipt.json, report.md, plots/ and the rollout bundles. Exit 0: pass. 1: the two sides differ. 2: inconclusive or bad input.

    Examples:

    `mlite prove --proxy qwen3`

    `mlite prove --model checkpoints/SmolLM2-135M --groups 8 --out runs/smollm2`

    `mlite prove --proxy llama --plant one-ulp`  (must exit 1)

    `mlite prove --proxy llama --updates 200 --out runs/long`, and after a kill the same with `--resume`
    """
    from lite.acceptance.plants import find_plant
    from lite.acceptance.plots import draw_plots
    from lite.acceptance.progress import ProgressBar
    from lite.acceptance.prove import prove as run
    from lite.acceptance.report import write_report
    from lite.acceptance.sides import ProveConfig

    _open_json(json_file)
    if plant is not None:
        find_plant(plant)  # an empty one, too: a run that was to be planted must not pass for want of a plant
    config = ProveConfig(
        out=out or Path("runs") / time.strftime("%Y%m%d-%H%M%S"),
        model=model, proxy=proxy, geometry=_one_of("--geometry", geometry, "tiny", "real"), layers=layers,
        **_engine(engine, plugin, attention, graphs), updates=updates, prompts=prompts, prompt_tokens=_range(prompt_tokens),
        response_tokens=response_tokens, groups=groups, samples=samples, dtype=_one_of("--dtype", dtype, "bf16", "fp32"),
        temperature=temperature, lr=lr, seed=seed, plant=plant, save_every=save_every, resume=resume,
    )  # fmt: skip
    with ProgressBar() as progress:
        receipt = run(config, ["mlite", *sys.argv[1:]], progress)
        if receipt.get("policies"):
            progress.phase("report", 1)
            write_report(config.out, receipt, draw_plots(config.out, receipt))
            progress.advance(1)
    _finish(receipt, json_file, f"{receipt['status']}: {receipt['reason']} ({config.out / 'receipt.json'})")


@app.command()
def compare(
    left: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A rollout bundle, or the folder of a run.")],
    right: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The one to compare it with.")],
    json_file: JsonFile = None,
) -> None:
    """Compare two rollout bundles by UID: tokens and the bytes of their logprobs.

    Exit 0: all the same. 1: something differs. 2: no bundle, or nothing in common.

    Example:

    `mlite compare runs/one/rollout/theta0.safetensors runs/two/rollout/theta0.safetensors`
    """
    from lite.acceptance.bundle import bundle_files, compare_bundles, load_bundle

    _open_json(json_file)
    lefts, rights = bundle_files(left), bundle_files(right)
    pairs = [(next(iter(lefts)), next(iter(rights)))] if left.is_file() and right.is_file() else [(n, n) for n in lefts if n in rights]
    if not pairs:
        raise InputError("compare", f"{left} and {right} hold no policy of the same name", "give two bundles, or two runs")
    result: dict[str, Any] = {"status": "pass", "policies": {}}
    for a, b in pairs:
        (one, facts), (other, other_facts) = load_bundle(lefts[a]), load_bundle(rights[b])
        heat, other_heat = facts["temperature"], other_facts["temperature"]
        found = compare_bundles(one, other)
        result["policies"][a] = found.as_dict() | {"temperature": [heat, other_heat]}
        result["status"] = result["status"] if found.exact and heat == other_heat else "fail"
        typer.echo(f"{a}: {found.summary()}" + ("" if heat == other_heat else f", temperatures {heat} and {other_heat}"))
    lacking = sorted(set(lefts) ^ set(rights)) if left.is_dir() and right.is_dir() else []
    if lacking:
        result["status"] = "fail"
        typer.echo(f"only one side holds {', '.join(lacking)}")
    _finish(result, json_file, result["status"])


@app.command()
def gates(
    gpu: Annotated[bool, typer.Option("--gpu", help="Run them; without it they are listed.")] = False,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="This one; may be repeated.")] = None,
    stale: Annotated[bool, typer.Option("--stale", help="Only those whose receipt in evidence/ is not fresh.")] = False,
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="So many at once; two of the list fit an H200.")] = 1,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Receipts DIR/NAME.json, logs and result folders.")] = Path("runs/gates"),
    json_file: JsonFile = None,
) -> None:
    """Run the commands behind evidence/ again, each with the end that it must have; a planted error must fail.

    In a checkout, with its package installed. Stale ones run first. What is in DIR, as expected and fresh is not run again, so a list that
    was cut short goes on. Exit 0: all ended as expected. 1: one did not. 2: bad input, or nothing was run.

    Examples:

    `mlite gates`  (lists them, runs nothing)

    `mlite gates --gpu --stale --jobs 2 --out runs/gates`
    """
    from lite.acceptance.freshness import evidence_lacks, listing, orphans
    from lite.acceptance.gates import choose

    _open_json(json_file)
    checkout = Path.cwd()
    chosen = choose(only or [])
    found = evidence_lacks(chosen, checkout)
    if stale:
        chosen = [gate for gate in chosen if found[gate.name]]
    if not gpu or not chosen:
        lost = orphans(checkout)
        for entry in listing(chosen, found, lost):
            typer.echo(entry)
        line = "NOTHING WAS RUN: " + (f"no gate{' of those' if only else ''} is stale" if not chosen else "--gpu runs the gates")
        _finish({"status": "inconclusive", "evidence_lacks": found, "orphans": lost}, json_file, line)
    _run_gates(chosen, out, checkout, jobs, json_file)


def _run_gates(chosen: list[Any], out: Path, checkout: Path, jobs: int, json_file: Path | None) -> NoReturn:
    from dataclasses import asdict

    import torch

    from lite.acceptance.gate_report import GateProgress, print_table
    from lite.acceptance.gate_runner import check_installed, run_gates

    if not torch.cuda.is_available():
        raise InputError("--gpu", "there is no CUDA device here and nothing was run", "without --gpu the gates are listed")
    check_installed(checkout)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the gates end with this process
    start = time.monotonic()
    with GateProgress(len(chosen)) as progress:
        outcomes = run_gates(chosen, out, checkout, progress, jobs)
    seconds = time.monotonic() - start
    print_table(outcomes, seconds)
    wrong = [o.name for o in outcomes if o.why]
    result = {"status": "fail" if wrong else "pass", "seconds": seconds, "gates": [asdict(o) for o in outcomes]}
    _finish(result, json_file, f"fail: not as expected: {', '.join(wrong)}" if wrong else f"pass: all ended as expected ({out})")


@app.command()
def replay(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A rollout bundle that a run kept.")],
    model: Annotated[Path, typer.Option(metavar="PATH", help="Checkpoint folder of that run (config.json and safetensors).")],
    checkpoint: Annotated[Path | None, typer.Option(metavar="DIR", help="The trainer's checkpoint at the bundle's policy.")] = None,
    layers: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only the first N layers, as that run.")] = None,
    kernels: Annotated[str, typer.Option(metavar="SET", help="reference, or vLLM's: FLASH_ATTN, TRITON_ATTN.")] = "reference",
    token_budget: Annotated[int, typer.Option(metavar="N", help="Tokens of a packed row.")] = 2048,
    seed: Annotated[int, typer.Option(help="Of the packing: who stands beside whom.")] = 0,
    dtype: Annotated[str, typer.Option(metavar="bf16|fp32", help="The model's dtype.")] = "bf16",
    json_file: JsonFile = None,
) -> None:
    """Score a kept rollout again, under another packing, budget or kernel set, and compare by UID.

    Exit 0: the same bytes on both paths. 1: something differs. 2: bad input, or a trainer that holds other weights than the policy's.

    Examples:

    `mlite replay runs/x/rollout/theta0.safetensors --model runs/x/proxy --token-budget 512 --seed 3`

    `mlite replay runs/x/rollout/theta40.safetensors --model runs/x/proxy --checkpoint runs/x/checkpoints/step-00000040`
    """
    from lite.acceptance.replay import KERNELS, ReplayConfig
    from lite.acceptance.replay import replay as run

    _open_json(json_file)
    _one_of("--kernels", kernels, *KERNELS)
    _one_of("--dtype", dtype, "bf16", "fp32")
    result = run(ReplayConfig(bundle, model, checkpoint, layers, kernels, token_budget, seed, dtype))
    for row in result.get("differing", [])[:10]:
        typer.echo("uid {uid}, sample {sample}: {mismatch} tokens differ, the first is {first}: {rollout!r} and {trainer!r}".format(**row))
    _finish(result, json_file, f"{result['status']}: {result['reason']}")


def _engine(engine: str, plugin: str, attention: str | None, graphs: str) -> dict[str, Any]:
    """The engine choices that fit together; the vLLM engine's own flags are refused for the embedded one."""
    _one_of("--engine", engine, "embedded", "vllm")
    _one_of("--plugin", plugin, "on", "off")
    _one_of("--graphs", graphs, "eager", "full_decode")
    if engine == "embedded" and (plugin == "off" or attention or graphs != "eager"):
        raise InputError("--engine embedded", "has no plugin, attention or graphs to choose", "leave those flags out")
    backend = _one_of("--attention", attention or "TRITON_ATTN", "TRITON_ATTN", "FLASH_ATTN")
    return {"engine": engine, "plugin": plugin == "on", "attention": backend, "graphs": graphs}


def _one_of(flag: str, value: str, *choices: str) -> str:
    if value not in choices:
        raise InputError(flag, f"{value!r} is not supported", f"use {' or '.join(choices)}")
    return value


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high.isdecimal() or not high)):
        raise InputError("--prompt-tokens", f"{text!r} is no range", "write SHORTEST:LONGEST, as 1:40")
    return int(low), int(high or low)


def _open_json(json_file: Path | None) -> None:
    """Fails before the work where the result could not be written after it."""
    if json_file is None:
        return
    try:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        before = json_file.exists()
        json_file.open("a").close()
        if not before:
            json_file.unlink()  # where the work fails, no empty result is left
    except OSError as error:
        raise InputError("--json", f"{json_file} cannot be written ({error.strerror})", "name another file") from None


def _finish(result: dict[str, Any], json_file: Path | None, line: str) -> NoReturn:
    if json_file is not None:
        from lite.acceptance.receipt import write_json

        write_json(json_file, result)
    typer.echo(line)
    raise typer.Exit(EXIT[result["status"]])


def main() -> None:
    """One line and exit 2 for whatever goes wrong: exit 1 says that a comparison failed, and nothing else may say it."""
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except InputError as error:
        line = str(error)
    except OSError as error:
        line = f"{error.filename or 'file'}: {error.strerror}; check the path"
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("mlite: interrupted", err=True)
        sys.exit(130)
    except UsageError as error:
        line = f"{error.format_message() or 'no command was given'}; see mlite --help"
    except Exception as error:
        if os.environ.get("MLITE_TRACEBACK") == "1":
            raise
        line = f"unexpected {type(error).__name__}: {error}; please report it with the output under MLITE_TRACEBACK=1"
    typer.echo("mlite: " + " ".join(line.split()), err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
