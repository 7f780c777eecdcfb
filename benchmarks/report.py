"""What both programs share towards the person who runs them: arguments, progress, JSON, tables, figures, one line for an error."""

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

from benchmarks.legs import LegError, without_machine
from lite.acceptance.receipt import write_json as write
from lite.errors import InputError
from lite.model.registry import family, family_of
from lite.primitive.ckpt.hf_config import load_hf_config
from lite.primitive.ckpt.safetensors_files import read_json

__all__ = [
    "Distinct", "Progress", "at_least_two", "common_arguments", "figure", "guarded", "model_config", "number", "plain", "positive",
    "show", "summary_of", "write",
]  # fmt: skip


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def at_least_two(text: str) -> int:
    if positive(text) < 2:
        raise argparse.ArgumentTypeError("a sequence has a prompt and a response: give 2 or more")
    return int(text)


def duration(text: str) -> float:
    try:
        if 0 <= float(text) < 1e6:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no duration")


class Distinct(argparse.Action):
    """Of nargs="+": a value given twice is measured once."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, list(dict.fromkeys(values)))


def common_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    parser.add_argument("--out", type=Path, default=Path(out), metavar="FILE", help=f"JSON, written after every leg ({out})")
    parser.add_argument("--family", default="qwen3", help="of the random proxy (qwen3)")
    parser.add_argument("--geometry", choices=("real", "tiny"), default="real", help="its layers' geometry (real)")
    parser.add_argument("--layers", type=positive, default=4, help="its number of layers (4)")
    parser.add_argument("--model", type=Path, metavar="PATH", help="a checkpoint folder instead of the proxy")
    parser.add_argument("--pairs", type=positive, default=3, help="legs AB, BA, AB, ... (3)")
    parser.add_argument("--minutes", type=duration, default=8.5, help="since the start; a pair that would end later is left out (8.5)")
    parser.add_argument("--start-timeout", type=duration, default=300.0, metavar="S", help="for a worker to start (300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="kernel times by group instead of the legs")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="only draw the figure of an earlier FILE, on any machine")


def guarded(work: Callable[[], int], needs_cuda: bool) -> int:
    """work's exit code; 2 and one line for bad input, 1 and one line for a worker that failed."""
    import torch

    if needs_cuda and not torch.cuda.is_available():
        print("no CUDA device: this benchmark measures a GPU; run it on a machine with one", file=sys.stderr)
        return 2
    try:
        return work()
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except LegError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def model_config(folder: Path) -> Any:
    hf = load_hf_config(folder)
    return family(family_of(hf.get("model_type"))).build_model_config(hf)


class Progress:
    """A live bar on a terminal, and a line a step everywhere. Workers' logs lie beside the JSON."""

    def __init__(self, out: Path):
        self.out = out
        if out.is_dir():
            raise InputError(out, "is a folder", "give --out a file's name")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            self.log("try").touch()
            self.log("try").unlink()
        except OSError as error:
            raise InputError(out, f"cannot be written: {error.strerror}", "choose another --out") from None
        self.bar = Bar(console=Console(stderr=True, width=None if sys.stderr.isatty() else 200))
        self.started = time.perf_counter()

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def say(self, line: str) -> None:
        self.bar.console.print(f"{self.elapsed():6.1f} s  {line}", highlight=False, markup=False)

    def log(self, arm: str) -> Path:
        return self.out.with_suffix(f".{arm}.log")

    def over(self, items: list[Any], what: str) -> Iterable[Any]:
        return self.bar.track(items, description=what)


def show(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def plain(args: argparse.Namespace) -> dict[str, Any]:
    return {name: without_machine(str(value)) if isinstance(value, Path) else value for name, value in vars(args).items()}


def summary_of(file: Path, benchmark: str) -> list[dict[str, Any]]:
    """Of an earlier run's JSON."""
    if not file.is_file():
        raise InputError(file, "no such file", "name the JSON of an earlier run")
    found = read_json(file)
    if found.get("benchmark") != benchmark:
        raise InputError(file, f"is no result of benchmarks.{benchmark}", "draw it by the program that wrote it")
    if not found.get("summary"):
        raise InputError(file, "holds no legs", "name the JSON of a run without --profile")
    return found["summary"]


def figure(out: Path, columns: int, paint: Callable[[list[Any]], None]) -> None:
    """What paint draws into a row of axes, as out's PNG. Without matplotlib nothing is drawn: --draw does it later, elsewhere."""
    try:
        import matplotlib
    except ImportError:
        print(f"matplotlib is not installed: no figure; use --draw {out} where it is", file=sys.stderr)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(1, columns, figsize=(5.2 * columns, 4.0), squeeze=False)
    paint(list(axes[0]))
    try:
        drawn.savefig(out.with_suffix(".png"), dpi=120, bbox_inches="tight")
    except OSError as error:
        raise InputError(out.with_suffix(".png"), f"cannot be written: {error.strerror}", f"make room and --draw {out}") from None
    finally:
        plt.close(drawn)
