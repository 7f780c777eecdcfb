"""What a run is doing, drawn on the terminal."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class ProgressBar:
    """A live bar on a terminal; a line a phase elsewhere."""

    def __enter__(self) -> "ProgressBar":
        self.console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.bar.start()
        self.task: Any = None
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.bar.stop()

    def _close(self) -> None:
        if self.task is not None:
            self.bar.update(self.task, completed=self.bar.tasks[self.task].total)
            self.bar.stop_task(self.task)

    def phase(self, name: str, total: int) -> None:
        self._close()
        self.task = self.bar.add_task(name, total=total)
        if not self.console.is_terminal:
            self.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {name}", highlight=False)

    def advance(self, amount: int) -> None:
        self.bar.advance(self.task, amount)

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False)
