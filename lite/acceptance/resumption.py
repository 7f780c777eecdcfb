"""Whether a run may be taken up again: only the same run, of the same sources, in which nothing was found wrong.

All of it is asked before anything is written, so a refused resumption leaves what it would have continued as it was.
"""

from lite.acceptance.receipt import ROOT, changed_sources
from lite.acceptance.result_folder import CHECKPOINTS, FAILING, RECEIPT, RUN
from lite.acceptance.sides import ProveConfig, same_run
from lite.errors import InputError
from lite.primitive.ckpt.safetensors_files import read_json
from lite.runtime import checkpoint


def can_go_on(c: ProveConfig) -> bool:
    """Whether there is a checkpoint to go on from; where there is none yet the run starts again. InputError where it may not be resumed."""
    if not (c.out / RUN).is_file():
        raise InputError("--resume", f"{c.out} holds no run", "leave --resume out to start one")
    held, asked = read_json(c.out / RUN), same_run(c)
    for flag in asked:
        if held.get(flag) != asked[flag]:
            raise InputError("--resume", f"the run had {flag} = {held.get(flag)}, not {asked[flag]}", "give the same flags")
    receipt = read_json(c.out / RECEIPT)
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
        raise InputError(last, "is no checkpoint of a proof", "delete it to go on from the one before, or start another run")
    if version > c.updates:
        raise InputError("--resume", f"{last} lies past --updates {c.updates}", f"give at least {version}")
    if changed := changed_sources(facts["closure"], ROOT):
        raise InputError("--resume", f"{changed[0]} has changed since {last.name}", "go back to those sources, or start another run")
    return True
