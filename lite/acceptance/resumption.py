"""Long runs: what a checkpoint of one holds, and whether a run may be taken up again: only the same run, of the same sources, in which
nothing was found wrong.

All of it is asked before anything is written, so a refused resumption leaves what it would have continued as it was.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from lite.acceptance.receipt import ROOT, changed_sources, closure, environment
from lite.acceptance.result_folder import CHECKPOINTS, FAILING, RECEIPT, ROLLOUT, RUN, SCORES
from lite.acceptance.sides import ProveConfig, Sides, same_run
from lite.errors import InputError
from lite.primitive.ckpt.safetensors_files import read_json
from lite.runtime import checkpoint


def can_go_on(c: ProveConfig) -> bool:
    """Whether there is a checkpoint to go on from; where there is none yet the run starts again. InputError where it may not be resumed."""
    if not (c.out / RUN).is_file():
        raise InputError("--resume", f"{c.out} holds no run", "leave --resume out to start one")
    held, asked = _own(c.out / RUN), same_run(c)
    for flag in asked:
        if held.get(flag) != asked[flag]:
            raise InputError("--resume", f"the run had {flag} = {held.get(flag)}, not {asked[flag]}", "give the same flags")
    receipt = _own(c.out / RECEIPT)
    if receipt.get("status") == "fail" or (c.out / FAILING).exists():
        reason = receipt.get("reason")
        raise InputError("--resume", f"{c.out} failed, and going on would hide it ({reason})", "start a run in another folder")
    if (count := len(receipt.get("policies", ()))) > c.updates + 1:
        raise InputError("--resume", f"{c.out} holds {count} policies, more than --updates {c.updates} asks for", "raise it")
    last = checkpoint.latest(c.out / CHECKPOINTS)
    if last is None:
        return False
    held = checkpoint.read_facts(last)
    version, facts = held.get("version"), held.get("facts")
    if not isinstance(version, int) or not isinstance(facts, dict) or "closure" not in facts:
        raise InputError(last, "is no checkpoint of a proof", checkpoint.way_back(last))
    if version > c.updates:
        raise InputError("--resume", f"{last} lies past --updates {c.updates}", f"give at least {version}")
    if changed := changed_sources(facts["closure"], ROOT):
        raise InputError("--resume", f"{changed[0]} has changed since {last.name}", "go back to those sources, or start another run")
    return True


def _own(path: Path) -> dict[str, Any]:
    """A file that the run wrote, whole each time. What is left of a damaged one cannot say whether going on would hide a failure."""
    try:
        return read_json(path)
    except InputError as error:
        _, what, _ = error.args
        raise InputError(path, what, "start a run in another folder") from None


def save(s: Sides, out: Path, weights_sha256: str, found: dict[str, Any]) -> None:
    """A checkpoint of the trainer with the run's findings; the last two are kept. weights_sha256: of the model that the run began with."""
    here = {"closure": closure(), "weights_sha256": weights_sha256, "environment": environment(s.trainer.device, {})}
    s.runtime.save_checkpoint(s.trainer, out / CHECKPOINTS, keep=2, facts=here | {"found": found, "counters": asdict(s.engine.counters)})


def load(s: Sides, out: Path, weights_sha256: str) -> dict[str, Any] | None:
    """Takes up the latest checkpoint. -> what `save` was given; None where there is none yet. Rollouts of its policy and later ones are
    deleted: they are made again, if the run comes to them."""
    held = s.runtime.load_checkpoint(s.trainer, out / CHECKPOINTS)
    if held is None:
        return None
    if held["weights_sha256"] != weights_sha256:
        raise InputError("--resume", f"{s.folder} holds other weights than the run began with", "put those back, or start another run")
    if (here := environment(s.trainer.device, {})) != held["environment"]:
        other = [f"{key} = {value}, not {here[key]}" for key, value in held["environment"].items() if here[key] != value]
        raise InputError("--resume", f"the run had {'; '.join(other)}", "resume it where it was, or start another run")
    for path in [path for name in (ROLLOUT, SCORES) for path in (out / name).glob("theta*.safetensors")]:
        if int(path.stem.removeprefix("theta")) >= s.trainer.weights.require():
            path.unlink()
    return held
