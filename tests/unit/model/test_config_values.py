"""A value of the wrong kind in config.json is one line that names its key, never a traceback deep in a kernel."""

import json
import math

import pytest

from lite.errors import InputError
from lite.model.registry import family, family_of
from lite.primitive.ckpt.safetensors_files import read_json


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", "96"), ("num_attention_heads", 0), ("vocab_size", 512.0), ("max_position_embeddings", 10**15),
     ("rms_norm_eps", "1e-5"), ("rms_norm_eps", -1.0), ("rope_theta", "x"), ("tie_word_embeddings", "false"),
     ("rope_scaling", "linear"), ("rope_scaling", ["x"]),
     ("rope_scaling", {"rope_type": "linear", "factor": "8"}), ("rope_scaling", {"rope_type": "linear", "factor": 0}),
     ("rope_scaling", {"rope_type": ["linear"], "factor": 2.0}), ("num_hidden_layers", True), ("rms_norm_eps", math.inf),
     ("rope_scaling", {"rope_type": "linear", "factor": math.inf})],
)  # fmt: skip
def test_the_key_is_named(key, value):
    llama = family("llama")
    config = {k: v for k, v in llama.proxy_config("tiny", None).items() if not (key == "rope_scaling" and k == "rope_theta")}
    with pytest.raises(InputError) as error:
        llama.build_model_config(config | {key: value})
    assert key.split("_")[0] in str(error.value) and "\n" not in str(error.value)


def test_nan_in_config_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"initializer_range": float("nan")}))
    with pytest.raises(InputError, match="NaN"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("model_type", [None, ["llama"], 3, "gpt9"])
def test_a_model_type_that_is_no_family_is_refused(model_type):
    with pytest.raises(InputError, match="model_type"):
        family_of(model_type)
