"""The recipes of examples/verl_mlite, run with DRY_RUN=1 in an environment that holds nothing of the machine's."""

import os
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "examples" / "verl_mlite" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.sh") if path.stem != "common")
ARMS = ("1", "0")


def environment(arm: str | None, **variables: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    chosen = {} if arm is None else {"VLLM_BATCH_INVARIANT": arm}
    return kept | {"HOME": "/home/user", "OUT": "/runs/out"} | chosen | variables


def recipe(name: str, *arguments: str, arm: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    script = ["bash", str(RECIPES / f"{name}.sh"), *arguments]
    return subprocess.run(script, env=environment(arm, **variables), capture_output=True, text=True, timeout=300)


def dry_run(name: str, *arguments: str, arm: str | None = None, **variables: str) -> str:
    done = recipe(name, *arguments, arm=arm, **({"DRY_RUN": "1"} | variables))
    assert done.returncode == 0, done.stderr
    return done.stdout


def words(command: str) -> list[str]:
    """As a shell splits the printed command."""
    return shlex.split(command.replace("\\\n", ""))


def overrides(name: str, *arguments: str, arm: str | None = None, **variables: str) -> list[str]:
    """What the recipe hands to main_ppo."""
    command = words(dry_run(name, *arguments, arm=arm, **variables))
    return command[command.index("verl.trainer.main_ppo") + 1 :]
