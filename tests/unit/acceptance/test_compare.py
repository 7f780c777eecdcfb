"""`mlite compare`: two rollout bundles by UID, whatever their order."""

import json
from dataclasses import replace

import pytest
import torch

from lite.acceptance.bundle import load_bundle, save_bundle
from lite.primitive.compare import bits
from lite.runtime.rollout.engine import Trajectory
from tests.unit.acceptance.test_prove import mlite


def trajectories() -> list[Trajectory]:
    generator = torch.Generator().manual_seed(0)
    return [
        Trajectory(f"u{i // 2}", i % 2, (1, 2, i), tuple(range(3 + i)), -torch.rand(3 + i, generator=generator), 4) for i in range(6)
    ]


def write(path, rows):
    save_bundle(path, rows, [0.5] * len(rows), "fingerprint", 0.6)
    return path


def test_a_bundle_comes_back_as_it_was(tmp_path):
    rows = trajectories()
    back, facts = load_bundle(write(tmp_path / "a.safetensors", rows))
    assert facts["temperature"] == "0.6"
    for one, other in zip(rows, back, strict=True):
        assert replace(one, logprobs=None) == replace(other, logprobs=None)
        assert torch.equal(bits(one.logprobs), bits(other.logprobs))


def test_the_same_responses_in_another_order_are_the_same(tmp_path, monkeypatch):
    a, b = write(tmp_path / "a.safetensors", trajectories()), write(tmp_path / "b.safetensors", trajectories()[::-1])
    assert mlite(monkeypatch, "compare", a, b) == 0


def test_one_bit_of_one_logprob_is_found_by_uid_sample_and_token(tmp_path, monkeypatch, capsys):
    rows = trajectories()
    changed = rows[3].logprobs.clone()
    bits(changed)[2] ^= 1
    a = write(tmp_path / "a.safetensors", rows)
    b = write(tmp_path / "b.safetensors", [*rows[:3], replace(rows[3], logprobs=changed), *rows[4:]])
    assert mlite(monkeypatch, "compare", a, b, "--json", tmp_path / "r.json") == 1
    assert "uid u1, sample 1, token 2" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["policies"]["a"]["logprobs"]["mismatch"] == 1


def test_bad_input_writes_no_result_and_keeps_an_earlier_one(tmp_path, monkeypatch):
    earlier = tmp_path / "earlier.json"
    earlier.write_text("{}")
    for result in (tmp_path / "new.json", earlier):
        assert mlite(monkeypatch, "compare", tmp_path / "nothing", tmp_path / "nothing", "--json", result) == 2
    assert not (tmp_path / "new.json").exists() and earlier.read_text() == "{}"


def test_minus_zero_is_not_zero_and_nan_never_passes(tmp_path, monkeypatch):
    rows = trajectories()
    zero, minus_zero, nan = (replace(rows[0], logprobs=torch.tensor([v, -1.0, -2.0])) for v in (0.0, -0.0, float("nan")))
    paths = {name: write(tmp_path / f"{name}.safetensors", [row]) for name, row in (("z", zero), ("m", minus_zero), ("n", nan))}
    assert mlite(monkeypatch, "compare", paths["z"], paths["z"]) == 0
    assert mlite(monkeypatch, "compare", paths["z"], paths["m"]) == 1
    assert mlite(monkeypatch, "compare", paths["n"], paths["n"]) == 1


@pytest.mark.parametrize("change", ["missing", "tokens"])
def test_a_missing_response_or_other_tokens_fail(change, tmp_path, monkeypatch):
    rows = trajectories()
    other = rows[:-1] if change == "missing" else [*rows[:-1], replace(rows[-1], response_ids=tuple(range(1, 9)))]
    a, b = write(tmp_path / "a.safetensors", rows), write(tmp_path / "b.safetensors", other)
    assert mlite(monkeypatch, "compare", a, b) == 1
    assert mlite(monkeypatch, "compare", b, a) == 1


def test_nothing_in_common_or_no_bundle_is_bad_input(tmp_path, monkeypatch, capsys):
    a = write(tmp_path / "a.safetensors", trajectories())
    b = write(tmp_path / "b.safetensors", [replace(t, uid="x" + t.uid) for t in trajectories()])
    (tmp_path / "c.safetensors").write_bytes(b"not a bundle")
    (tmp_path / "empty").mkdir()
    for left, right in ((a, b), (a, tmp_path / "c.safetensors"), (a, tmp_path / "missing"), (tmp_path / "empty", a)):
        assert mlite(monkeypatch, "compare", left, right) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.slow
def test_two_runs_of_one_seed_are_the_same_run(tmp_path, monkeypatch):
    from tests.unit.acceptance.test_prove import SMALL

    for name in ("a", "b"):
        assert mlite(monkeypatch, "prove", "--proxy", "llama", *SMALL, "--updates", 1, "--out", tmp_path / name) == 0
    assert mlite(monkeypatch, "compare", tmp_path / "a", tmp_path / "b") == 0
