"""The native baseline computes what the reference does; the formula counts what torch's own counter counts; the program runs."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import report, train_step, train_worker
from benchmarks.native_ops import NativeOps
from benchmarks.packed import packed_batch, step_flops, unequal_lengths
from benchmarks.report import model_config
from lite.acceptance.proxy import write_proxy
from lite.errors import InputError
from lite.primitive.ops.bridges import reference_ops
from lite.primitive.parallel.packing import Seqlens

LENGTHS = (1, 5, 40, 18)
T = sum(LENGTHS)
SEQLENS = Seqlens.of(LENGTHS, LENGTHS)
ANGLES = torch.rand(64, 8, generator=torch.Generator().manual_seed(0)) * 6.28
TABLE = torch.cat([ANGLES.cos(), ANGLES.sin()], -1)


def leaf(*shape, scale=1.0):
    return (scale * torch.randn(*shape)).requires_grad_()


CALLS = {
    "linear": lambda ops, x, w, b: ops.linear(x, w, b),
    "embedding": lambda ops, w: ops.embedding(torch.arange(T) % 7, w),
    "rms_norm": lambda ops, x, w: ops.rms_norm(x, w, 1e-6),
    "add_rms_norm": lambda ops, x, r, w: torch.cat(ops.add_rms_norm(x, r, w, 1e-6)),
    "rotary": lambda ops, q, k: torch.cat(ops.rotary(q, k, torch.arange(T) % 64, TABLE), 1),
    "attention": lambda ops, q, k, v: ops.attention(q, k, v, SEQLENS, 0.25),
    "swiglu": lambda ops, x: ops.swiglu(x),
    "token_logprobs": lambda ops, x, w: torch.stack(ops.token_logprobs(x, w, torch.arange(T), torch.linspace(0.5, 1.5, T), 90, True)),
}
INPUTS = {
    "linear": [(T, 32), (24, 32), (24,)], "embedding": [(7, 16)], "rms_norm": [(T, 32), (32,)], "add_rms_norm": [(T, 32), (T, 32), (32,)],
    "rotary": [(T, 4, 16), (T, 2, 16)], "attention": [(T, 4, 16), (T, 2, 16), (T, 2, 16)], "swiglu": [(T, 48)],
    "token_logprobs": [(T, 32), (96, 32)],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_native_operations_and_their_gradients_are_the_references(name):
    leaves = [leaf(*shape, scale=0.5) for shape in INPUTS[name]]
    found = {}
    for ops in (reference_ops(), NativeOps()):
        value = CALLS[name](ops, *leaves)
        weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
        found[type(ops)] = value, torch.autograd.grad((value * weights).sum(), leaves)
    (value, grads), (native, native_grads) = found.values()
    torch.testing.assert_close(native, value, rtol=2e-5, atol=2e-5)
    for ours, theirs in zip(native_grads, grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)


def test_lengths_vary_and_add_up():
    for tokens in (64, 129, 1000, 8192):
        lengths = unequal_lengths(tokens, 128, 0)
        assert sum(lengths) == tokens and max(lengths) <= 128 and min(lengths) >= 2
    assert len(set(unequal_lengths(8192, 4096, 0))) > 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("proxy")
    write_proxy("qwen3", path, geometry="tiny", layers=2, dtype=torch.float32, seed=0)
    return path


def test_the_formula_agrees_with_torchs_counter_within_two_percent(folder):
    """Torch counts every product that runs. Eager attention of one sequence computes the full square, which the formula halves, so the
    attention term is doubled for the comparison; transformers keeps its logits, so nothing runs twice."""
    config = model_config(folder)
    spec = {"folder": str(folder), "dtype": "fp32", "device": "cpu", "attention": "sdpa"}
    model, loss = train_worker.transformers(spec)
    model.set_attn_implementation("eager")
    batch = packed_batch(200, 4096, config.vocab_size, 0)
    assert len(batch.seq_lens) == 1
    with FlopCounterMode(display=False) as counter:
        loss(train_worker.Inputs(batch, "cpu")).backward()
    flops = step_flops(config, batch.seq_lens, int(batch.loss_mask.sum()))
    assert counter.get_total_flops() == pytest.approx(flops["total"] + flops["attention"], rel=0.02)


def test_the_three_arms_have_one_loss_and_native_the_references_gradients(folder):
    """On a CPU in fp32, several sequences in the row: packing is honoured by every arm."""
    spec = {"folder": str(folder), "dtype": "fp32", "device": "cpu", "kernels": "reference"}
    config = model_config(folder)
    x = train_worker.Inputs(packed_batch(96, 32, config.vocab_size, 3), "cpu")
    exact, exact_loss = train_worker.exact(spec)
    native, native_loss = train_worker.native(spec)
    losses = [exact_loss(x), native_loss(x)]
    for value in losses:
        value.backward()
    losses += [train_worker.transformers(spec | {"attention": attention})[1](x) for attention in ("flash", "sdpa")]
    for value in losses[1:]:
        torch.testing.assert_close(value, losses[0], rtol=1e-5, atol=1e-5)
    for (name, ours), theirs in zip(exact.named_parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-3, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_the_program_runs_on_a_cpu_and_writes_what_it_measured(tmp_path):
    out = tmp_path / "t.json"
    tiny = ["--device", "cpu", "--geometry", "tiny", "--layers", "1", "--tokens", "64", "--longest", "32", "--steps", "1", "--warmup", "1"]
    tiny += ["--against", "native"]
    assert train_step.main([*tiny, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["finished"] and found["complete"] and len(found["legs"]) == 6
    assert [len(row["time"]["pairs"]) for row in found["summary"]] == [3]
    assert found["legs"][0]["tflops"] == pytest.approx(found["legs"][0]["flops"]["total"] / found["legs"][0]["seconds"] / 1e12)
    assert train_step.main([*tiny, "--out", str(out), "--minutes", "0"]) == 1, "nothing was measured"
    assert json.loads(out.read_text())["legs"] == []


@pytest.mark.slow
def test_ways_to_save_memory_are_measured_against_plain_steps(folder, tmp_path):
    out = tmp_path / "t.json"
    tiny = f"--device cpu --model {folder} --tokens 64 --longest 32 --steps 1 --warmup 1 --pairs 1 --out {out}"
    assert train_step.main([*tiny.split(), "--fsdp", "2", "--offload"]) == 0
    found = json.loads(out.read_text())
    assert found["finished"] and [row["against"] for row in found["summary"]] == ["fsdp2", "offload", "fsdp2+offload"]
    assert [len(row["time"]["pairs"]) for row in found["summary"]] == [1, 1, 1] and len(found["legs"]) == 6
    assert found["arms"]["fsdp2+offload"]["spec"]["fsdp"] == {"param_offload": True}
    assert str(tmp_path) not in json.dumps(found) and found["arguments"]["out"] == "t.json", "no folder of this machine"
    for plain, other in zip(found["legs"][::2], found["legs"][1::2], strict=True):
        ranks = 2 if "fsdp2" in other["arm"] else 1
        assert plain["arm"] == "plain" and other["ranks"] == ranks
        assert other["tokens_per_second"] == pytest.approx(ranks * 64 / other["seconds"])
        assert other["loss"] == pytest.approx(plain["loss"], rel=1e-6), "rank 0 has plain's data, and no step moves a weight"


def test_every_combination_is_an_arm_and_what_offloading_means_depends_on_sharding():
    args = train_step._arguments(["--fsdp", "2", "--recompute", "--offload"])
    assert args.base == "plain" and args.against == [
        "fsdp2", "recompute", "offload", "fsdp2+recompute", "fsdp2+offload", "recompute+offload", "fsdp2+recompute+offload",
    ]  # fmt: skip
    assert train_step.settings("plain") == {"ranks": 1, "fsdp": {}}
    assert train_step.settings("recompute+offload") == {"ranks": 1, "fsdp": {"recompute": True, "optimizer_offload": True}}
    assert train_step.settings("fsdp2+recompute+offload") == {"ranks": 2, "fsdp": {"recompute": True, "param_offload": True}}


def test_more_ranks_than_the_machine_has_places_for_are_refused(tmp_path, capsys):
    assert train_step.main(["--device", "cpu", "--fsdp", "4096", "--out", str(tmp_path / "t.json")]) == 2
    assert capsys.readouterr().err.startswith("--fsdp: asks for 4096 ranks of ") and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--longest 1", "give 2 or more"), ("--minutes nan", "no duration"), ("--minutes -1", "no duration"),
        ("--recompute --against native", "--against is of the exact arm"), ("--recompute --profile", "--profile is of the exact arm"),
    ],
)  # fmt: skip
def test_flags_that_cannot_be_meant_are_refused(flags: str, says: str, capsys):
    with pytest.raises(SystemExit) as stopped:
        train_step.main(["--device", "cpu", *flags.split()])
    assert stopped.value.code == 2 and says in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_refused_before_anything_starts(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out, says in ((tmp_path, "is a folder"), (tmp_path / "file" / "t.json", "cannot be written")):
        assert train_step.main(["--device", "cpu", "--out", str(out)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and says in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert train_step.main(["--draw", str(tmp_path / "nothing.json")]) == 2 and "no such file" in capsys.readouterr().err


def test_an_interruption_ends_quietly(monkeypatch, tmp_path, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_step, "write_proxy_apart", interrupted)
    assert train_step.main(["--device", "cpu", "--out", str(tmp_path / "t.json")]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_an_unknown_family_is_one_line_and_exit_2(tmp_path, capsys):
    assert train_step.main(["--device", "cpu", "--family", "qwen9", "--out", str(tmp_path / "t.json")]) == 2
    assert "qwen9" in capsys.readouterr().err.splitlines()[-1]


def test_a_file_without_legs_or_of_another_benchmark_cannot_be_drawn(tmp_path, capsys):
    (tmp_path / "p.json").write_text('{"benchmark": "train_step", "profile": {}}')
    (tmp_path / "e.json").write_text('{"benchmark": "train_step", "summary": []}')
    (tmp_path / "r.json").write_text('{"benchmark": "rollout", "summary": [1]}')
    files = {"p.json": "holds no legs", "e.json": "holds no legs", "r.json": "no result of", "none.json": "no such file"}
    for file, says in files.items():
        assert train_step.main(["--draw", str(tmp_path / file)]) == 2
        assert says in capsys.readouterr().err


def test_a_figure_that_cannot_be_written_is_one_line(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "t.png").mkdir()
    with pytest.raises(InputError, match=r"t\.png: cannot be written"):
        report.figure(tmp_path / "t.json", 1, lambda axes: None)


def test_numbers_must_be_positive(capsys):
    with pytest.raises(SystemExit) as stopped:
        train_step.main(["--tokens", "0"])
    assert stopped.value.code == 2 and "'0'" in capsys.readouterr().err


def test_what_is_given_twice_is_measured_once():
    args = train_step._arguments(["--tokens", "64", "128", "64", "--against", "native", "native"])
    assert args.tokens == [64, 128] and args.against == ["native"]
