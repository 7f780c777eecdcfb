"""On a Hopper GPU: vLLM records the experts that it chose, they are the trainer's own choice, and the trainer replays them, at
Qwen3-30B-A3B's layer geometry, 4 layers.

    python -m pytest tests/gpu/test_vllm_routes.py -m gpu        # with vLLM 0.26 and this package's wheel installed

Limits, set beforehand: a replay takes its weights from another softmax than the kernel's, so they differ by roundings of fp32 and a bf16
result may fall on the other side: 1e-2 on logprobs, 1e-1 on the routers' gradients.
"""

import importlib.util
from dataclasses import replace

import pytest
import torch

from lite.primitive.compare import compare_bytes
from lite.runtime import routes
from lite.runtime.batch import PackedBatch
from lite.runtime.rollout.engine import Prompt, Sampling
from tests.gradients import relative_l2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None,
        reason="needs a Hopper GPU and vLLM 0.26: run `python -m pytest tests/gpu/test_vllm_routes.py -m gpu` there",
    ),
]

LAYERS, EXPERTS, K, VOCABULARY, RESPONSE = 4, 128, 8, 151936, 32


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """-> (runtime, trainer, the engine's trajectories): prompts are cut, and graphs decode beside them."""
    from lite.acceptance.proxy import write_proxy
    from lite.primitive.ops.bridges import vllm_ops
    from lite.runtime.config import MegatronLiteConfig, OptimizerConfig, RuntimeConfig
    from lite.runtime.rollout.vllm import VllmEngine
    from lite.runtime.runtime import Runtime

    folder = tmp_path_factory.mktemp("routes") / "qwen3_moe"
    write_proxy("qwen3_moe", folder, geometry="real", layers=LAYERS, dtype=torch.bfloat16, seed=0)
    runtime = Runtime(RuntimeConfig(str(folder), backend_cfg=MegatronLiteConfig(optimizer=OptimizerConfig(lr=1e-4))))
    engine = VllmEngine(
        runtime.bundle(), folder, plugin=True, attention="FLASH_ATTN", graphs="full_decode", max_model_len=512, max_step_tokens=257,
        max_sequences=32, temperature=1.0, cache_bytes=2 << 30, record_routes=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    prompts = [Prompt(f"p{n}", tuple(torch.randint(VOCABULARY, (n,), generator=generator).tolist())) for n in (1, 15, 16, 17, 200, 300)]
    found = engine.generate(prompts, Sampling(max_tokens=RESPONSE, n=3, seed=2))
    assert engine.counters.chunked_prefills and engine.counters.mixed_batches
    return runtime, runtime.build_model(vllm_ops("FLASH_ATTN"), engine.page), found


def packed(trajectories, with_routes: bool) -> PackedBatch:
    """In an order of its own."""
    order = trajectories[::-1]
    recorded = [t.routed_experts for t in order] if with_routes else None
    return PackedBatch.from_samples([(t.prompt_ids, t.response_ids) for t in order], routes=recorded)


def scored(runtime, trainer, batch: PackedBatch) -> torch.Tensor:
    return runtime.forward_backward(trainer, batch, forward_only=True).log_probs[0].cpu()[batch.loss_mask]


def test_the_record_is_of_every_token_but_the_last_and_of_distinct_experts(sides):
    for t in sides[2]:
        ids = t.routed_experts
        assert ids.shape == (len(t.prompt_ids) + RESPONSE - 1, LAYERS, K)
        assert int(ids.min()) >= 0 and int(ids.max()) < EXPERTS and bool((ids.sort(-1).values.diff(dim=-1) > 0).all())
    every = torch.cat([t.routed_experts for t in sides[2]])
    assert all(len(every[:, layer].unique()) > EXPERTS // 2 for layer in range(LAYERS))


def test_vllm_recorded_the_trainers_own_choice(sides, record):
    """With the exact kernels, id by id and in their order."""
    runtime, trainer, trajectories = sides
    batch = packed(trajectories, with_routes=False)
    with routes.recording(trainer.module) as found:
        live = scored(runtime, trainer, batch)
    chosen = routes.by_layer(found, LAYERS).cpu()
    recorded = packed(trajectories, with_routes=True).routed_experts
    known = (recorded >= 0).all(-1).all(-1)
    assert int((~known).sum()) == len(trajectories), "the last row of each has no record"
    record["choices"], record["choices_that_differ"] = recorded[known].numel(), int((chosen != recorded)[known].sum())
    assert record["choices_that_differ"] == 0
    assert int((chosen.roll(1, 1) != recorded)[known].sum()) > 0, "the layers one further"
    against = compare_bytes(torch.cat([t.logprobs for t in trajectories[::-1]]), live)
    assert against.exact, against


def test_a_replay_scores_as_the_trainer_does_and_other_routes_do_not(sides, record):
    runtime, trainer, trajectories = sides
    batch = packed(trajectories, with_routes=True)
    live = scored(runtime, trainer, packed(trajectories, with_routes=False))
    others = torch.where(batch.routed_experts < 0, batch.routed_experts, (batch.routed_experts + 1) % EXPERTS)
    record["replay_error"] = relative_l2(scored(runtime, trainer, batch), live)
    record["replay_error_of_other_routes"] = relative_l2(scored(runtime, trainer, replace(batch, routed_experts=others)), live)
    assert record["replay_error"] < 1e-2 < record["replay_error_of_other_routes"]


def test_a_replay_trains_the_routers_as_the_trainer_does(sides, record):
    runtime, trainer, trajectories = sides

    def gradients(with_routes: bool) -> torch.Tensor:
        runtime.zero_grad(trainer)
        runtime.forward_backward(
            trainer, packed(trajectories, with_routes), lambda scores, batch, step: (-scores.logprob[batch.loss_mask].mean(), {})
        )
        return torch.cat([router.weight.grad.flatten() for router in trainer.module.routers()]).cpu()

    live, replayed = gradients(False), gradients(True)
    record["router_gradient_error"] = relative_l2(replayed, live)
    assert live.norm() > 0 and record["router_gradient_error"] < 1e-1
