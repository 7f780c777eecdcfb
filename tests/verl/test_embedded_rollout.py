"""The rollout that these tests train with: what it samples, what it refuses, and what it makes of a sync."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import verl
from verl_mlite.engine import SYNC
from verl_mlite.testing import platform_cpu
from verl_mlite.testing.rollout import EmbeddedServer

from lite.errors import InputError
from lite.primitive.ckpt.safetensors_files import read_tensors
from lite.primitive.compare import bits
from lite.runtime import routes
from lite.runtime.batch import PackedBatch
from tests.checkpoints import checkpoint, trainer

DEFAULTS = {"temperature": 0.7, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}  # what verl's agent loops ask for


def server(dtype: str = "float32", eos: int = 95, family: str = "qwen3", record: bool = False) -> EmbeddedServer:
    folder = checkpoint(family, {"float32": "fp32", "bfloat16": "bf16"}[dtype])
    model = SimpleNamespace(local_path=str(folder), override_config={}, tokenizer=SimpleNamespace(eos_token_id=eos))
    config = SimpleNamespace(dtype=dtype, seed=42, response_length=12, enable_rollout_routing_replay=record)
    return EmbeddedServer(0, config, model)


def generate(engine: EmbeddedServer, prompts: list[list[int]], **changes: Any) -> list[Any]:
    async def together() -> list[Any]:
        return await asyncio.gather(*[engine.generate(prompt, DEFAULTS | changes, "id") for prompt in prompts])

    return asyncio.run(together())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_concurrent_requests_of_one_prompt_are_different_samples_with_the_trainers_logprobs(dtype):
    prompts = [[3, 1, 4]] * 4 + [[1, 5, 9, 2, 6]] * 2
    engine = server(dtype)
    outputs = generate(engine, prompts)
    assert engine.engine.counters.rows_max_in_batch > len(prompts[0])  # all but the first one ran together
    assert len({tuple(output.token_ids) for output in outputs}) == len(outputs)
    short = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    runtime, handle = trainer(checkpoint("qwen3", short), short)
    batch = PackedBatch.from_samples([(p, o.token_ids) for p, o in zip(prompts, outputs, strict=True)], temperature=DEFAULTS["temperature"])
    scores = runtime.forward_backward(handle, batch, forward_only=True).log_probs[0][batch.loss_mask]
    assert torch.equal(bits(scores), bits(torch.tensor([value for output in outputs for value in output.log_probs])))


def test_a_second_run_draws_the_same_samples():
    prompts = [[3, 1, 4]] * 3
    first, second = ([output.token_ids for output in generate(server(), prompts)] for _ in range(2))
    assert first == second


def test_a_response_ends_with_the_end_of_sequence():
    (whole,) = generate(server(), [[3, 1, 4]])
    end = whole.token_ids[5]
    (cut,) = generate(server(eos=end), [[3, 1, 4]])
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]


@pytest.mark.parametrize("change", [{"top_p": 0.9}, {"top_k": 20}, {"temperature": 0}, {"repetition_penalty": 1.1}])
def test_what_would_change_the_distribution_is_refused_by_name(change):
    with pytest.raises(InputError, match=next(iter(change))):
        generate(server(), [[3, 1, 4]], **change)


def test_a_record_has_vllms_form_and_is_the_trainers_choice():
    prompts = [[3, 1, 4]] * 2 + [[1, 5, 9, 2, 6]]
    outputs = generate(server(family="qwen3_moe", record=True), prompts)
    runtime, handle = trainer(checkpoint("qwen3_moe", "fp32"), "fp32")
    config = handle.bundle.config
    for prompt, output in zip(prompts, outputs, strict=True):
        record = output.routed_experts
        assert record.dtype == np.uint8 and not record[:, 0].any()  # a dense layer
        with routes.recording(handle.module) as found:
            runtime.forward_backward(handle, PackedBatch.from_samples([(prompt, output.token_ids)]), forward_only=True)
        assert torch.equal(routes.from_vllm(record, config), routes.by_layer(found, config.layers)[:-1])  # the last token was never run
    plain = generate(server(family="qwen3_moe"), prompts)
    assert [(o.token_ids, o.log_probs) for o in plain] == [(o.token_ids, o.log_probs) for o in outputs]
    assert all(o.routed_experts is None for o in plain)
    with pytest.raises(InputError, match="the model has no experts"):
        server(record=True)


def sync(facts: dict[str, Any] | None, seed: int = 1) -> list[tuple[str, torch.Tensor]]:
    first = [(SYNC, torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8))] if facts else []
    return first + list(read_tensors(checkpoint("qwen3", "fp32", seed)))


def test_a_sync_is_checked_against_the_trainers_fingerprint(tmp_path):
    engine, answer = server(), str(tmp_path / "answer.json")
    with pytest.raises(InputError, match="other bytes"):
        asyncio.run(engine.update_weights(sync({"version": 1, "fingerprint": engine.engine.fingerprint()}), 1))
    with pytest.raises(InputError, match="not whole"):
        generate(engine, [[3, 1, 4]])
    _, handle = trainer(checkpoint("qwen3", "fp32", 1), "fp32")
    asyncio.run(engine.update_weights(sync({"version": 1, "fingerprint": handle.weights.fingerprint(), "answer": answer}), 1))
    assert json.loads((tmp_path / "answer.json").read_text())["version"] == 1
    assert generate(engine, [[3, 1, 4]])[0].extra_fields["global_steps"] == 1


def test_a_sync_that_says_nothing_about_the_weights_is_refused_in_exact_mode(monkeypatch):
    asyncio.run(server().update_weights(sync(None), 1))
    monkeypatch.setenv("MLITE_EXACT", "1")
    with pytest.raises(InputError, match=SYNC):
        asyncio.run(server().update_weights(sync(None), 1))


def test_weights_are_gone_after_a_sleep_unless_a_test_keeps_them(monkeypatch):
    for kept in (False, True):
        if kept:
            monkeypatch.setenv("MLITE_TEST_SKIP_SYNC_AFTER", "0")
        engine = server()
        asyncio.run(engine.sleep())
        asyncio.run(engine.wake_up())
        if kept:
            assert generate(engine, [[3, 1, 4]])
        else:
            with pytest.raises(InputError, match="not whole"):
                generate(engine, [[3, 1, 4]])


def test_another_verl_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(verl, "__version__", "0.9.2")
    with pytest.raises(InputError, match=r"0\.9\.2.*verl==0\.9\.1"):
        platform_cpu.require_verified_version()
