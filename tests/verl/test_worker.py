"""What the exact worker makes of a weight sync, on fakes of verl's vLLM worker and of vLLM's model; each error planted."""

import asyncio
import importlib.util
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import verl
from torch import Tensor
from verl_mlite.engine import SYNC, MliteEngine

from lite import vllm_plugin
from lite.errors import InputError
from tests.checkpoints import checkpoint, trainer
from tests.unit.runtime.test_vllm_engine import MAPPERS, FakeModel, Mapper

VERL = "verl.workers.rollout.vllm_rollout"
HANDSHAKE = {
    "plugin": "0", "batch_invariant": True, "prefix_caching": False, "compilation_mode": 0, "runner": "vllm.v1.worker.gpu_model_runner",
    "graphs": "FULL_DECODE_ONLY",
}  # fmt: skip
Tensors = list[tuple[str, Tensor]]


class Transfer:
    """verl's sender and receiver on one side: buckets go through one buffer, which the next bucket overwrites."""

    buckets: list[Tensors]
    acknowledged: int

    def receive_weights(self, on_bucket_received: Callable[[Tensors, bool], None]) -> None:
        Transfer.acknowledged = 0
        for i, bucket in enumerate(Transfer.buckets):
            buffer = [(name, tensor.clone()) for name, tensor in bucket]
            on_bucket_received(buffer, i == len(Transfer.buckets) - 1)
            for _, tensor in buffer:
                tensor.zero_()
            Transfer.acknowledged += 1


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """The class, imported as a vLLM worker would: verl's module, which needs vLLM, is replaced."""

    class Base:
        def monkey_patch_model(self, *_: Any) -> None:
            raise AssertionError("verl's version masks logits")

        def _get_zmq_handle(self) -> str:
            return "ipc://handle"

    def receiver(zmq_handle: str, device: torch.device, use_shm: bool) -> Transfer:
        assert (zmq_handle, device, use_shm) == ("ipc://handle", torch.device("cpu"), False)
        return Transfer()

    for name, content in (
        ("", {}),
        (".utils", {"vLLMColocateWorkerExtension": Base}),
        (".bucketed_weight_transfer", {"BucketedWeightReceiver": receiver}),
    ):
        module = ModuleType(VERL + name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, VERL + name, module)
    monkeypatch.setenv("MLITE_EXACT", "1")
    monkeypatch.setattr(vllm_plugin, "handshake", lambda worker: dict(HANDSHAKE))
    yield importlib.import_module("verl_mlite.worker").ExactWorkerExtension
    sys.modules.pop("verl_mlite.worker", None)


class Job:
    """A trainer, and a worker whose model has the trainer's layout and other weights."""

    def __init__(self, extension: type, family: str):
        runtime, handle = trainer(checkpoint(family, "bf16"))
        self.answers = tempfile.TemporaryDirectory()
        trained = SimpleNamespace(runtime=runtime, handle=handle, synced_version=handle.weights.require(), answers=self.answers)
        sent = list(MliteEngine._exported(trained))
        self.facts = json.loads(bytes(sent[0][1].tolist()))
        self.tensors = [(name, tensor.clone()) for name, tensor in sent[1:]]
        self.model = FakeModel(self.tensors, Mapper(**MAPPERS[family]))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1)
        self.worker = extension()
        config = SimpleNamespace(lora_config=None, quant_config=None, speculative_config=None)
        self.worker.__dict__.update(vllm_config=config, device=torch.device("cpu"), get_model=lambda: self.model)

    def sync(
        self, tensors: Tensors | None = None, facts: dict[str, Any] | None = None, first: str = SYNC, size: int = 5, **kwargs: Any
    ) -> None:
        data = torch.frombuffer(bytearray(json.dumps(facts or self.facts).encode()), dtype=torch.uint8)
        stream = [(first, data), *(self.tensors if tensors is None else tensors)]
        Transfer.buckets = [stream[i : i + size] for i in range(0, len(stream), size)]
        self.worker.update_weights_from_ipc(**kwargs)

    def refusal(self, *args: Any, **kwargs: Any) -> str:
        """Every bucket is answered before the error, or verl's sender would wait for ever."""
        with pytest.raises(InputError) as caught:
            self.sync(*args, **kwargs)
        assert Transfer.acknowledged == len(Transfer.buckets)
        assert self.worker.mlite_policy_version is None
        return str(caught.value)


@pytest.fixture(params=["qwen3", "nemotron_h"])
def job(extension: type, request: pytest.FixtureRequest) -> Job:
    return Job(extension, request.param)


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_a_whole_sync_is_taken_in_buckets_of_any_size(job: Job, size: int) -> None:
    job.sync(size=size)
    assert job.worker.mlite_policy_version == job.facts["version"]
    job.sync(size=size)  # nothing in a sync may be done only once


def test_one_line_says_what_the_worker_holds_and_the_first_what_it_is(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "verl_mlite"):
        job.sync()
        job.sync()
    first, second = (record.getMessage() for record in caplog.records)
    said = f"vLLM holds policy version {job.facts['version']}, fingerprint {job.facts['fingerprint']}"
    assert second == said and first == f"{said}, handshake {json.dumps(HANDSHAKE, sort_keys=True)}"


def test_the_trainer_reads_what_the_worker_holds_and_what_it_is(job: Job) -> None:
    """Each sync overwrites the answer to the one before; a worker that refuses leaves it, and the trainer does not take it for this one."""
    trainer = SimpleNamespace(answers=job.answers, synced_version=job.facts["version"], synced_fingerprint=job.facts["fingerprint"])
    with pytest.raises(InputError, match=r"the rollout answered nothing to policy version 0; set engine_kwargs.vllm.worker_extension_cls"):
        MliteEngine._answer(trainer)
    for _ in range(2):
        job.sync()
        held = {"version": job.facts["version"], "fingerprint": job.facts["fingerprint"]}
        assert MliteEngine._answer(trainer) == held | {"handshake": HANDSHAKE}
    job.refusal(job.tensors[1:], job.facts | {"version": 1})
    trainer.synced_version = 1
    with pytest.raises(InputError, match=r"answered {'version': 0, .* to policy version 1; "):
        MliteEngine._answer(trainer)


def test_a_missing_tensor_is_named(job: Job) -> None:
    name, _ = job.tensors[7]
    assert job.refusal(job.tensors[:7] + job.tensors[8:]).startswith(f"weight sync: 1 missing ['{name}']; ")


def test_a_part_of_a_fused_parameter_is_missed_though_vllm_reports_the_whole(job: Job) -> None:
    name = next(name for name, _ in job.tensors if name.endswith("k_proj.weight"))
    assert f"1 missing ['{name}']" in job.refusal([(n, t) for n, t in job.tensors if n != name])


def test_a_doubled_tensor_is_named(job: Job) -> None:
    name, _ = job.tensors[0]
    assert job.refusal([*job.tensors, job.tensors[0]]).startswith(f"weight sync: 1 doubled ['{name}']; ")


def test_an_unexpected_tensor_is_named(job: Job) -> None:
    facts = job.facts | {"rows": job.facts["rows"][1:]}
    assert job.refusal(facts=facts).startswith(f"weight sync: 1 unexpected ['{job.facts['rows'][0][0]}']; ")


def test_a_tensor_that_vllm_does_not_report_is_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    load = job.model.load_weights
    silent = next(name for name, _ in job.model.named_parameters() if "norm" in name)
    monkeypatch.setattr(job.model, "load_weights", lambda tensors: load(tensors) - {silent})
    assert job.refusal().startswith(f"weight sync: vLLM did not load ['{silent}']; ")


def test_one_flipped_bit_is_seen(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    load = job.model.load_weights

    def flips(tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = load(iter(tensors))
        parameter = next(job.model.parameters()).data
        parameter.view(torch.int16 if parameter.element_size() == 2 else torch.int32).view(-1)[5] ^= 1
        return loaded

    monkeypatch.setattr(job.model, "load_weights", flips)
    said = job.refusal(size=10_000)
    assert said.startswith("weight sync: vLLM holds fingerprint ") and job.facts["fingerprint"][:16] in said


def test_stale_weights_are_seen(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name.replace(".experts.routed_experts.", ".experts.") for name, _ in job.model.named_parameters()}
    monkeypatch.setattr(job.model, "load_weights", lambda tensors: names)
    assert job.refusal().startswith("weight sync: vLLM holds fingerprint ")


def test_what_vllms_loader_raises_waits_for_the_last_bucket(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        raise RuntimeError("shape")

    monkeypatch.setattr(job.model, "load_weights", fails)
    with pytest.raises(RuntimeError, match="shape"):
        job.sync()
    assert Transfer.acknowledged == len(Transfer.buckets) > 1


def test_no_handshake_is_no_sync(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def stock(worker: Any) -> dict[str, Any]:
        raise InputError("vllm worker", "3 of 3 RMSNorm layers are not the plugin's", "set MLITE_EXACT=1 for it")

    with monkeypatch.context() as patch:
        patch.setattr(vllm_plugin, "handshake", stock)
        assert "RMSNorm layers are not the plugin's" in job.refusal()
    for wrong in ({"graphs": "FULL_AND_PIECEWISE"}, {"batch_invariant": False}, {"prefix_caching": True}, {"runner": "vllm.v2"}):
        with monkeypatch.context() as patch:
            patch.setattr(vllm_plugin, "handshake", lambda worker, wrong=wrong: HANDSHAKE | wrong)
            assert job.refusal().startswith("vllm worker: runs {")
    job.sync()


def test_a_trainer_that_is_not_exact_is_named(job: Job) -> None:
    assert f"begins with other, not {SYNC}" in job.refusal(first="other")


def test_an_adapter_is_refused_after_its_last_bucket(job: Job) -> None:
    assert "brings an adapter" in job.refusal(peft_config={"r": 8}, base_sync_done=True)


@pytest.mark.parametrize("what", ["lora_config", "quant_config", "speculative_config"])
def test_what_no_trainer_matches_is_refused_when_the_engine_is_up(job: Job, what: str) -> None:
    setattr(job.worker.vllm_config, what, object())
    with pytest.raises(InputError, match=what):
        job.worker.monkey_patch_model(vocab_size=96)


def test_logits_are_not_masked_and_banned_ids_are_refused(job: Job) -> None:
    logits = job.model.compute_logits = object()
    job.worker.monkey_patch_model(vocab_size=90, banned_token_ids=None)
    job.worker.monkey_patch_model(vocab_size=90, banned_token_ids=[])
    assert job.model.compute_logits is logits
    with pytest.raises(InputError, match=r"2 banned token ids \(banned_token_ids\)"):
        job.worker.monkey_patch_model(vocab_size=90, banned_token_ids=[3, 4])


@pytest.mark.parametrize("value", [None, "0"])
def test_it_is_refused_without_its_switch(job: Job, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.setattr(os, "environ", {} if value is None else {"MLITE_EXACT": value})
    with pytest.raises(InputError, match=f"MLITE_EXACT: is {value or 'unset'} in vLLM's worker"):
        job.worker.monkey_patch_model(vocab_size=96)


def test_it_adds_no_name_that_vllms_worker_might_have(extension: type) -> None:
    """vLLM refuses an extension that shares a name with its worker; verl's own names are known to be free."""
    assert {name for name in vars(extension) if not name.startswith("__")} == {"monkey_patch_model", "update_weights_from_ipc"}


# verl's own two ends of a sync. Its package cannot be imported without vLLM, so the file is loaded by its path.


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(verl.__file__).parent / "workers" / "rollout" / "vllm_rollout" / "bucketed_weight_transfer.py"
    spec = importlib.util.spec_from_file_location("mlite_test_transfer", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    nothing = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
    monkeypatch.setattr(module, "get_torch_device", lambda: nothing)
    monkeypatch.setattr(module, "is_support_ipc", lambda: False)
    return module


def fails_twice(tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    """An error and its cause, both of whose frames hold views of the shared bucket."""
    held = list(tensors)
    try:
        raise KeyError(held[0][0])
    except KeyError as error:
        raise RuntimeError("shape") from error


@pytest.mark.parametrize("fault", [None, "missing", "adapter", "loader"])
def test_verls_own_sender_gets_every_answer_whatever_is_wrong(
    job: Job, transfer: ModuleType, fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = f"ipc://{tmp_path}/s"
    monkeypatch.setattr(sys.modules[f"{VERL}.bucketed_weight_transfer"], "BucketedWeightReceiver", transfer.BucketedWeightReceiver)
    monkeypatch.setattr(job.worker, "_get_zmq_handle", lambda: handle, raising=False)
    if fault == "loader":
        monkeypatch.setattr(job.model, "load_weights", fails_twice)
    sender = transfer.BucketedWeightSender(handle, use_shm=True)
    sender.bucket_size = max(1 << 16, *(t.nbytes for _, t in job.tensors))
    data = torch.frombuffer(bytearray(json.dumps(job.facts).encode()), dtype=torch.uint8)
    tensors = job.tensors[1:] if fault == "missing" else job.tensors
    peft_config = {"r": 8} if fault == "adapter" else None
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(job.worker.update_weights_from_ipc, peft_config=peft_config, base_sync_done=True, use_shm=True)
        asyncio.run(asyncio.wait_for(sender.async_send_weights(iter([(SYNC, data), *tensors])), 30))
        error = worker.exception(30)
    assert {None: type(None), "missing": InputError, "adapter": InputError, "loader": RuntimeError}[fault] is type(error), error
    assert (job.worker.mlite_policy_version is None) == (fault is not None)
