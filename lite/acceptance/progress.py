"""What a run is doing, drawn on the terminal."""

import time
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LONG = 10  # policies from which the phases that are over leave the screen, and a bar of policies tells what is left


class Progress(Protocol):
    """Told what goes on."""

    def phase(self, name: str, total: int) -> None: ...

    def advance(self, amount: int) -> None: ...

    def overall(self, done: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...


class ProgressBar:
    """A live bar on a terminal; a line a phase elsewhere (a line a policy in a long run)."""

    def __enter__(self) -> "ProgressBar":
        self.console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        left = (TextColumn("left"), TimeRemainingColumn())
        self.bar = RichProgress(*columns, *left, console=self.console, disable=not self.console.is_terminal)
        self.bar.start()
        self.task: Any = None
        self.policies: Any = None
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.bar.stop()

    def _close(self) -> None:
        if self.task is None:
            return
        if self.policies is not None:
            self.bar.remove_task(self.task)
        else:
            total = next(task.total for task in self.bar.tasks if task.id == self.task)
            self.bar.update(self.task, completed=total)
            self.bar.stop_task(self.task)

    def overall(self, done: int, total: int) -> None:
        """How many policies of a run are done. Short runs show their phases instead."""
        if total < LONG:
            return
        if self.policies is None:
            self._close()
            self.task = None
            self.policies = self.bar.add_task("policies", total=total, completed=done)
            self.started, self.first = time.monotonic(), done
        self.bar.update(self.policies, completed=done)
        if not self.console.is_terminal and done > self.first:
            left = (time.monotonic() - self.started) / (done - self.first) * (total - done)
            self.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {done} of {total} policies, {left / 60:.0f} min left", highlight=False)

    def phase(self, name: str, total: int) -> None:
        self._close()
        self.task = self.bar.add_task(name, total=total)
        if not self.console.is_terminal and self.policies is None:
            self.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {name}", highlight=False)

    def advance(self, amount: int) -> None:
        self.bar.advance(self.task, amount)

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False)
