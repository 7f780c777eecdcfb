"""The launch scripts, in the modes that start nothing."""

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.recipe_commands import ARMS, NAMES, RECIPES, dry_run, environment, overrides, recipe, words

# The exact arm's command, byte for byte. A run that goes on from its checkpoints must be started by the same one.
EXACT_SHA256 = {
    "nemotron_h": "2f8f015ba265b0230201c41db4968b1924274d24955c6ad86e1ae82f46971270",
    "qwen3_dense": "6bfef17848054b17c0f7fe240ca18899e920b17221fcac25a13459bf983a7b72",
}
RENEW = """the exact command of {name}.sh has changed. If that is meant, look at the difference to the commit before
  cd examples/verl_mlite/recipes && env -i PATH="$PATH" HOME=/home/user OUT=/runs/out DRY_RUN=1 bash {name}.sh
and write {found} into EXACT_SHA256, and what changed and why into docs/recipes.md."""

GATHER = "+ray_kwargs.ray_init.runtime_env.env_vars."


@pytest.mark.parametrize("name", NAMES)
def test_the_exact_command_is_the_same_to_the_byte(name: str) -> None:
    found = hashlib.sha256(dry_run(name).encode()).hexdigest()
    assert found == EXACT_SHA256[name], RENEW.format(name=name, found=found)


@pytest.mark.parametrize("name", NAMES)
def test_exact_is_the_default_and_the_switch_is_forwarded_with_its_twin(name: str) -> None:
    assert dry_run(name) == dry_run(name, arm="1")
    for arm in ARMS:
        command = words(dry_run(name, arm=arm, MLITE_EXACT="1" if arm == "0" else "0"))  # what a shell held is of no account
        assert command[:3] == ["env", f"VLLM_BATCH_INVARIANT={arm}", f"MLITE_EXACT={arm}"]
        forwarded = dict(o.removeprefix(GATHER).split("=") for o in command if o.startswith(GATHER))
        assert {key: forwarded[key] for key in ("VLLM_BATCH_INVARIANT", "MLITE_EXACT")} == {
            "VLLM_BATCH_INVARIANT": f'"{arm}"', "MLITE_EXACT": f'"{arm}"',
        }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_arms_share_no_folder(name: str) -> None:
    def folders(arm: str) -> list[str]:
        return [word for word in words(dry_run(name, arm=arm)) if "/runs/out" in word]

    exact, baseline = folders("1"), folders("0")
    assert len(exact) == len(baseline) == 4 and all("/runs/out/" in word for word in exact)
    assert all("/runs/out-baseline/" in word for word in baseline)


@pytest.mark.parametrize("name", NAMES)
def test_the_arms_differ_only_by_what_belongs_to_an_arm(name: str) -> None:
    def keys(arm: str) -> set[str]:
        return {override.split("=")[0].lstrip("+") for override in overrides(name, arm=arm)}

    exact, baseline = keys("1") - keys("0"), keys("0") - keys("1")
    ours = ("hydra.searchpath", "actor_rollout_ref.actor.engine.", "actor_rollout_ref.rollout.engine_kwargs.vllm.")
    assert {key for key in exact if not key.startswith(ours)} == {
        "actor_rollout_ref.rollout.logprobs_mode", "actor_rollout_ref.rollout.enable_prefix_caching",
    }  # fmt: skip
    assert all(key.startswith("actor_rollout_ref.actor.megatron.") for key in baseline) or name == "nemotron_h"
    assert ("actor_rollout_ref.actor.megatron.router_replay.mode" in baseline) == (name == "nemotron_h")


@pytest.mark.parametrize(("temperature", "mode"), [("1", "raw"), ("1.0", "raw"), ("0.6", "processed"), ("1.5", "processed")])
def test_the_logprobs_mode_follows_the_temperature(temperature: str, mode: str) -> None:
    found = overrides("qwen3_dense", TEMPERATURE=temperature)
    assert f"actor_rollout_ref.rollout.logprobs_mode={mode}_logprobs" in found


def test_composing_alone_prints_the_configuration_and_makes_nothing(tmp_path: Path) -> None:
    odd = tmp_path / 'a "b", {c}=[d]'  # what Hydra's grammar would read something into
    script = ["bash", str(RECIPES / "nemotron_h.sh"), "trainer.save_freq=7"]
    variables = {
        "COMPOSE_ONLY": "1", "OUT": str(odd), "TRAIN_FILES": f"{tmp_path}/x y.parquet,{tmp_path}/z.parquet", "NCCL_NVLS_ENABLE": "0",
        "PYTHON": sys.executable,
    }  # fmt: skip
    runs = [
        subprocess.Popen(script, env=environment(arm, **variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for arm in ARMS
    ]
    for arm, run in zip(ARMS, runs, strict=True):
        printed, errors = run.communicate(timeout=300)
        assert run.returncode == 0, errors
        config = OmegaConf.create(printed)
        folder = f"{odd}" if arm == "1" else f"{odd}-baseline"
        assert config.trainer.default_local_dir == f"{folder}/checkpoints" and config.trainer.save_freq == 7
        assert config.data.train_files == [f"{tmp_path}/x y.parquet", f"{tmp_path}/z.parquet"]
        forwarded = config.ray_kwargs.ray_init.runtime_env.env_vars
        assert dict(forwarded) == {
            "VLLM_BATCH_INVARIANT": arm, "MLITE_EXACT": arm, "VERL_FILE_LOGGER_PATH": f"{folder}/metrics.jsonl", "NCCL_NVLS_ENABLE": "0",
        }  # fmt: skip
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_help_says_how_to_call_it(name: str) -> None:
    done = recipe(name, "-h")
    assert done.returncode == 0 and "examples:" in done.stdout
    assert all(word in done.stdout for word in ("VLLM_BATCH_INVARIANT=0", "DRY_RUN=1", "COMPOSE_ONLY=1", "MODEL_PATH", "STEPS", "OUT"))


def test_a_switch_that_is_neither_is_refused() -> None:
    done = recipe("qwen3_dense", arm="yes", DRY_RUN="1")
    assert done.returncode == 2 and done.stderr == "error: VLLM_BATCH_INVARIANT: is 'yes'; set it to 1 (exact) or 0 (baseline)\n"


def test_nothing_is_made_where_preflight_refuses(tmp_path: Path) -> None:
    done = recipe("qwen3_dense", OUT=str(tmp_path / "out"), MODEL_PATH=str(tmp_path / "none"), PYTHON=sys.executable)
    assert done.returncode == 2 and "none: no such folder" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("variable", "value"), [
    ("DRY_RUN", "true"), ("COMPOSE_ONLY", "yes"), ("PROMPT_TOKENS", "abc"), ("RESPONSE_TOKENS", "2k"), ("PYTHON", "/nope/python"),
    ("MODEL_PATH", "/m/a\\"), ("OUT", "/m/${x}"), ("OFFLOAD", "no"), ("TEMPERATURE", "1e0"), ("WANDB_MODE", "a${b}c"),
])  # fmt: skip
def test_a_parameter_that_no_run_can_have_is_refused_by_name(variable: str, value: str) -> None:
    done = recipe("qwen3_dense", **({"DRY_RUN": "1"} | {variable: value}))
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"error: {variable}: ") and done.stderr.count("\n") == 1


def test_an_interpreter_without_verl_is_refused_by_name(tmp_path: Path) -> None:
    """-S: without site-packages."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    for mode in ({}, {"COMPOSE_ONLY": "1"}):
        done = recipe("qwen3_dense", OUT=str(tmp_path / "out"), PYTHON=str(bare), **mode)
        assert done.returncode == 2 and not done.stdout and done.stderr.startswith("error: PYTHON: ") and done.stderr.count("\n") == 1
        assert "lacks verl or verl_mlite" in done.stderr


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = recipe("qwen3_dense", OUT=str(tmp_path / "file"), PYTHON="true")  # for which every check passes
    assert done.returncode == 2 and done.stderr == f"error: OUT: '{tmp_path}/file' is no folder that can be written to; name another\n"


def test_a_run_in_the_folder_of_another_leaves_its_records_together(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    records = ("command.sh", "hydra", "train.log", "metrics.jsonl")
    for name in records:
        (out / name).write_text("earlier")
    assert recipe("qwen3_dense", OUT=str(out), PYTHON="true").returncode == 0  # a trainer that does nothing
    (earlier,) = out.glob("earlier-*")
    assert {path.name: path.read_text() for path in earlier.iterdir()} == dict.fromkeys(records, "earlier")
    assert "main_ppo" in (out / "command.sh").read_text() and not (out / "metrics.jsonl").exists()


def test_a_foreign_log_in_the_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("mine")
    assert recipe("qwen3_dense", OUT=str(tmp_path), PYTHON="true").returncode == 0
    (earlier,) = tmp_path.glob("earlier-*/train.log")
    assert earlier.read_text() == "mine"


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    """The second is refused while the first goes on, and not afterwards, though a process of the first lives on, as Ray's do."""
    trainer = tmp_path / "trainer"
    waits = "sleep 30 & touch $STARTED; while [[ -e $STARTED ]]; do sleep 0.1; done"
    trainer.write_text(f"#!/bin/bash\n[[ $2 != verl.trainer.main_ppo ]] || {{ {waits}; }}\n")
    trainer.chmod(0o755)
    started = tmp_path / "started"
    variables = {"OUT": str(tmp_path / "out"), "PYTHON": str(trainer), "STARTED": str(started)}
    script = ["bash", str(RECIPES / "qwen3_dense.sh")]
    with subprocess.Popen(script, env=environment(None, **variables), stdout=subprocess.DEVNULL) as first:
        deadline = time.monotonic() + 20
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        second = recipe("qwen3_dense", OUT=variables["OUT"], PYTHON="true")
        started.unlink()
    assert second.returncode == 2 and second.stderr == f"error: OUT: a run is going on in '{tmp_path}/out'; name another\n"
    assert first.returncode == 0 and not list((tmp_path / "out").glob("earlier-*"))
    assert recipe("qwen3_dense", OUT=variables["OUT"], PYTHON="true").returncode == 0


def test_a_slash_at_the_end_of_the_folder_does_not_join_the_arms() -> None:
    assert dry_run("qwen3_dense", arm="0", OUT="/runs/out/") == dry_run("qwen3_dense", arm="0")


def test_blanks_and_commas_between_paths_are_no_part_of_them() -> None:
    found = overrides("qwen3_dense", TRAIN_FILES=" /a.parquet , /b c.parquet,", VAL_FILES="~/a.parquet")
    assert 'data.train_files=["/a.parquet","/b c.parquet"]' in found and 'data.val_files=["~/a.parquet"]' in found


def test_paths_are_whole_since_rays_workers_may_have_another_folder() -> None:
    here = Path.cwd()
    relative = {"OUT": "runs/x/", "MODEL_PATH": "../m", "TRAIN_FILES": "a.parquet, /b.parquet"}
    whole = {"OUT": f"{here}/runs/x", "MODEL_PATH": f"{here}/../m", "TRAIN_FILES": f"{here}/a.parquet,/b.parquet"}
    for arm in ARMS:
        assert dry_run("qwen3_dense", arm=arm, **relative) == dry_run("qwen3_dense", arm=arm, **whole)


@pytest.mark.parametrize(("arm", "engine"), [("1", "megatron"), ("0", "mlite")])
def test_the_other_arms_engine_is_refused_by_the_switch(arm: str, engine: str) -> None:
    done = recipe("qwen3_dense", f"model_engine={engine}", arm=arm, DRY_RUN="1")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: model_engine: ") and "VLLM_BATCH_INVARIANT" in done.stderr and done.stderr.count("\n") == 1


def test_composing_alone_names_a_misspelt_key_in_one_line() -> None:
    done = recipe("qwen3_dense", "trainer.nope=1", COMPOSE_ONLY="1", PYTHON=sys.executable)
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
    assert done.stderr.startswith("preflight: trainer.nope: is not a key of verl's configuration; ")
