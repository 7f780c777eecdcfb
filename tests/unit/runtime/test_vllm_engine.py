"""What the vLLM engine runs inside a worker, on a fake worker whose model names its parameters as vLLM does."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lite.errors import InputError, ProbeError
from lite.primitive.compare import bits
from lite.primitive.kernels.vllm import mamba
from lite.primitive.kernels.vllm.attention import paged
from lite.primitive.parallel.packing import Seqlens
from lite.runtime import routes
from lite.runtime.batch import PackedBatch
from lite.runtime.rollout.engine import RolloutCounters, Sampling
from lite.runtime.rollout.vllm import (
    ENVIRONMENT,
    VllmEngine,
    _load,
    _rotary_tables,
    _set_version,
    _version,
    counting_scheduler,
    prepare_environment,
)
from lite.runtime.runtime import Handle, Runtime
from tests.checkpoints import FAMILIES, TIES, checkpoint, make_prompts, same, trainer

PADDED = ("embed_tokens", "embeddings", "lm_head")
QKV = {f".{part}_proj": ".qkv_proj" for part in "qkv"}
# As in vLLM 0.26.0: what the mapper of each family's model class says.
MAPPERS: dict[str, dict[str, dict[str, str]]] = {
    **{key: {"stacked": QKV | {".gate_proj": ".gate_up_proj", ".up_proj": ".gate_up_proj"}} for key in FAMILIES},
    "qwen3_moe": {"stacked": QKV | {".mlp.gate_proj": ".mlp.gate_up_proj", ".mlp.up_proj": ".mlp.gate_up_proj"}},
    "nemotron_h": {"substr": {"A_log": "A", "embeddings": "embed_tokens"}, "stacked": QKV, "prefix": {"backbone": "model"}},
}
EVERY = [(name, tied) for name in FAMILIES for tied in ((True, False) if name in TIES else (False,))]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


# The fakes.


class Mapper:
    def __init__(self, substr: dict[str, str] = {}, stacked: dict[str, str] = {}, prefix: dict[str, str] = {}):  # noqa: B006
        self.anywhere, self.prefix = substr | stacked, prefix

    def apply_list(self, names: list[str]) -> list[str]:
        return [self._mapped(name) for name in names]

    def _mapped(self, name: str) -> str:
        for old, new in self.anywhere.items():
            name = name.replace(old, new, 1)
        for old, new in self.prefix.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        return name


class FakeModel(nn.Module):
    """vLLM's layout of a checkpoint: fused projections, stacked experts, a vocabulary padded with rows of its own, decays transformed."""

    def __init__(self, tensors: list[tuple[str, Tensor]], mapper: Mapper):
        super().__init__()
        self.hf_to_vllm_mapper = mapper
        wholes: dict[str, list[Tensor]] = {}
        experts: dict[str, int] = {}
        self.places: dict[str, tuple[str, int]] = {}
        for hf, tensor in tensors:
            (whole,) = mapper.apply_list([hf])
            if expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", hf):
                whole = f"{mapper.apply_list([expert[1]])[0]}.routed_experts.{'w2' if expert[3] == 'down' else 'w13'}_weight"
                experts[whole] = int(expert[2]) + 1
            held = wholes.setdefault(whole, [])
            self.places[hf] = whole, sum(len(t) for t in held)
            held.append(-torch.exp(tensor.float()) if hf.endswith("A_log") else tensor)
            if hf.split(".")[-2] in PADDED:
                held.append(torch.randn(64 - len(tensor) % 64, tensor.shape[1]).to(tensor.dtype))
        for whole, pieces in wholes.items():
            *path, leaf = whole.split(".")
            node: nn.Module = self
            for name in path:
                if name not in dict(node.named_children()):
                    node.add_module(name, nn.Module())
                node = node.get_submodule(name)
            tensor = torch.cat(pieces)
            tensor = tensor.unflatten(0, (experts[whole], -1)) if whole in experts else tensor
            node.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))

    def rows(self, hf: str, count: int) -> Tensor:
        whole, start = self.places[hf]
        parameter = self.get_parameter(whole).data
        return (parameter.flatten(0, 1) if "routed_experts" in whole else parameter)[start : start + count]

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> set[str]:
        """The decay's loader transforms what it holds after copying; stacks of experts are named without the module that holds them."""
        loaded = set()
        for hf, tensor in tensors:
            rows = self.rows(hf, len(tensor))
            rows.copy_(tensor)
            if hf.endswith("A_log"):
                rows.copy_(-torch.exp(rows.float()))
            loaded.add(self.places[hf][0].replace(".experts.routed_experts.", ".experts."))
        return loaded


class FakeScheduler:
    """Plays the given steps as vLLM 0.26.0 would: by the time `schedule` returns, each request's count has moved on."""

    advances = True

    def __init__(self, prompts: dict[str, int], steps: list[dict[str, Any]]):
        self.requests = {
            name: SimpleNamespace(num_prompt_tokens=n, num_tokens=n, num_computed_tokens=0, is_prefill_chunk=True)
            for name, n in prompts.items()
        }
        self.steps = list(steps)
        self.sampling: list[Any] = []

    def schedule(self) -> SimpleNamespace:
        step = self.steps.pop(0)
        for request in self.sampling:
            request.num_tokens += 1
        for name in step.get("preempt", ()):
            assert self._preempt_request(self.requests[name], timestamp=0.0) == "base"
        scheduled: dict[str, int] = step["tokens"]
        for name, new in scheduled.items():
            self.requests[name].num_computed_tokens += new if self.advances else 0
        for request in (self.requests[name] for name in scheduled):
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
        self.sampling = [r for r in (self.requests[name] for name in scheduled) if not r.is_prefill_chunk]
        new_requests = [SimpleNamespace(req_id=name) for name in step.get("new", ())]
        return SimpleNamespace(
            num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()), scheduled_new_reqs=new_requests
        )

    def _preempt_request(self, request: Any, timestamp: float) -> str:
        request.num_computed_tokens = 0
        return "base"


class FakeAsyncScheduler(FakeScheduler):
    """The subclass that vLLM asks for where it schedules ahead."""


class FakeLLM:
    """One worker, which runs what it is sent. `model` is set by the test before an engine is made."""

    model: nn.Module

    def __init__(self, **options: Any):
        self.options = options
        self.worker = SimpleNamespace(get_model=lambda: FakeLLM.model, model_runner=self)

    def collective_rpc(self, function: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        return [function(self.worker, *args)]

    def generate(self, prompts: list[dict[str, Any]], params: list[Any], use_tqdm: bool) -> list[Any]:
        """Answers 7, 8, ... A record is an array of uint8 [prompt + response - 1, layers, k], zeros where a layer has no experts."""
        outputs = []
        for prompt, param in zip(prompts, params, strict=True):
            ids = list(range(7, 7 + param.max_tokens))
            tokens = len(prompt["prompt_token_ids"]) + len(ids) - 1
            record = FakeLLM.record(tokens) if self.options.get("enable_return_routed_experts") else None
            logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in ids]
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs, routed_experts=record)]))
        return outputs

    @staticmethod
    def record(tokens: int, layers: int = 5, sparse: tuple[int, ...] = (1,)) -> np.ndarray:
        """Of 8 experts 2 a token, told apart by token and layer."""
        record = np.zeros((tokens, layers, 2), np.uint8)
        for layer in sparse:
            first = (np.arange(tokens) + layer) % 8
            record[:, layer] = np.stack([first, (first + 3) % 8], axis=1)
        return record


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    sched = "vllm.v1.core.sched"
    for name in ("vllm", "vllm.v1", "vllm.v1.core", sched, f"{sched}.scheduler", f"{sched}.async_scheduler"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].LLM = FakeLLM  # type: ignore[attr-defined]
    sys.modules["vllm"].SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    sys.modules[f"{sched}.scheduler"].Scheduler = FakeScheduler  # type: ignore[attr-defined]
    sys.modules[f"{sched}.async_scheduler"].AsyncScheduler = FakeAsyncScheduler  # type: ignore[attr-defined]

    def pinned() -> None:
        pinned.calls += 1  # type: ignore[attr-defined]

    pinned.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(mamba, "pin_autotuners", pinned)


def sides(name: str, tied: bool, seed: int = 0, **options: Any) -> tuple[Runtime, Handle, FakeModel, VllmEngine]:
    """A trainer, and an engine of the same architecture that was filled by its own load."""
    folder: Path = checkpoint(name, tied=tied, seed=seed)
    runtime, handle = trainer(folder)
    model = FakeModel([(hf, tensor.clone()) for hf, tensor in runtime.export_weights(handle)], Mapper(**MAPPERS[name]))
    FakeLLM.model = model
    engine = VllmEngine(
        runtime.bundle(), folder, plugin=False, attention="TRITON_ATTN", graphs="eager", max_model_len=64, max_step_tokens=64,
        max_sequences=4, temperature=1.0, cache_tokens=100, **options,
    )  # fmt: skip
    return runtime, handle, model, engine


def flip(tensor: Tensor, row: int) -> None:
    """The lowest bit of a row's last number."""
    bits(tensor)[row].view(-1)[-1] ^= 1


# Weights.


HELD = {
    **{key: {"model.layers.0.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"} for key in FAMILIES},
    "qwen3_moe": {"model.layers.1.mlp.experts.routed_experts.w13_weight", "model.layers.1.mlp.experts.routed_experts.w2_weight"},
    "nemotron_h": {"model.layers.0.mixer.A", "model.layers.0.mixer.conv1d.weight", "model.layers.1.mixer.gate.e_score_correction_bias",
                   "model.layers.1.mixer.experts.routed_experts.w13_weight", "model.norm_f.weight"},
}  # fmt: skip


@pytest.mark.parametrize(("name", "tied"), EVERY)
def test_the_fingerprint_is_the_trainers(fake_vllm: None, name: str, tied: bool) -> None:
    _, handle, model, engine = sides(name, tied)
    names = dict(model.named_parameters())
    assert HELD[name] <= names.keys()
    assert ("lm_head.weight" in names) == (not tied)
    assert len(names["model.embed_tokens.weight"]) > handle.bundle.config.vocab_size
    assert engine.fingerprint() == handle.weights.fingerprint()


@pytest.mark.parametrize("name", FAMILIES)
def test_one_bit_of_any_tensor_changes_the_fingerprint(fake_vllm: None, name: str) -> None:
    runtime, handle, model, engine = sides(name, tied=False)
    want = handle.weights.fingerprint()
    for hf, tensor in runtime.export_weights(handle):
        for row in (0, len(tensor) - 1):
            flip(model.rows(hf, len(tensor)), row)
            assert engine.fingerprint() != want, (hf, row)
            flip(model.rows(hf, len(tensor)), row)
    assert engine.fingerprint() == want


def test_one_row_changes_the_fingerprint_and_padding_does_not(fake_vllm: None) -> None:
    _, handle, model, engine = sides("qwen3", tied=False)
    want, vocab = handle.weights.fingerprint(), handle.bundle.config.vocab_size
    qkv = model.get_parameter("model.layers.1.self_attn.qkv_proj.weight").data
    kept = qkv.clone()
    qkv[[0, 1]] = qkv[[1, 0]]
    assert engine.fingerprint() != want
    qkv.copy_(kept)
    q, k, v = qkv.split([64, 32, 32])
    qkv.copy_(torch.cat([q, v, k]))  # keys and values have equal shapes: only their order tells them apart
    assert engine.fingerprint() != want
    qkv.copy_(kept)
    model.get_parameter("lm_head.weight").data[vocab:] = 7
    assert engine.fingerprint() == want
    model.get_parameter("lm_head.weight").data[vocab - 1] = 7
    assert engine.fingerprint() != want


@pytest.mark.parametrize(("name", "tied"), EVERY)
def test_an_update_makes_the_fingerprints_equal_and_the_same_again_keeps_them(fake_vllm: None, name: str, tied: bool) -> None:
    _, _, _, engine = sides(name, tied)
    runtime, other = trainer(checkpoint(name, tied=tied, seed=1))
    assert engine.fingerprint() != other.weights.fingerprint()
    for version in (5, 6):
        engine.update_weights(runtime.export_weights(other), version)
        assert engine.fingerprint() == other.weights.fingerprint()
        assert engine.llm.collective_rpc(_version) == [version]


def test_a_decay_that_was_transformed_twice_is_noticed(fake_vllm: None) -> None:
    _, handle, model, engine = sides("nemotron_h", False)
    assert engine.fingerprint() == handle.weights.fingerprint()
    decay = model.get_parameter("model.layers.0.mixer.A").data
    decay.copy_(-torch.exp(decay))
    assert engine.fingerprint() != handle.weights.fingerprint()


def test_a_hybrid_has_its_tiles_pinned_its_states_in_fp32_and_pages_of_its_own(fake_vllm: None) -> None:
    engine, dense = sides("nemotron_h", False)[3], sides("qwen3", False)[3]
    assert engine.llm.options["mamba_ssm_cache_dtype"] == "float32" and engine.llm.options["num_gpu_blocks_override"] is None
    assert "mamba_ssm_cache_dtype" not in dense.llm.options and dense.llm.options["num_gpu_blocks_override"] == 7
    assert mamba.pin_autotuners.calls == 1 and not {"hybrid", "prefix_caching"} & engine.llm.options.keys()  # type: ignore[attr-defined]
    assert engine.llm.options["enable_prefix_caching"] is False


@pytest.mark.parametrize(("name", "plugin", "mode"), [("nemotron_h", False, "0"), ("nemotron_h", True, "1"), ("qwen3", False, "1")])
def test_a_hybrid_without_the_plugin_runs_outside_batch_invariant_mode(
    fake_vllm: None, monkeypatch: pytest.MonkeyPatch, name: str, plugin: bool, mode: str
) -> None:
    """vLLM refuses it inside."""
    monkeypatch.setattr(VllmEngine, "_handshakes", lambda self: [])
    folder = checkpoint(name, tied=False)
    VllmEngine(trainer(folder)[0].bundle(), folder, plugin=plugin, attention="TRITON_ATTN", graphs="eager", max_model_len=64,
               max_step_tokens=64, max_sequences=4, temperature=1.0)  # fmt: skip
    assert os.environ["VLLM_BATCH_INVARIANT"] == mode


class Loader(nn.Module):
    """A model of two parameters that says that it loaded those given, and `says` where it is told to say something else."""

    def __init__(self, says: set[str] | None = None, fails: bool = False):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        self.says, self.fails, self.given = says, fails, []

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> set[str]:
        self.given = [name for name, _ in tensors]
        if self.fails:
            raise RuntimeError("half way")
        return set(self.given) if self.says is None else self.says


def load(names: list[str], model: Loader) -> SimpleNamespace:
    """-> the worker; an error of the load is in `error`."""
    worker = SimpleNamespace(get_model=lambda: model, mlite_policy_version=3, error=None)
    try:
        _load(worker, [(name, torch.ones(2)) for name in names], ["a", "b"], 4)
    except (InputError, RuntimeError) as error:
        worker.error = error
    return worker


def test_a_whole_load_has_its_version() -> None:
    model = Loader()
    worker = load(["b", "a"], model)
    assert worker.error is None and model.given == ["b", "a"]
    assert worker.mlite_policy_version == _version(worker) == 4


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], "1 missing ['b']"),
        ([], "2 missing ['a', 'b']"),
        (["a", "b", "c"], "1 unexpected ['c']"),
        (["a", "c"], "1 missing ['b'], 1 unexpected ['c']"),
        (["a", "b", "a"], "1 doubled ['a']"),
        (["a", "a"], "1 missing ['b'], 1 doubled ['a']"),
    ],
)
def test_what_is_not_all_of_them_once_is_refused_before_vllm_sees_it(names: list[str], message: str) -> None:
    model = Loader()
    worker = load(names, model)
    assert isinstance(worker.error, InputError) and message in str(worker.error)
    assert model.given == [] and worker.mlite_policy_version is None
    with pytest.raises(InputError, match="not whole"):
        _version(worker)


def test_what_vllm_did_not_load_is_refused() -> None:
    worker = load(["a", "b"], Loader(says={"a"}))
    assert isinstance(worker.error, InputError) and "did not load ['b']" in str(worker.error)
    assert worker.mlite_policy_version is None


def test_a_load_that_broke_off_leaves_no_version() -> None:
    worker = load(["a", "b"], Loader(fails=True))
    assert str(worker.error) == "half way" and worker.mlite_policy_version is None


# Routes.


def test_a_recorded_route_is_numbered_by_layer_and_the_trainer_takes_it(fake_vllm: None) -> None:
    runtime, handle, _, engine = sides("nemotron_h", False, record_routes=True)
    engine.llm.collective_rpc(_set_version, args=(3,))
    config, prompts = handle.bundle.config, make_prompts([4, 9])
    assert engine.llm.options["enable_return_routed_experts"] is True and config.mlps == (None, "moe", None, "relu2", None)
    found = engine.generate(prompts, Sampling(max_tokens=5))
    for trajectory, prompt in zip(found, prompts, strict=True):
        tokens = len(prompt.ids) + 5 - 1
        assert trajectory.routed_experts.shape == (tokens, 5, 2) and trajectory.routed_experts.dtype == torch.int16
        assert torch.equal(trajectory.routed_experts[:, 1], torch.from_numpy(FakeLLM.record(tokens))[:, 1].short())
        assert (trajectory.routed_experts[:, [0, 2, 3, 4]] == -1).all(), "a zero there is no expert"
    samples = [(t.prompt_ids, t.response_ids) for t in found]
    batch = PackedBatch.from_samples(samples, routes=[t.routed_experts for t in found])
    with routes.recording(handle.module) as chosen:
        runtime.forward_backward(handle, batch, forward_only=True)
    rows = [row for row in range(len(batch.input_ids)) if row not in (8, 22)]
    assert torch.equal(chosen[1][rows], batch.routed_experts[rows, 1].int())


def test_vllm_records_only_where_it_is_told_to(fake_vllm: None) -> None:
    engine = sides("nemotron_h", False)[3]
    assert "enable_return_routed_experts" not in engine.llm.options
    assert engine.generate(make_prompts([4]), Sampling(max_tokens=5))[0].routed_experts is None
    with pytest.raises(InputError, match="record_routes: the model has no experts"):
        sides("qwen3", False, record_routes=True)


def test_vllms_columns_are_the_models_layers() -> None:
    """Not the layers with experts one after the other: those at 1 and 4 of 6 stay there. A model whose every layer has experts, too."""
    config = SimpleNamespace(layers=6, mlps=(None, "moe", "relu2", None, "moe", None))
    found = routes.from_vllm(FakeLLM.record(7, 6, (1, 4)), config)
    assert [layer for layer in range(6) if (found[:, layer] >= 0).all()] == [1, 4]
    assert [layer for layer in range(6) if (found[:, layer] == -1).all()] == [0, 2, 3, 5]
    assert torch.equal(found[:, 4], torch.from_numpy(FakeLLM.record(7, 6, (1, 4))[:, 4]).short())
    with pytest.raises(InputError, match="recorded 2 layers, the model has 6"):
        routes.from_vllm(FakeLLM.record(7, 2, (0, 1)), config)
    every = FakeLLM.record(7, 2, (0, 1))
    assert torch.equal(routes.from_vllm(every, SimpleNamespace(layers=2, mlps=("moe", "moe"))), torch.from_numpy(every).short())
    wide = np.array([[[300, 511]]], np.uint16)  # vLLM's type beyond 256 experts
    assert routes.from_vllm(wide, SimpleNamespace(layers=1, mlps=("moe",))).tolist() == [[[300, 511]]]


# The scheduler's counters.

PROMPTS = {"A": 5, "B": 10, "C": 3, "D": 2, "E": 6}
STEPS: list[dict[str, Any]] = [
    {"tokens": {"A": 5}, "new": ["A"]},  # nobody decodes: no join
    {"tokens": {"A": 1, "B": 4}, "new": ["B"]},  # join, mixed, cut
    {"tokens": {"A": 1, "B": 6}},  # mixed: the rest of B's prompt, which is not cut twice
    {"tokens": {"A": 1, "B": 1}},
    {"tokens": {"A": 1, "B": 1, "C": 3}, "new": ["C"]},  # join, mixed
    {"tokens": {"A": 1, "C": 1}, "preempt": ["B"]},  # preemption
    {"tokens": {"A": 1, "C": 1, "B": 13}},  # mixed: B again with what it had sampled; it does not join
    {"tokens": {"A": 1, "B": 1, "D": 2, "E": 5}, "new": ["D", "E"]},  # two joins, mixed, cut
    {"tokens": {}},
    {"tokens": {"A": 1, "E": 1}},  # mixed
]
SAMPLED = [1, 1, 2, 2, 3, 2, 3, 3, 0, 2]
COUNTS = RolloutCounters(rows_max_in_batch=15, chunked_prefills=2, mixed_batches=6, joins=4, preemptions=1)


def play(steps: list[dict[str, Any]], asynchronous: bool = False) -> RolloutCounters:
    counters = RolloutCounters()
    sampled: list[int] = []
    scheduler = counting_scheduler(counters, sampled.append, asynchronous)(PROMPTS, steps)
    assert isinstance(scheduler, FakeAsyncScheduler) == asynchronous
    for step in steps:
        assert scheduler.schedule().num_scheduled_tokens == step["tokens"], "the step passes through"
    assert sampled == SAMPLED[: len(steps)] or not FakeScheduler.advances
    return counters


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_counters_of_a_schedule(fake_vllm: None, asynchronous: bool) -> None:
    assert play(STEPS, asynchronous) == COUNTS


@pytest.mark.parametrize(
    ("count", "counts"),
    [
        (1, RolloutCounters(rows_max_in_batch=5)),
        (2, RolloutCounters(rows_max_in_batch=5, chunked_prefills=1, mixed_batches=1, joins=1)),
        (3, RolloutCounters(rows_max_in_batch=7, chunked_prefills=1, mixed_batches=2, joins=1)),
        (4, RolloutCounters(rows_max_in_batch=7, chunked_prefills=1, mixed_batches=2, joins=1)),
        (5, RolloutCounters(rows_max_in_batch=7, chunked_prefills=1, mixed_batches=3, joins=2)),
        (6, RolloutCounters(rows_max_in_batch=7, chunked_prefills=1, mixed_batches=3, joins=2, preemptions=1)),
        (7, RolloutCounters(rows_max_in_batch=15, chunked_prefills=1, mixed_batches=4, joins=2, preemptions=1)),
        (8, RolloutCounters(rows_max_in_batch=15, chunked_prefills=2, mixed_batches=5, joins=4, preemptions=1)),
    ],
)
def test_the_counters_step_by_step(fake_vllm: None, count: int, counts: RolloutCounters) -> None:
    assert play(STEPS[:count]) == counts


def test_a_scheduler_that_counts_later_would_be_seen(fake_vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters stand on vLLM's moving `num_computed_tokens` inside `schedule`."""
    monkeypatch.setattr(FakeScheduler, "advances", False)
    assert play(STEPS) != COUNTS


# The environment and the rotary table.


def test_the_environment_of_each_mode() -> None:
    os.environ.pop("MLITE_EXACT", None)
    prepare_environment(plugin=True)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["MLITE_EXACT"] == os.environ["VLLM_BATCH_INVARIANT"] == "1"
    assert ENVIRONMENT.items() <= dict(os.environ).items()
    prepare_environment(plugin=False)
    assert "MLITE_EXACT" not in os.environ and os.environ["VLLM_BATCH_INVARIANT"] == "1"
    prepare_environment(plugin=False, in_process=False)
    assert "MLITE_EXACT" not in os.environ and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    prepare_environment(plugin=False, batch_invariant=False)
    assert "MLITE_EXACT" not in os.environ and os.environ["VLLM_BATCH_INVARIANT"] == "0"


def check_rotary(own: Tensor, *tables: Tensor) -> None:
    engine = object.__new__(VllmEngine)
    engine.llm = SimpleNamespace(collective_rpc=lambda function: [function(worker_with(table)) for table in tables])
    engine.check_rotary(own)


def worker_with(table: Tensor) -> SimpleNamespace:
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    model[1].register_buffer("cos_sin_cache", table, persistent=False)
    return SimpleNamespace(get_model=lambda: model)


def test_the_rotary_table_of_a_worker() -> None:
    table = torch.randn(4, 8)
    assert [found is table for found in _rotary_tables(worker_with(table))] == [True]


def test_every_layers_own_table_is_compared() -> None:
    """Layers may share one, or turn by tables of their own."""
    table, other = torch.randn(4, 8), torch.randn(4, 8)
    model = nn.ModuleList([worker_with(t).get_model() for t in (table, table, other)])
    worker = SimpleNamespace(get_model=lambda: model)
    assert len(_rotary_tables(worker)) == 2
    engine = object.__new__(VllmEngine)
    engine.llm = SimpleNamespace(collective_rpc=lambda function: [function(worker)])
    with pytest.raises(ProbeError, match="position 0 differs"):
        engine.check_rotary(table)


@pytest.mark.parametrize("rows", [20, 32, 50], ids=["shorter", "equal", "longer"])
def test_equal_rotary_tables_pass(rows: int) -> None:
    table = torch.randn(50, 8).bfloat16()
    check_rotary(table[:32], table[:rows], table[:rows].clone())


@pytest.mark.parametrize("position", [0, 17, 19])
def test_a_differing_position_is_named(position: int) -> None:
    table = torch.randn(32, 8).bfloat16()
    other = table.clone()
    flip(other, position)
    flip(other, 31)
    with pytest.raises(ProbeError, match=f"position {position} differs"):
        check_rotary(table, table, other)
    if position:
        check_rotary(table[:position], table, other)


def test_minus_zero_is_not_zero_in_a_rotary_table() -> None:
    with pytest.raises(ProbeError, match="position 1 differs"):
        check_rotary(torch.zeros(3, 8), torch.tensor([[0.0], [-0.0], [0.0]]).expand(3, 8).contiguous())


# Pages.

LENGTHS = [1, 15, 16, 17, 40]


def unfaithful(k: Tensor, v: Tensor, lengths: list[int], page: int, laid_out: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[str]:
    """What reading the pages through the block table does not give back."""
    keys, values, table, found = laid_out
    problems = [] if found.tolist() == lengths else ["lengths"]
    used = [-(-n // page) for n in lengths]
    start, owned = 0, []
    for s, n in enumerate(lengths):
        pages = table[s, : used[s]].long()
        owned += pages.tolist()
        for name, cache, packed in (("k", keys, k), ("v", values, v)):
            rows = cache[pages].flatten(0, 1)
            if not same(rows[:n].contiguous(), packed[start : start + n]):
                problems.append(f"{name} of {s}")
            if bits(rows[n:]).any():
                problems.append(f"{name} padding of {s}")
        start += n
    return problems + ([] if sorted(owned) == list(range(len(owned))) else ["pages"])


def packed(lengths: list[int]) -> tuple[Tensor, Tensor, Seqlens]:
    k, v = (torch.randn(sum(lengths), 2, 8).bfloat16() for _ in range(2))
    k[0, 0, 0] = -0.0
    return k, v, Seqlens.of(lengths, lengths)


@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("lengths", [*([n] for n in LENGTHS), LENGTHS, LENGTHS[::-1], [16, 16], [17, 1, 17]], ids=str)
def test_pages_give_back_every_sequence(lengths: list[int], page: int) -> None:
    k, v, seqlens = packed(lengths)
    keys, values, table, found = paged(k, v, seqlens, page)
    assert unfaithful(k, v, lengths, page, (keys, values, table, found)) == []
    assert keys.shape == values.shape and sum(-(-n // page) for n in lengths) <= len(keys) <= sum(lengths) // page + len(lengths)
    assert table.dtype == found.dtype == torch.int32 and table.shape == (len(lengths), -(-max(lengths) // page))
    assert int(table.min()) >= 0 and int(table.max()) < len(keys), "a kernel may prefetch what it will not use"
    assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() and keys.stride() == values.stride()


def test_pages_that_do_not_would_be_seen() -> None:
    k, v, seqlens = packed(LENGTHS)
    plain = lambda: [t.clone() for t in paged(k, v, seqlens, 16)]
    keys, values, table, found = plain()
    assert unfaithful(k, v, LENGTHS, 16, (values, keys, table, found)) != []
    keys, values, table, found = plain()
    table[4, [0, 1]] = table[4, [1, 0]]
    assert unfaithful(k, v, LENGTHS, 16, (keys, values, table, found)) == ["k of 4", "v of 4"]
    keys, values, table, found = plain()
    flip(keys[int(table[0, 0])], 1)
    assert unfaithful(k, v, LENGTHS, 16, (keys, values, table, found)) == ["k padding of 0"]
    keys, values, table, found = plain()
    flip(values[int(table[4, 2])], 0)
    assert unfaithful(k, v, LENGTHS, 16, (keys, values, table, found)) == ["v of 4"]
    assert unfaithful(k, v, LENGTHS, 16, (keys, values, table, found + 1))[0] == "lengths"


# The handshake against what was asked for.

ASKED = {
    "attention": ["FLASH_ATTN"], "batch_invariant": True, "prefix_caching": False, "compilation_mode": 0, "graphs": "FULL_DECODE_ONLY",
    "runner": "vllm.v1.worker.gpu_model_runner", "page": 16, "vllm": "0.26.0",
}  # fmt: skip


def handshakes(answer: dict[str, Any]) -> list[dict[str, Any]]:
    engine = object.__new__(VllmEngine)
    engine.llm = SimpleNamespace(collective_rpc=lambda function: [answer])
    engine.attention, engine.graphs = "FLASH_ATTN", "full_decode"
    return engine._handshakes()


def test_a_worker_that_runs_what_was_asked_is_taken() -> None:
    assert handshakes(ASKED) == [ASKED]


@pytest.mark.parametrize(
    "other",
    [
        {"attention": ["TRITON_ATTN"]}, {"attention": ["FLASH_ATTN", "TRITON_ATTN"]}, {"batch_invariant": False}, {"prefix_caching": True},
        {"compilation_mode": 3}, {"graphs": "NONE"}, {"graphs": "FULL_AND_PIECEWISE"}, {"runner": "vllm.v1.worker.gpu.model_runner"},
    ],
)  # fmt: skip
def test_a_worker_that_runs_something_else_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="it was asked for"):
        handshakes(ASKED | other)
