"""`python -m verl_mlite.preflight OVERRIDES`: what would stop a run or make its exactness void, found before Ray and the GPUs start.

OVERRIDES are those of `python -m verl.trainer.main_ppo`. Prints one line a check that passed; at the first that does not, one line with
what, where and what to do, and exit status 2. No GPU is touched and no Ray started.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from lite.errors import InputError, nearest
from lite.model.registry import family, family_of
from lite.primitive.ckpt.hf_config import load_hf_config
from lite.primitive.ckpt.safetensors_files import read_tensors
from lite.primitive.kernels.vllm.version import require_verified_version
from verl_mlite.preflight_tables import ENGINES, NUMBERS, OPTIONAL, ROLLOUT, SETTINGS, VERIFIED, VLLM

SWITCHES = ("VLLM_BATCH_INVARIANT", "MLITE_EXACT")
FORWARDED = "ray_kwargs.ray_init.runtime_env.env_vars"
OVERLONG, MEGATRON = "reward.reward_kwargs.overlong_buffer_cfg", "actor_rollout_ref.actor.megatron"


@dataclass(frozen=True)
class Job:
    """What would run: main_ppo's configuration, and this process's environment."""

    config: DictConfig
    environment: Mapping[str, str]

    def get(self, key: str) -> Any:
        found = OmegaConf.select(self.config, key)
        return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found

    def require(self, key: str, allowed: tuple[Any, ...], fix: str) -> str:
        found = self.get(key)
        if found not in allowed:
            raise InputError(key, f"is {found!r}" if found is not None else "is not set", fix)
        return f"{key} = {found}"

    @property
    def exact(self) -> bool:
        return self.environment.get("MLITE_EXACT") == "1"

    def model_config(self) -> Any:
        """lite's, by the family of the checkpoint."""
        hf = load_hf_config(Path(self.get("actor_rollout_ref.model.path")))
        return family(family_of(hf.get("model_type"))).build_model_config(hf)


def preflight(overrides: list[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """-> a line a check. Raises InputError at the first that fails."""
    return checked(Job(composed(overrides), environment))


def checked(job: Job) -> list[str]:
    return [line for check in CHECKS for line in check(job)]


def composed(overrides: list[str]) -> DictConfig:
    """As main_ppo would; what Hydra does not take is named with the nearest key. verl itself is not imported."""
    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        raise InputError("verl", "is not installed", "pip install verl==0.9.1")
    with initialize_config_dir(str(Path(spec.origin).parent / "trainer" / "config"), version_base=None):
        try:
            return compose("ppo_trainer", overrides)
        except ValueError as error:  # of an override without a key, which Hydra takes for a group
            raise InputError("overrides", str(error), "write each as key=value") from None
        except HydraException as error:
            message = str(error)
            unknown = re.search(r"Could not (?:override|delete from config\.) '([^']+)'", message)
            if unknown is None:
                raise InputError("overrides", " ".join(message.split("Config search path")[0].split()), "correct them") from None
            groups = [o for o in overrides if o.startswith(("model_engine=", "hydra.searchpath=")) or "@" in o.split("=")[0]]
            hint = _nearest_key(compose("ppo_trainer", groups), unknown[1])
            raise InputError(unknown[1], "is not a key of verl's configuration", hint) from None


def _nearest_key(config: Any, key: str) -> str:
    """Of the first part of the key that the configuration does not have."""
    for name in key.split("."):
        if name not in config:
            return nearest(name, map(str, config))
        config = config._get_node(name)
    return "correct it"


def check_switch(job: Job) -> list[str]:
    """One switch, and the same here and in every worker: verl hands on VLLM_BATCH_INVARIANT alone, and that as 0 where it is unset."""
    here = {name: job.environment.get(name, "0") for name in SWITCHES}
    unset = {"VLLM_BATCH_INVARIANT": here["VLLM_BATCH_INVARIANT"], "MLITE_EXACT": "0"}
    workers = {name: str(job.get(f"{FORWARDED}.{name}") or unset[name]) for name in SWITCHES}
    if len(set(here.values())) != 1 or here["MLITE_EXACT"] not in ("0", "1"):
        said = " and ".join(f"{name} is {value}" for name, value in here.items())
        raise InputError("environment", said, "set both to 1 (exact) or both to 0")
    for name in SWITCHES:
        if workers[name] != here[name]:
            raise InputError(f"{FORWARDED}.{name}", f"is {workers[name]}, {here[name]} here", f"add +{FORWARDED}.{name}='\"{here[name]}\"'")
    return [f"arm: {'exact' if job.exact else 'baseline'}, here and in every worker"]


def check_settings(job: Job) -> list[str]:
    lines = []
    if job.get(f"{ROLLOUT}.full_determinism") and job.get(f"{ROLLOUT}.n") > 1:
        what = f"is True with rollout.n={job.get(f'{ROLLOUT}.n')}: all samples of a prompt get one seed and coincide"
        raise InputError(f"{ROLLOUT}.full_determinism", what, "set it to False; exactness does not need it")
    if job.exact:
        lines = [job.require(*setting) for setting in SETTINGS]
        mode = "raw_logprobs" if job.get(f"{ROLLOUT}.temperature") == 1 else "processed_logprobs"
        fix = f"set it to {mode}, which fits temperature {job.get(f'{ROLLOUT}.temperature')}"
        lines.append(job.require(f"{ROLLOUT}.logprobs_mode", (mode,), fix))
        trainers = job.get(f"{ENGINES[0]}.attention_backend_override") or "FLASH_ATTN"
        lines.append(job.require(f"{VLLM}.attention_backend", (trainers,), f"set it to the trainer's, {trainers}"))
        for key in job.get(VLLM):
            if key not in VERIFIED:
                raise InputError(f"{VLLM}.{key}", "was not verified, and wins over verl's own key", "leave it out")
    elif job.get("actor_rollout_ref.actor.strategy") == "mlite":
        fix = f"set both to 1, here and in {FORWARDED} (the recipes do)"
        raise InputError("environment", f"{' and '.join(SWITCHES)} are off: model_engine=mlite is not exact so", fix)
    return lines


def check_numbers(job: Job) -> list[str]:
    for key, kind, above, most in NUMBERS:
        found = job.get(key)
        if found is None and key in OPTIONAL:
            continue
        number = isinstance(found, (int, float) if kind is float else int) and not isinstance(found, bool)
        if not number or not above < found <= most:
            said = "a whole number" if kind is int else "a number"
            raise InputError(key, f"is {found!r}", f"give {said} above {above}" + (f", at most {most:.0f}" if most < 1e9 else ""))
    batch, mini = job.get("data.train_batch_size"), job.get("actor_rollout_ref.actor.ppo_mini_batch_size")
    if batch % mini:
        raise InputError("actor_rollout_ref.actor.ppo_mini_batch_size", f"is {mini}, of batches of {batch}", "give one that divides them")
    gpus, ranks = job.get("trainer.n_gpus_per_node") * job.get("trainer.nnodes"), job.get(f"{MEGATRON}.expert_model_parallel_size")
    if batch * job.get(f"{ROLLOUT}.n") % gpus:
        what = f"is {batch}, of {job.get(f'{ROLLOUT}.n')} responses each, on {gpus} GPUs"
        raise InputError("data.train_batch_size", what, "give one that makes a whole number of responses a GPU")
    if not job.exact and ranks and gpus % ranks:
        raise InputError(f"{MEGATRON}.expert_model_parallel_size", f"is {ranks}, on {gpus} GPUs", "give one that divides them")
    overlong, longest = job.get(f"{OVERLONG}.len"), job.get("reward.reward_kwargs.max_resp_len")
    if job.get(f"{OVERLONG}.enable") and not (isinstance(overlong, int) and 0 < overlong <= (longest or 0)):
        raise InputError(f"{OVERLONG}.len", f"is {overlong!r}, of responses of up to {longest} tokens", "give 1 to as many")
    return [f"{len(NUMBERS)} numbers are in range"]


def check_model(job: Job) -> list[str]:
    folder = Path(str(job.get("actor_rollout_ref.model.path")))
    kind = load_hf_config(folder).get("model_type")
    if not any(folder.glob("*.safetensors")):
        raise InputError(folder, "holds no safetensors", "give the folder of a safetensors checkpoint")
    next(read_tensors(folder), None)  # it looks at every file's header first
    if not any(folder.glob("*token*")):
        raise InputError(folder, "holds no tokenizer", "add its files: verl formats the prompts with it")
    lines = [f"model: {folder}, {kind}"]
    if not job.exact and kind == "nemotron_h":
        for key in ("actor_rollout_ref.model.use_remove_padding", f"{MEGATRON}.use_remove_padding"):
            fix = "set it to False, as nemotron_h.sh does: verl packs without the boundaries that Mamba layers need"
            lines.append(job.require(key, (False,), fix))
    if job.exact and job.model_config().mamba is not None:
        key = f"{VLLM}.mamba_ssm_cache_dtype"
        lines.append(job.require(key, ("float32",), f"add +{key}=float32: the scan's states are"))
    return lines


def check_packages(job: Job) -> list[str]:
    if not job.exact:
        needed, lines = ["vllm", "megatron.core", "megatron.bridge"], []
    else:
        lines = [f"vllm {require_verified_version()}, which was verified"]
        if not any(e.value == "lite.vllm_plugin:register" for e in entry_points(group="vllm.general_plugins")):
            raise InputError("megatron-lite", "is on the path but not installed, so vLLM does not see its plugin", "pip install it")
        needed = ["vllm", *(["mamba_ssm", "causal_conv1d"] if job.model_config().mamba is not None else [])]
    for name in needed:
        if not _installed(name):
            raise InputError("packages", f"{name} is not installed", "pip install '.[gpu]' in the checkout" if job.exact else "install it")
    return [*lines, f"packages: {', '.join(needed)}"]


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def check_data(job: Job) -> list[str]:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema

    lines, prompts = [], job.get("data.prompt_key")
    for key in ("data.train_files", "data.val_files"):
        found = job.get(key)
        if not found:
            raise InputError(key, "is not set", "name a file of prompts")
        for name in [found] if isinstance(found, str) else found:
            path = Path(name).expanduser()
            if "://" in name:
                continue
            if not path.is_file():
                raise InputError(key, f"{name} is no file", "correct the path")
            if path.suffix not in (".parquet", ".json", ".jsonl"):
                raise InputError(key, f"{name} is of a kind that verl does not read", "give a .parquet, .json or .jsonl")
            try:
                columns = read_schema(path).names if path.suffix == ".parquet" else [prompts]
            except ArrowException as error:
                raise InputError(key, f"{name} is no whole parquet file ({error})", "write it again, or give a .json or .jsonl") from None
            if prompts not in columns:
                raise InputError(key, f"{name} has no column {prompts!r}", "add it, or name another by data.prompt_key")
        lines.append(f"{key}: {found}")
    return lines


def check_engine(job: Job) -> list[str]:
    """Builds the configurations of the actor and of the reference policy's engine as the driver and each worker do. The last check: it imports verl, which takes
    seconds."""
    from verl.utils.config import omega_conf_to_dataclass

    if job.exact:
        from verl_mlite.engine_config import MliteEngineConfig

        known = {field.name for field in fields(MliteEngineConfig)}
        for engine in ENGINES:
            for key in job.get(engine):
                if key not in known | {"_target_"}:
                    raise InputError(f"{engine}.{key}", "is not a known key", nearest(key, known))
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    estimator = job.get("algorithm.adv_estimator")
    known_ones = set(ADV_ESTIMATOR_REGISTRY) - ({"gae"} if job.exact else set())  # which needs a critic
    if estimator not in known_ones:
        raise InputError("algorithm.adv_estimator", f"is {estimator!r}", nearest(str(estimator), known_ones))
    try:
        actor = omega_conf_to_dataclass(job.config.actor_rollout_ref.actor)
        if job.exact:
            from verl_mlite.configs import check_checkpoint, optimizer_config

            omega_conf_to_dataclass(job.config.actor_rollout_ref.ref.engine)
            optimizer_config(actor.optim)
            check_checkpoint(actor.checkpoint)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, InputError):
            cause = cause.__cause__
        raise cause or InputError("actor_rollout_ref.actor", str(error), "correct it") from None
    return ["actor_rollout_ref: the trainer's configuration is built"]


CHECKS: tuple[Callable[[Job], list[str]], ...] = (
    check_switch, check_numbers, check_settings, check_model, check_packages, check_data, check_engine,
)  # fmt: skip


def main() -> int:
    try:
        for line in preflight(sys.argv[1:]):
            print(f"ok  {line}")
    except InputError as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
