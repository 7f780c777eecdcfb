"""python -m verl_mlite.preflight OVERRIDES: what would stop a run or make its exactness void, found before Ray and the GPUs start.

OVERRIDES are those of python -m verl.trainer.main_ppo. Prints one line a check that passed; at the first that does not, one line with
what, where and what to do, and exit status 2. With --compose before them the composed configuration is printed, and nothing checked but its
keys. No GPU is touched and no Ray started.
"""

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.metadata import entry_points
from importlib.util import find_spec

from omegaconf import OmegaConf

from lite.errors import InputError, nearest
from lite.primitive.kernels.vllm.version import require_verified_version
from verl_mlite import preflight_tables as tables
from verl_mlite.preflight_files import check_data, check_model, check_paths, check_positions
from verl_mlite.preflight_job import Job, composed
from verl_mlite.preflight_tables import ENGINES, MEGATRON, ROLLOUT, VLLM

SWITCHES = ("VLLM_BATCH_INVARIANT", "MLITE_EXACT")
FORWARDED = "ray_kwargs.ray_init.runtime_env.env_vars"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"


def preflight(overrides: list[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """-> a line a check. Raises InputError at the first that fails."""
    return checked(Job(composed(overrides), environment))


def checked(job: Job) -> list[str]:
    return [line for check in CHECKS for line in check(job)]


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
            set_it = f"{FORWARDED}.{name}='\"{here[name]}\"'"
            fix = f"add +{set_it}" if job.get(f"{FORWARDED}.{name}") is None else f"set {set_it}"
            raise InputError(f"{FORWARDED}.{name}", f"is {workers[name]}, {here[name]} here", fix)
    return [f"arm: {'exact' if job.exact else 'baseline'}, here and in every worker"]


def check_settings(job: Job) -> list[str]:
    lines = [job.require(*setting) for setting in tables.SETTINGS_OF_BOTH]
    if job.get(f"{ROLLOUT}.full_determinism") and job.get(f"{ROLLOUT}.n") > 1:
        what = f"is True with rollout.n={job.get(f'{ROLLOUT}.n')}: all samples of a prompt get one seed and coincide"
        raise InputError(f"{ROLLOUT}.full_determinism", what, "set it to False; exactness does not need it")
    if job.exact:
        lines += [job.require(*setting) for setting in tables.SETTINGS]
        mode = "raw_logprobs" if job.get(f"{ROLLOUT}.temperature") == 1 else "processed_logprobs"
        fix = f"set it to {mode}, which fits temperature {job.get(f'{ROLLOUT}.temperature')}"
        lines.append(job.require(f"{ROLLOUT}.logprobs_mode", (mode,), fix))
        trainers = job.get(f"{ENGINES[0]}.attention_backend_override") or "FLASH_ATTN"
        lines.append(job.require(f"{VLLM}.attention_backend", (trainers,), f"set it to the trainer's, {trainers}"))
        for key in job.get(VLLM):
            if key not in tables.VERIFIED:
                raise InputError(f"{VLLM}.{key}", "was not verified, and wins over verl's own key", "leave it out")
        for key in job.get(f"{VLLM}.compilation_config"):
            if key not in tables.COMPILATION:
                raise InputError(f"{VLLM}.compilation_config.{key}", "was not verified", "leave it out")
    elif job.get("actor_rollout_ref.actor.strategy") == "mlite":
        fix = f"set both to 1, here and in {FORWARDED} (the recipes do)"
        raise InputError("environment", f"{' and '.join(SWITCHES)} are off: model_engine=mlite is not exact so", fix)
    return lines


def check_numbers(job: Job) -> list[str]:
    for key, kind, above, most in tables.NUMBERS:
        found = job.get(key)
        if found is None and key in tables.OPTIONAL:
            continue
        number = isinstance(found, (int, float) if kind is float else int) and not isinstance(found, bool)
        if not number or not above < found <= most:
            said = "a whole number" if kind is int else "a number"
            raise InputError(key, f"is {found!r}", f"give {said} above {above}" + (f", at most {most:.0f}" if most < 1e9 else ""))
    if job.get(f"{ROLLOUT}.n") == 1 and job.get("algorithm.adv_estimator") in tables.GROUPED:
        raise InputError(f"{ROLLOUT}.n", "is 1: a sample alone has no group to be compared with", "give a whole number above 1")
    batch, mini = job.get("data.train_batch_size"), job.get("actor_rollout_ref.actor.ppo_mini_batch_size")
    if batch % mini:
        raise InputError("actor_rollout_ref.actor.ppo_mini_batch_size", f"is {mini}, of batches of {batch}", "give one that divides them")
    gpus, ranks = job.get("trainer.n_gpus_per_node") * job.get("trainer.nnodes"), job.get(f"{MEGATRON}.expert_model_parallel_size")
    if batch * job.get(f"{ROLLOUT}.n") % gpus:
        what = f"is {batch}, of {job.get(f'{ROLLOUT}.n')} responses each, on {gpus} GPUs"
        raise InputError("data.train_batch_size", what, "give one that makes a whole number of responses a GPU")
    if not job.exact and ranks and gpus % ranks:
        raise InputError(f"{MEGATRON}.expert_model_parallel_size", f"is {ranks}, on {gpus} GPUs", "give one that divides them")
    whole = job.get("data.max_prompt_length") + job.get("data.max_response_length")
    for key, where in tables.LENGTHS.items():
        if (found := job.get(key)) is not None and (where is None or job.get(where)) and not (isinstance(found, int) and found >= whole):
            raise InputError(key, f"is {found!r}, of prompts and responses of up to {whole} tokens together", "give at least as many")
    overlong, longest = job.get(f"{OVERLONG}.len"), job.get("reward.reward_kwargs.max_resp_len")
    read = job.get("reward.reward_manager.name") == "dapo" and job.get(f"{OVERLONG}.enable")
    if read and not (isinstance(overlong, int) and 0 < overlong <= (longest or 0)):
        raise InputError(f"{OVERLONG}.len", f"is {overlong!r}, of responses of up to {longest} tokens", "give 1 to as many")
    return [f"{len(tables.NUMBERS)} numbers are in range"]


def check_packages(job: Job) -> list[str]:
    if not job.exact:
        needed, lines = ["vllm", "megatron.core", "megatron.bridge"], []
    else:
        lines = [f"vllm {require_verified_version()}, which was verified"]
        if not any(e.value == "lite.vllm_plugin:register" for e in entry_points(group="vllm.general_plugins")):
            raise InputError("megatron-lite", "is on the path but not installed, so vLLM does not see its plugin", "pip install it")
        needed = ["vllm", *(["mamba_ssm", "causal_conv1d"] if job.model_family()[1].mamba is not None else [])]
    for name in needed:
        if not _installed(name):
            raise InputError("packages", f"{name} is not installed", "pip install '.[gpu]' in the checkout" if job.exact else "install it")
    loggers = job.get("trainer.logger")
    for name in loggers if isinstance(loggers, list) else [loggers]:
        if name in tables.LOGGERS and not _installed(name):
            raise InputError("trainer.logger", f"{name} is not installed", "pip install it, or leave it out")
    return [*lines, f"packages: {', '.join(needed)}"]


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def check_engine(job: Job) -> list[str]:
    """Builds the configurations of the actor, of the reference policy's engine and of the rollout as the driver and each worker do. It is
    the last: it imports verl, which takes seconds."""
    from verl.utils.config import omega_conf_to_dataclass

    if job.exact:
        from verl_mlite.engine_config import MliteEngineConfig

        known = {field.name for field in fields(MliteEngineConfig)}
        for engine in ENGINES:
            for key in job.get(engine):
                if key not in known | {"_target_"}:
                    raise InputError(f"{engine}.{key}", "is not a known key", nearest(key, known))
    import verl.experimental.reward_loop.reward_manager  # noqa: F401 (which registers them)
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.utils.tracking import Tracking

    estimators = set(ADV_ESTIMATOR_REGISTRY) - ({"gae"} if job.exact else set())  # which needs a critic
    for key, known_ones in {
        "algorithm.adv_estimator": estimators,
        "actor_rollout_ref.actor.policy_loss.loss_mode": set(POLICY_LOSS_REGISTRY),
        "trainer.logger": set(Tracking.supported_backend),
        **({"reward.reward_manager.name": set(REWARD_MANAGER)} if job.get("reward.reward_manager.source") == "register" else {}),
    }.items():
        found = job.get(key)
        for name in found if isinstance(found, list) else [found]:
            if name not in known_ones:
                raise InputError(key, f"is {name!r}", nearest(str(name), known_ones))
    try:
        actor = omega_conf_to_dataclass(job.config.actor_rollout_ref.actor)
        omega_conf_to_dataclass(job.config.actor_rollout_ref.rollout)
        if job.exact:
            from verl_mlite.configs import check_checkpoint, optimizer_config

            omega_conf_to_dataclass(job.config.actor_rollout_ref.ref.engine)
            optimizer_config(actor.optim)
            check_checkpoint(actor.checkpoint)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, InputError):
            cause = cause.__cause__
        raise cause or InputError("actor_rollout_ref", str(error), "correct it") from None
    return ["actor_rollout_ref: the trainer's configuration is built"]


CHECKS: tuple[Callable[[Job], list[str]], ...] = (
    check_switch, check_numbers, check_settings, check_model, check_positions, check_packages, check_data, check_paths, check_engine,
)  # fmt: skip


def main() -> int:
    warnings.simplefilter("ignore")  # of the engines that verl could not import
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        if arguments[:1] == ["--compose"]:
            print(OmegaConf.to_yaml(composed(arguments[1:]), resolve=True), end="")
        else:
            for line in preflight(arguments):
                print(f"ok  {line}")
    except InputError as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
