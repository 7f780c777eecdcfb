"""main_ppo's configuration as Hydra composes it, and what preflight asks it for."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from lite.errors import InputError, nearest
from lite.model.registry import family, family_of
from lite.primitive.ckpt.hf_config import load_hf_config

CLOSED = (
    "trainer", "data", "algorithm", "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.ref",
    "actor_rollout_ref.rollout",
)  # fmt: skip
"""Groups whose keys are all verl's own; what lies below them may be handed on to others."""


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

    @property
    def model(self) -> Path:
        return Path(str(self.get("actor_rollout_ref.model.path")))

    @property
    def formats_prompts(self) -> bool:
        """Whether verl's own agent loops make the prompts' tokens, by the tokenizer's chat template."""
        return not self.get("actor_rollout_ref.rollout.agent.agent_loop_config_path")

    def model_family(self) -> tuple[Any, Any]:
        """-> (the family of the checkpoint, lite's configuration of the model)."""
        hf = load_hf_config(self.model)
        found = family(family_of(hf.get("model_type")))
        return found, found.build_model_config(hf)


def composed(overrides: list[str]) -> DictConfig:
    """As main_ppo would; what Hydra does not take is named with the nearest key. verl itself is not imported."""
    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        raise InputError("verl", "is not installed", "pip install verl==0.9.1")
    groups = [o for o in overrides if o.startswith(("model_engine=", "hydra.searchpath=")) or "@" in o.split("=")[0]]
    with initialize_config_dir(str(Path(spec.origin).parent / "trainer" / "config"), version_base=None):
        try:
            found = compose("ppo_trainer", overrides)
        except ValueError as error:  # of an override without a key, which Hydra takes for a group, or of a name where a list has numbers
            whole = all(re.match(r"~|[^=]+=", o) for o in overrides)
            raise InputError("overrides", str(error), "correct them" if whole else "write each as key=value") from None
        except HydraException as error:
            message = str(error)
            unknown = re.search(r"Could not (?:override|delete from config\.) '([^']+)'", message)
            if unknown is None:
                fix = "add hydra.searchpath=[pkg://verl_mlite.config]" if "'model_engine/mlite'" in message else "correct them"
                raise InputError("overrides", " ".join(message.split("Config search path")[0].split()), fix) from None
            hint = _nearest_key(compose("ppo_trainer", groups), unknown[1])
            raise InputError(unknown[1], "is not a key of verl's configuration", hint) from None
        _refuse_near_misses([o.split("=")[0] for o in overrides], compose("ppo_trainer", groups))
        return found


def _nearest_key(config: Any, key: str) -> str:
    """Of the first part of the key that the configuration does not have."""
    above = "the configuration"
    for name in key.split("."):
        if not OmegaConf.is_dict(config) or config._is_none():
            return f"leave it out: {above} holds no keys"
        if name not in config:
            return nearest(name, map(str, config)) if len(config) else f"{above} has none yet; + adds one"
        config, above = config._get_node(name), name
    return "correct it"


def _refuse_near_misses(keys: list[str], config: DictConfig) -> None:
    """Hydra's + and ++ add any key, and in these groups verl passes over those it does not know. One that is nearly one of theirs was
    meant."""
    for key in (key.lstrip("+") for key in keys if re.match(r"\+{1,2}[^+@]+$", key)):
        parent, _, leaf = key.rpartition(".")
        siblings = OmegaConf.select(config, parent) if parent in CLOSED else {}
        close = difflib.get_close_matches(leaf, map(str, siblings), 1, 0.75)
        if close and leaf not in siblings:  # + may fill one that is null
            raise InputError(key, "is not a key of verl's configuration, and + adds it without effect", f"did you mean {close[0]!r}?")
