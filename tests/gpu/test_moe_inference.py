"""On a Hopper GPU: a mixture of experts decodes in vLLM as it prefills, whole and in pieces, through the plugin.

    python -m pytest tests/gpu/test_moe_inference.py -m gpu        # with vLLM 0.26 and this package's wheel installed

The sides are the engine's alone: the logprob of the step that sampled a token, and those that two prefills of the finished sequences give.
"""

import importlib.util

import pytest
import torch

from lite.runtime.rollout.engine import RolloutCounters
from tests.gpu.inference import comparison, prefilled, sampled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None,
        reason="needs a Hopper GPU and vLLM 0.26: run `python -m pytest tests/gpu/test_moe_inference.py -m gpu` there",
    ),
]

LAYERS, SEQUENCES, RESPONSE, LONGEST = 4, 272, 80, 3000
WHOLE, PIECE = 16384, 333  # tokens a step: room for any sequence, and a number that cuts them at odd places


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """-> (vLLM's LLM, the counters of its scheduler)."""
    from lite.runtime.rollout.vllm import build_llm, counting_scheduler
    from tests.gpu.qwen3_moe import write_checkpoint

    folder, counters = tmp_path_factory.mktemp("moe") / "qwen3_moe", RolloutCounters()
    write_checkpoint(folder, LAYERS)
    llm = build_llm(
        folder, plugin=True, attention="FLASH_ATTN", graphs="full_decode", max_model_len=LONGEST + RESPONSE + 1,
        max_num_batched_tokens=WHOLE, max_num_seqs=256, logprobs_mode="raw_logprobs", kv_cache_memory_bytes=12 << 30,
        async_scheduling=True, scheduler_cls=counting_scheduler(counters, lambda tokens: None, asynchronous=True),
    )  # fmt: skip
    return llm, counters


@pytest.fixture(scope="module")
def finished(engine):
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + (LONGEST - 1) * i // (SEQUENCES - 1) if i % 4 == 0 else 1 + i * 7 % 411 for i in range(SEQUENCES)]
    return sampled(engine[0], [torch.randint(151936, (n,), generator=generator).tolist() for n in lengths], RESPONSE)


def test_the_worker_answers_the_handshake(engine, record):
    from lite.vllm_plugin import handshake

    (found,) = engine[0].collective_rpc(handshake)
    assert found["replaced"]["UnquantizedFusedMoEMethod"]["layers"] == LAYERS
    assert found["attention"] == ["FLASH_ATTN"] and found["graphs"] == "FULL_DECODE_ONLY" and found["batch_invariant"]
    record["handshake"] = found


def test_decode_equals_prefill_whole_and_in_pieces(engine, finished, record):
    llm, counters = engine
    assert counters.rows_max_in_batch > 256 and counters.mixed_batches and counters.joins, counters
    cuts = counters.chunked_prefills
    whole = comparison(finished, prefilled(llm, finished, WHOLE, WHOLE))
    assert counters.chunked_prefills == cuts, "the whole prefill was cut"
    pieces = comparison(finished, prefilled(llm, finished, PIECE, WHOLE))
    cuts = counters.chunked_prefills - cuts
    record["prompt_tokens"] = [min(s[0] for s in finished), max(s[0] for s in finished)]
    record["decode_against_prefill"], record["decode_against_pieces"] = whole.as_dict(), pieces.as_dict()
    record["pieces"] = {"step_tokens": PIECE, "cut_prefills": cuts}
    assert whole.valid_tokens == pieces.valid_tokens == SEQUENCES * RESPONSE > 20_000
    assert cuts > 50 and whole.exact and pieces.exact, (whole, pieces)


def test_one_bit_of_one_router_weight_would_be_seen(engine, finished, record):
    """The planted error: the lowest bit of one router's first row, between decode and prefill."""
    llm, some = engine[0], finished[:40]
    llm.collective_rpc(_flip_router_bits)
    changed = comparison(some, prefilled(llm, some, WHOLE, WHOLE))
    llm.collective_rpc(_flip_router_bits)
    record["planted_router_bit"] = changed.as_dict()
    assert changed.mismatch > 0
    assert comparison(some, prefilled(llm, some, WHOLE, WHOLE)).exact, "put back, it agrees again"


def _flip_router_bits(worker):
    weight = worker.get_model().get_parameter("model.layers.0.mlp.gate.weight")
    weight.data[0].view(torch.int16).bitwise_xor_(1)
