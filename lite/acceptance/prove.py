"""The proof: rollout, score, update, again; every token's logprob compared by bytes on both of the trainer's paths."""

from collections.abc import Sequence
from typing import Any

from lite.acceptance.plants import Plant, find_plant
from lite.acceptance.progress import Progress
from lite.acceptance.proof import Proof
from lite.acceptance.receipt import SCHEMA, closure, git_state, write_json
from lite.acceptance.result_folder import RECEIPT, RUN, claimed
from lite.acceptance.resumption import can_go_on
from lite.acceptance.sides import ProveConfig, check_choice, same_run
from lite.errors import InputError, ProbeError


def prove(config: ProveConfig, command: Sequence[str], progress: Progress) -> dict[str, Any]:
    """-> the receipt, also written to out/receipt.json.

    What goes wrong once the folder is there (a bad checkpoint, a failed probe) gives status "inconclusive" and its reason; a choice that
    can be refused before raises InputError and writes nothing.
    """
    plant = find_plant(config.plant) if config.plant else None
    check_choice(config, plant)
    go_on = config.resume and can_go_on(config)
    with claimed(config.out, go_on):
        return _prove(config, plant, command, progress, go_on)


def _prove(config: ProveConfig, plant: Plant | None, command: Sequence[str], progress: Progress, go_on: bool) -> dict[str, Any]:
    receipt: dict[str, Any] = {
        "schema": SCHEMA, "status": "inconclusive", "reason": "did not finish", "command": list(command), "plant": config.plant,
    }  # fmt: skip
    if not go_on:
        write_json(config.out / RECEIPT, receipt)
        write_json(config.out / RUN, same_run(config))

    def rolling(found: dict[str, Any]) -> None:
        """What is known so far, for whoever looks at a long run; without the closure that a receipt of a whole run has."""
        write_json(config.out / RECEIPT, receipt | found)

    try:
        receipt |= Proof(config, plant, progress, rolling).run()
    except (InputError, ProbeError) as error:
        if go_on and isinstance(error, InputError):
            raise  # nothing was added to what is there
        receipt["reason"] = str(error)
    except Exception as error:
        receipt["reason"] = f"unexpected {type(error).__name__}: {error}"
        write_json(config.out / RECEIPT, receipt)
        raise
    receipt |= {"git": git_state(), "closure": closure()}
    write_json(config.out / RECEIPT, receipt)
    return receipt
