"""The folder of one run: which entries are ours, and who may write it."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lite.errors import InputError
from lite.runtime import checkpoint

RUN, RECEIPT, ROLLOUT, SCORES, PLOTS, LOCK = "run.json", "receipt.json", "rollout", "scores", "plots", ".lock"
CHECKPOINTS, FAILING = "checkpoints", "failing"


@contextmanager
def claimed(out: Path, go_on: bool) -> Iterator[None]:
    """Creates the folder, or clears what an earlier run wrote into it (go_on: leaves it), and keeps other runs out meanwhile. InputError
    for a folder that holds anything else, since it is somebody's, or a long run's checkpoints, which a forgotten --resume would cost."""
    ours = {RUN, RECEIPT, ROLLOUT, SCORES, PLOTS, CHECKPOINTS, FAILING, "proxy", "report.md", LOCK}
    if out.exists() and not out.is_dir():
        raise InputError("--out", f"{out} is a file", "name a folder")
    entries = list(out.iterdir()) if out.is_dir() else []
    foreign = [e.name for e in entries if e.name not in ours and not e.name.endswith(".partial") and not e.name.startswith(".proxy.")]
    if foreign or (entries and LOCK not in {e.name for e in entries}):
        what = foreign[0] if foreign else entries[0].name
        raise InputError("--out", f"{out} holds {what!r} and is no folder of an earlier run", "name another folder")
    if not go_on and checkpoint.latest(out / CHECKPOINTS):
        raise InputError("--out", f"{out} holds the checkpoints of a run", "go on with --resume, name another folder, or delete it")
    others = [path for path in (out / CHECKPOINTS).glob("*") if not path.name.endswith(checkpoint.PARTIAL)]
    if not go_on and others:
        raise InputError("--out", f"{others[0]} is no checkpoint of a run and would be cleared", "move it away or delete it")
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / LOCK).open("w")
    except OSError as error:
        raise InputError("--out", f"{out} cannot be written ({error.strerror})", "name another folder") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError("--out", f"{out} is being written by another run", "wait for it or name another folder") from None
        for entry in entries:
            if entry.name != LOCK and not go_on:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        yield
