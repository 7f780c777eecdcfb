"""Gates for people: what runs, and the table at the end."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lite.acceptance.gate_runner import Outcome


def ending(outcome: Outcome) -> str:
    """One line: how a gate ended."""
    if outcome.seconds is None:
        return f"{outcome.found}, as expected; an earlier call ran it and no source has changed, so it is not run again"
    return f"{outcome.seconds:.0f} s: " + (f"NOT as expected: {outcome.why}" if outcome.why else f"{outcome.found}, as expected")


def table(outcomes: Sequence[Outcome], seconds: float) -> Table:
    """seconds: from start to end; with several at once it is less than the sum."""
    drawn = Table(title="gates", caption=f"{seconds:.0f} s in all")
    for column in ("gate", "expected", "found"):
        drawn.add_column(column, no_wrap=True)
    drawn.add_column("seconds", justify="right")
    drawn.add_column("before")
    drawn.add_column("what is wrong", overflow="fold")
    for o in outcomes:
        took = "done before" if o.seconds is None else f"{o.seconds:.0f}"
        cells = (o.name, o.expected, o.found, took, "" if o.name == "prepare" else "stale" if o.before else "fresh", o.why)
        drawn.add_row(*map(Text, cells), style="red" if o.why else None)
    return drawn


def print_table(outcomes: Sequence[Outcome], seconds: float) -> None:
    console = Console()
    console.width = console.width if console.is_terminal else 160
    console.print(table(outcomes, seconds))


class GateProgress:
    """A spinner and the time of each gate that runs on a terminal; a line an event elsewhere."""

    def __init__(self, total: int):
        self.console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.all = self.bar.add_task("gates", total=total)
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "GateProgress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def started(self, name: str) -> None:
        self.tasks[name] = self.bar.add_task(name, total=None)
        if not self.console.is_terminal:
            self._line(name, "starts")

    def ended(self, outcome: Outcome) -> None:
        if outcome.name in self.tasks:
            self.bar.remove_task(self.tasks.pop(outcome.name))
        self.bar.advance(self.all, outcome.name != "prepare")
        self._line(outcome.name, ending(outcome))

    def _line(self, name: str, what: str) -> None:
        self.console.print(Text(f"{time.strftime('%H:%M:%S')} {name}: {what}"), soft_wrap=True)
