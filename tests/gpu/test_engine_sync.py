"""On a Hopper GPU: an update reaches vLLM whole, twice in a row too, through sleep and wake, for a tied head and a temperature below 1.

python -m pytest tests/gpu/test_engine_sync.py -m gpu        # with vLLM 0.26 and this package's wheel installed
"""

import importlib.util

import pytest
import torch

from lite.acceptance.scoring import compare_path, pack_rollout
from lite.errors import InputError
from lite.runtime.batch import PackedBatch
from lite.runtime.rollout.engine import Prompt, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None,
        reason="needs a Hopper GPU and vLLM 0.26: run `python -m pytest tests/gpu/test_engine_sync.py -m gpu` there",
    ),
]

TEMPERATURE = 0.6


class Pair:
    """A trainer and a vLLM engine of one checkpoint with a tied head."""

    def __init__(self, folder):
        from lite.acceptance.proxy import write_proxy
        from lite.primitive.ops.bridges import vllm_ops
        from lite.runtime.config import MegatronLiteConfig, OptimizerConfig, RuntimeConfig
        from lite.runtime.rollout.vllm import VllmEngine
        from lite.runtime.runtime import Runtime

        write_proxy("llama", folder, geometry="real", layers=6, dtype=torch.bfloat16, seed=0)
        self.runtime = Runtime(RuntimeConfig(hf_path=str(folder), backend_cfg=MegatronLiteConfig(optimizer=OptimizerConfig(lr=1e-3))))
        self.engine = VllmEngine(
            self.runtime.bundle(), folder, plugin=True, attention="TRITON_ATTN", graphs="full_decode", max_model_len=512,
            max_step_tokens=257, max_sequences=32, temperature=TEMPERATURE, cache_bytes=2 << 30, sleep_mode=True,
        )  # fmt: skip
        self.trainer = self.runtime.build_model(vllm_ops("TRITON_ATTN"), self.engine.page)

    def update(self) -> None:
        """One step of a loss that moves every parameter."""
        ids = torch.randint(49152, (300,), generator=torch.Generator().manual_seed(self.trainer.weights.require())).tolist()
        batch = PackedBatch.from_samples([(ids[:5], ids[5:120]), (ids[120:121], ids[121:])])
        self.runtime.zero_grad(self.trainer)
        self.runtime.forward_backward(self.trainer, batch, lambda scores, batch, step: (-scores.logprob[batch.loss_mask].mean(), {}))
        done, norm, _ = self.runtime.optimizer_step(self.trainer)
        assert done and norm > 0 and self.trainer.weights.bytes_changed > 0

    def sync(self) -> None:
        self.engine.update_weights(self.runtime.export_weights(self.trainer), self.trainer.weights.require())

    def same_weights(self) -> bool:
        return self.engine.fingerprint() == self.trainer.weights.fingerprint()

    def mismatch(self, at: float = TEMPERATURE) -> int:
        """Of the logprobs of fresh samples, scored by the trainer at a temperature."""
        generator = torch.Generator().manual_seed(1)
        prompts = [Prompt(f"p{n}", tuple(torch.randint(49152, (n,), generator=generator).tolist())) for n in (1, 15, 16, 17, 200, 300)]
        trajectories = self.engine.generate(prompts, Sampling(temperature=TEMPERATURE, max_tokens=32, n=3, seed=2))
        rollout = pack_rollout(trajectories, at, 0, None)
        scored = self.runtime.forward_backward(self.trainer, rollout.batches, forward_only=True)
        found = compare_path(rollout, scored.log_probs, with_grad=False)
        assert found["valid_tokens"] == 6 * 3 * 32 and found["nonfinite"] == 0
        return found["mismatch"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("sync") / "llama")


def test_logprobs_are_those_of_the_tempered_softmax(pair, record):
    """trl#4159: a trainer that scores at another temperature differs in almost every token."""
    assert pair.engine.handshakes[0]["logprobs_mode"] == "processed_logprobs"
    record["mismatch_at_0.6"], record["mismatch_of_a_trainer_at_1.0"] = pair.mismatch(), pair.mismatch(at=1.0)
    assert record["mismatch_at_0.6"] == 0 and record["mismatch_of_a_trainer_at_1.0"] > 500


def test_a_tied_head_follows_one_update_and_one_sync(pair, record):
    """torchtitan#2402: the first policy after an update; without the sync it must differ."""
    assert pair.trainer.bundle.config.tied_head
    pair.update()
    record["mismatch_before_the_sync"] = pair.mismatch()
    assert record["mismatch_before_the_sync"] > 0 and not pair.same_weights()
    pair.sync()
    assert pair.same_weights() and pair.mismatch() == 0


def test_two_syncs_in_a_row_leave_equal_fingerprints(pair):
    """verl#7904: a reload that is not idempotent."""
    pair.update()
    for _ in range(2):
        pair.sync()
        assert pair.same_weights()
    assert pair.mismatch() == 0


def test_level_1_sleep_keeps_the_policy(pair):
    before = torch.cuda.mem_get_info()[0]
    pair.engine.sleep(1)
    assert torch.cuda.mem_get_info()[0] - before > 1 << 30, "it gave the cache back"
    pair.engine.wake()
    assert pair.same_weights() and pair.mismatch() == 0


def test_level_2_sleep_needs_a_sync_after_wake(pair, record):
    pair.update()
    pair.engine.sleep(2)
    pair.engine.wake()
    with pytest.raises(InputError, match="not whole"):
        pair.mismatch()
    assert not pair.same_weights()
    pair.sync()
    record["mismatch_after_level_2_sleep_and_sync"] = pair.mismatch()
    assert pair.same_weights() and record["mismatch_after_level_2_sleep_and_sync"] == 0
