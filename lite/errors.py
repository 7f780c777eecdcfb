"""The one error a user can cause, and the nearest-name hint that goes with it."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input. The message is one line: where it is, what is wrong, what to do. The command line exits with 2."""

    def __init__(self, where: object, what: str, fix: str):
        super().__init__(str(where), what, fix)  # all three, so that it passes between processes

    def __str__(self) -> str:
        where, what, fix = self.args
        return " ".join(f"{where}: {what}; {fix}".split())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"  # Hydra prints it


class ProbeError(RuntimeError):
    """A kernel does not keep its contract on this device. The message names the kernel, the shape and the first differing row."""


def nearest(name: str, options: Iterable[str]) -> str:
    """The hint "did you mean ...", or the whole list where nothing is near."""
    options = sorted(options)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"it may be one of {', '.join(options)}"
