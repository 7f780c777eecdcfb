"""Inverse frequencies and attention factor of each rope rule beside transformers' (`ROPE_INIT_FUNCTIONS`), from the same config.json.

Both compute in fp32 from the same closed form; the order of two products may differ, so 1e-6 relative is allowed. A wrong rule, a wrong
default or a ramp that is off by one dimension moves some frequency by percents at least.
"""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lite.errors import InputError
from lite.primitive.modules.rotary import RULES, RotaryConfig, cos_sin_table, inverse_frequencies

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
PARAMETERS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "llama3 of 3.2": LLAMA3 | {"factor": 32.0},
    "yarn": YARN,
    "yarn short": YARN | {"original_max_position_embeddings": 64},
    "yarn betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn attention factor": YARN | {"attention_factor": 0.7},
    "yarn mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn mscale alone": YARN | {"mscale": 1.3},
    "yarn not truncated": YARN | {"truncate": False},
    "yarn without original": {"rope_type": "yarn", "factor": 4.0},
}


def config_json(parameters: dict[str, Any], theta: float, head_dim: int) -> dict[str, Any]:
    """What transformers saves for a llama with these rope parameters."""
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=131072, rope_parameters={"rope_theta": theta, **parameters}
    )
    return config.to_dict()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_are_transformers(name: str, theta: float, head_dim: int) -> None:
    hf = config_json(PARAMETERS[name], theta, head_dim)
    want, want_factor = ROPE_INIT_FUNCTIONS[PARAMETERS[name]["rope_type"]](LlamaConfig(**hf), torch.device("cpu"))
    got, factor = inverse_frequencies(RotaryConfig.from_hf(hf, head_dim))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert factor == pytest.approx(want_factor, rel=1e-12)
    plain = inverse_frequencies(RotaryConfig(head_dim, theta, 131072))[0]
    assert (got / plain - 1).abs().max() > 0.1, "the rule changed nothing, so any would pass"


@pytest.mark.parametrize("name", [None, "llama3", "yarn"])
def test_the_table_holds_the_cosines_that_transformers_uses(name: str | None) -> None:
    hf = config_json(PARAMETERS[name] if name else {}, 1e4, 64)
    positions = torch.tensor([[0, 1, 17, 4000]])
    cos, sin = LlamaRotaryEmbedding(LlamaConfig(**hf))(torch.zeros(1, dtype=torch.float32), positions)
    table = cos_sin_table(RotaryConfig.from_hf(hf | {"max_position_embeddings": 4001}, 64), torch.float32)[positions[0]]
    # 4,000 radians carry an error of 2.4e-4 in fp32, so one last bit of a frequency shows
    torch.testing.assert_close(table, torch.cat([cos[0, :, :32], sin[0, :, :32]], dim=-1), rtol=0, atol=5e-4)


@pytest.mark.parametrize("rule", ["linear", "llama3", "yarn"])
def test_both_spellings_of_the_checkpoint_are_read(rule: str) -> None:
    given = PARAMETERS[rule]
    new = {"max_position_embeddings": 4096, "rope_parameters": given | {"rope_theta": 5e5}}
    old = {"max_position_embeddings": 4096, "rope_theta": 5e5, "rope_scaling": given}
    older = old | {"rope_scaling": {("type" if key == "rope_type" else key): value for key, value in given.items()}}
    configs = [RotaryConfig.from_hf(hf, 64) for hf in (new, old, older)]
    assert configs[0] == configs[1] == configs[2] and configs[0].theta == 5e5


@pytest.mark.parametrize("rule", ["dynamic", "longrope", "proportional", "yarm"])
def test_another_rule_is_refused_by_name(rule: str) -> None:
    hf = {"max_position_embeddings": 4096, "rope_scaling": {"rope_type": rule, "factor": 2.0}}
    with pytest.raises(InputError, match=repr(rule)) as error:
        RotaryConfig.from_hf(hf, 64)
    assert "\n" not in str(error.value)
    assert ("length" in str(error.value)) == (rule == "dynamic")


def test_an_unknown_key_of_a_rule_is_refused_by_name() -> None:
    hf = {"max_position_embeddings": 4096, "rope_scaling": YARN | {"betta_fast": 16.0}}
    with pytest.raises(InputError, match=r"'betta_fast'.*'beta_fast'"):
        RotaryConfig.from_hf(hf, 64)


@pytest.mark.parametrize("rule", ["linear", "llama3", "yarn"])
def test_a_missing_key_of_a_rule_is_an_error_that_names_it(rule: str) -> None:
    optional = {"yarn": {"original_max_position_embeddings"}}.get(rule, set())
    for key in set(PARAMETERS[rule]) - {"rope_type"} - optional:
        given = {k: v for k, v in PARAMETERS[rule].items() if k != key}
        with pytest.raises(InputError, match=repr(key)):
            RotaryConfig.from_hf({"max_position_embeddings": 4096, "rope_scaling": given}, 64)


def test_every_rule_is_covered_here() -> None:
    assert {p["rope_type"] for p in PARAMETERS.values()} | {"default"} == set(RULES)
