"""`mlite prove` on the embedded engine: passes for every family, and fails for every error planted on one side."""

import json

import pytest

from lite import cli
from lite.acceptance.plants import PLANTS
from lite.acceptance.receipt import closure
from lite.model.registry import families

SMALL = ["--groups", "3", "--samples", "3", "--response-tokens", "12", "--prompt-tokens", "1:20"]


def mlite(monkeypatch, *args: object) -> int:
    """The command as a user runs it, in this process. -> exit code."""
    monkeypatch.setattr("sys.argv", ["mlite", *map(str, args)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_every_family_passes_at_three_policies(family, dtype, tmp_path, monkeypatch):
    assert mlite(monkeypatch, "prove", "--proxy", family, "--dtype", dtype, *SMALL, "--out", tmp_path / "run") == 0
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert receipt["status"] == "pass"
    assert [p["policy"] for p in receipt["policies"]] == ["theta0", "theta1", "theta2"]
    for policy in receipt["policies"]:
        assert policy["version"]["engine"] == policy["version"]["trainer"] == int(policy["policy"][-1])
        assert policy["fingerprint"]["engine"] == policy["fingerprint"]["trainer"]
        for path, grad in (("score", False), ("actor", True)):
            assert policy[path]["mismatch"] == policy[path]["nonfinite"] == 0 < policy[path]["valid_tokens"]
            assert policy[path]["requires_grad"] is grad and policy[path]["dtype"] == "float32"
    assert len({p["fingerprint"]["engine"] for p in receipt["policies"]}) == 3, "every update must change what is deployed"
    for update in receipt["updates"]:
        assert update["deployed_bytes_changed"] > 0 and update["master_update_norm"] > 0
        assert update["parameters_with_grad"] == update["parameters_expected"] - len(update["without_grad"]) > 0
        assert all(key.endswith("e_score_correction_bias") and why == "frozen" for key, why in update["without_grad"].items())
        assert update["collapsed_groups"] == 0 and update["distinct_samples"] == update["samples"] == 9
    for situation in ("chunked_prefills", "mixed_batches", "joins"):
        assert receipt["lengths"][situation] > 0


SCANNING = {"chunk-shift", "state-bf16"}  # planted where a scan's state is kept


MEANINGLESS = [*(("llama", kind) for kind in sorted(SCANNING)), ("nemotron_h", "position-shift"), ("nemotron_h", "gate-up-order")]
PLANTED = [
    *(("llama", kind) for kind in sorted(set(PLANTS) - SCANNING)),
    *(pytest.param("nemotron_h", kind, marks=pytest.mark.slow) for kind in ("chunk-shift", "packing-leak", "qkv-order", "state-bf16")),
    ("qwen3_moe", "gate-up-order"),
]


@pytest.mark.parametrize(("family", "kind"), MEANINGLESS)
def test_a_plant_without_meaning_for_the_family_proves_nothing(family, kind, tmp_path, monkeypatch, capsys):
    assert mlite(monkeypatch, "prove", "--proxy", family, *SMALL, "--updates", 0, "--plant", kind, "--out", tmp_path / "run") == 2
    assert f"{kind} has no meaning for this family" in capsys.readouterr().err
    assert not (tmp_path / "run").exists(), "refused before the proxy is written"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--layers", 2, "--plant", "qkv-order"), "the planted qkv-order changed no logprob that was compared"),
        (("--prompt-tokens", "1:3", "--response-tokens", 4), "no sequence is longer than a chunk of 16, so no state was carried"),
    ],
    ids=["a plant in a layer that is not there", "no chunk is crossed"],
)
def test_a_run_that_did_not_meet_what_it_is_for_proves_nothing(flags, reason, tmp_path, monkeypatch, capsys):
    """The first two layers are Mamba and experts."""
    assert mlite(monkeypatch, "prove", "--proxy", "nemotron_h", *SMALL, "--updates", 0, *flags, "--out", tmp_path / "run") == 2
    assert reason in capsys.readouterr().out


@pytest.mark.parametrize(("family", "kind"), PLANTED)
def test_a_planted_error_fails_by_counted_tokens(family, kind, tmp_path, monkeypatch):
    out = tmp_path / "run"
    assert mlite(monkeypatch, "prove", "--proxy", family, *SMALL, "--updates", 1, "--plant", kind, "--out", out) == 1
    receipt = json.loads((out / "receipt.json").read_text())
    assert receipt["status"] == "fail" and receipt["plant"] == kind
    mismatches = [policy[path]["mismatch"] for policy in receipt["policies"] for path in ("score", "actor")]
    assert max(mismatches) > 0
    first = next(p[path]["first_mismatch"] for p in receipt["policies"] for path in ("score", "actor") if p[path]["mismatch"])
    assert first["rollout"] != first["trainer"] and first["position"] >= 0
    assert (out / "plots" / "first_mismatch.png").stat().st_size > 1000
    if kind == "one-ulp":
        assert mismatches == [1, 1, 1, 1], "one token of each policy, and no other"
    if kind == "stale-weights":
        assert mismatches[:2] == [0, 0] < mismatches[2:], "theta0 is still the same on both sides"


def test_the_run_leaves_receipt_report_plots_and_bundles(tmp_path, monkeypatch):
    out, result = tmp_path / "run", tmp_path / "result.json"
    assert mlite(monkeypatch, "prove", "--proxy", "qwen3", *SMALL, "--updates", 1, "--out", out, "--json", result) == 0
    receipt = json.loads((out / "receipt.json").read_text())
    assert json.loads(result.read_text()) == receipt
    assert receipt["schema"] == 1 and receipt["subject"]["weights"] == "random"
    assert receipt["subject"]["geometry"]["model_type"] == "qwen3"
    assert len(receipt["subject"]["mixer_to_residual_rms"]) == receipt["subject"]["layers"]
    assert min(receipt["subject"]["mixer_to_residual_rms"]) > 0.02
    assert all(p["ok"] for p in receipt["kernels"]["probes"] if p["check"] != "threads") and receipt["kernels"]["sources"]["attention"]
    for name in ("rollout/theta0.safetensors", "rollout/theta1.safetensors", "scores/theta0.safetensors", "report.md", "plots/logprobs.png",
                 "plots/training.png"):  # fmt: skip
        assert (out / name).stat().st_size > 100, name
    assert "PASS" in (out / "report.md").read_text()


def test_the_closure_names_what_decides_the_bytes_and_not_what_draws_them():
    paths = set(closure())
    for part in ("primitive/kernels/reference/gemm.py", "primitive/compare.py", "model/llama/config.py", "runtime/rollout/embedded.py"):
        assert f"lite/{part}" in paths
    assert not paths & {"lite/cli.py", "lite/acceptance/report.py", "lite/acceptance/plots.py"}


@pytest.mark.slow
def test_a_second_run_replaces_the_first_but_nothing_else(tmp_path, monkeypatch):
    out = tmp_path / "run"
    args = ("prove", "--proxy", "llama", *SMALL, "--updates", 0, "--out", out)
    assert mlite(monkeypatch, *args) == 0
    assert mlite(monkeypatch, *args) == 0
    (out / "notes.txt").write_text("mine")
    assert mlite(monkeypatch, *args) == 2
    assert (out / "notes.txt").read_text() == "mine" and (out / "receipt.json").exists()


@pytest.mark.slow
def test_temperature_applies_on_both_sides(tmp_path, monkeypatch):
    assert mlite(monkeypatch, "prove", "--proxy", "llama", *SMALL, "--updates", 1, "--temperature", 0.6, "--out", tmp_path / "run") == 0


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--proxy", "lama"], "llama"),
        (["--proxy", "llama", "--plant", "one-ulps"], "one-ulp"),
        ([], "--model and --proxy"),
        (["--proxy", "llama", "--dtype", "fp16"], "--dtype"),
        (["--proxy", "llama", "--prompt-tokens", "0:4"], "--prompt-tokens"),
        (["--proxy", "llama", "--prompt-tokens", "four"], "--prompt-tokens"),
        (["--proxy", "llama", "--plugin", "off"], "embedded"),
        (["--proxy", "llama", "--temperature", "0"], "temperature"),
        (["--proxy", "llama", "--prompt-tokens", "1:2000"], "the model allows 1024"),
        (["--proxy", "llama", "--samples", "1"], "--samples"),
        (["--proxy", "llama", "--updates", "0", "--plant", "stale-weights"], "stale-weights"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_exits_2_with_one_line_that_names_it(args, names, tmp_path, monkeypatch, capsys):
    assert mlite(monkeypatch, "prove", *args, "--out", tmp_path / "run") == 2
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if names in line and ("mlite:" in line or "inconclusive:" in line)]
    assert len(lines) == 1, said
