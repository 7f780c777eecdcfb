"""On a Hopper GPU: a hybrid of Mamba-2, attention and experts decodes in vLLM as it prefills, whole and in pieces, through the plugin.

    python -m pytest tests/gpu/test_mamba_inference.py -m gpu        # with vLLM 0.26 and this package's wheel installed

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
        reason="needs a Hopper GPU and vLLM 0.26: run `python -m pytest tests/gpu/test_mamba_inference.py -m gpu` there",
    ),
]

SEQUENCES, FIRSTS, RESPONSE, LONGEST = 240, 24, 80, 4500  # FIRSTS: prompts of one token, all at once
WHOLE, PIECE = 16384, 333  # tokens a step: room for any sequence, and a number that cuts them at odd places
ATTENTION_PAGE = 3648  # tokens, as large as a Mamba layer's page


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """-> (vLLM's LLM, the counters of its scheduler). The cache holds three quarters of the requests at once."""
    from lite.runtime.rollout.vllm import build_llm, counting_scheduler
    from tests.gpu.nemotron_h import write_checkpoint

    folder, counters = tmp_path_factory.mktemp("mamba") / "nemotron_h", RolloutCounters()
    write_checkpoint(folder)
    llm = build_llm(
        folder, plugin=True, attention="FLASH_ATTN", graphs="full_decode", hybrid=True, max_model_len=LONGEST + RESPONSE + 1,
        max_num_batched_tokens=WHOLE, max_num_seqs=256, logprobs_mode="raw_logprobs", kv_cache_memory_bytes=4 << 30,
        scheduler_cls=counting_scheduler(counters, lambda tokens: None),
    )  # fmt: skip
    return llm, counters


@pytest.fixture(scope="module")
def finished(engine):
    """Long prompts, some that reach the next page of the attention while they decode, short ones around a chunk's end; then first tokens
    alone, which have the shape of a decode step and pages that others have left."""
    generator = torch.Generator().manual_seed(0)
    words = lambda n: torch.randint(131072, (n,), generator=generator).tolist()
    odd = [1, 2, 3, 63, 64, 126, 127, 128, 129, 130, 254, 255, 256, 257, 383, 384, 385, *range(ATTENTION_PAGE - 70, ATTENTION_PAGE, 5)]
    lengths = [1 + (LONGEST - 1) * i // (SEQUENCES - 1) if i % 5 == 0 else 1 + i * 7 % 411 for i in range(SEQUENCES - len(odd))] + odd
    llm = engine[0]
    return sampled(llm, [words(n) for n in lengths], RESPONSE) + sampled(llm, [words(1) for _ in range(FIRSTS)], RESPONSE)


def test_the_worker_answers_the_handshake(engine, record):
    from lite.vllm_plugin import handshake

    (found,) = engine[0].collective_rpc(handshake)
    counts = {name: found["replaced"][name]["layers"] for name in ("MambaMixer2", "Mixer2RMSNormGated", "GateLinear", "RMSNorm")}
    assert counts == {"MambaMixer2": 4, "Mixer2RMSNormGated": 4, "GateLinear": 3, "RMSNorm": 9}
    assert found["replaced"]["UnquantizedFusedMoEMethod"]["layers"] == 3 and found["page"] == ATTENTION_PAGE
    assert found["attention"] == ["FLASH_ATTN"] and found["graphs"] == "FULL_DECODE_ONLY" and found["batch_invariant"]
    ((state, chunk),) = engine[0].collective_rpc(_state)
    assert chunk == 128 and [str(dtype) for _, dtype in state] == ["torch.bfloat16", "torch.float32", "torch.bfloat16", "torch.bfloat16"]
    record["handshake"], record["state"] = found, [list(shape) for shape, _ in state]


def _state(worker):
    mixer = worker.get_model().model.layers[0].mixer
    return [(t.shape[1:], t.dtype) for t in mixer.kv_cache], mixer.scan_shape.chunk


def test_decode_equals_prefill_whole_and_in_pieces(engine, finished, record):
    llm, counters = engine
    record["counters"] = {name: getattr(counters, name) for name in ("rows_max_in_batch", "mixed_batches", "joins", "preemptions")}
    assert counters.rows_max_in_batch > 256 and counters.mixed_batches and counters.joins, counters
    cuts = counters.chunked_prefills
    whole = comparison(finished, prefilled(llm, finished, WHOLE, WHOLE))
    assert counters.chunked_prefills == cuts, "the whole prefill was cut"
    pieces = comparison(finished, prefilled(llm, finished, PIECE, WHOLE))
    cuts = counters.chunked_prefills - cuts
    record["prompt_tokens"] = [min(s[0] for s in finished), max(s[0] for s in finished)]
    record["decode_against_prefill"], record["decode_against_pieces"] = whole.as_dict(), pieces.as_dict()
    firsts = finished[SEQUENCES:]
    alone = comparison(firsts, prefilled(llm, firsts, WHOLE, WHOLE))
    record["first_tokens_alone"], record["pieces"] = alone.as_dict(), {"step_tokens": PIECE, "cut_prefills": cuts}
    assert whole.valid_tokens == pieces.valid_tokens == (SEQUENCES + FIRSTS) * RESPONSE > 20_000
    assert cuts > 50 and whole.exact and pieces.exact and alone.exact, (whole, pieces, alone)


def test_a_boundary_that_is_shifted_by_one_row_would_be_seen(engine, finished, record, monkeypatch):
    """The planted error: prompts leave the rows since their last chunk in the wrong places, and decode goes on from there."""
    from lite.vllm_plugin import replay

    llm, prompts = engine[0], [ids[:start] for start, ids, _ in finished[:40]]
    of = replay.Pieces.of
    with monkeypatch.context() as patch:
        patch.setattr(replay.Pieces, "of", lambda *args: (p := of(*args))._replace(kept_at=(p.kept_at - 1).clamp(min=0)))
        wrong = sampled(llm, prompts, 8)
    changed = comparison(wrong, prefilled(llm, wrong, WHOLE, WHOLE))
    again = sampled(llm, prompts, 8)
    right = comparison(again, prefilled(llm, again, WHOLE, WHOLE))
    record["planted_shift"], record["without_it"] = changed.as_dict(), right.as_dict()
    assert changed.mismatch > 0 and right.exact


def test_one_bit_of_one_mamba_weight_would_be_seen(engine, finished, record):
    """The planted error: the lowest bit of one row of one projection, between decode and prefill."""
    llm, some = engine[0], finished[:40]
    llm.collective_rpc(_flip_projection_bits)
    changed = comparison(some, prefilled(llm, some, WHOLE, WHOLE))
    llm.collective_rpc(_flip_projection_bits)
    record["planted_projection_bit"] = changed.as_dict()
    assert changed.mismatch > 0
    assert comparison(some, prefilled(llm, some, WHOLE, WHOLE)).exact, "put back, it agrees again"


def _flip_projection_bits(worker):
    weight = worker.get_model().get_parameter("model.layers.0.mixer.in_proj.weight")
    weight.data[5000].view(torch.int16).bitwise_xor_(1)
