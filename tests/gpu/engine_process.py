"""python -P tests/gpu/engine_process.py FOLDER BUNDLE: vLLM answers 12 prompts of 1 to 700 tokens by the checkpoint in FOLDER."""

import sys
from pathlib import Path

from lite.acceptance.bundle import save_bundle
from lite.acceptance.tasks import TokenSetTask
from lite.runtime.config import MegatronLiteConfig, RuntimeConfig
from lite.runtime.rollout.engine import Sampling
from lite.runtime.rollout.vllm import VllmEngine
from lite.runtime.runtime import Runtime

if __name__ == "__main__":
    folder, bundle = map(Path, sys.argv[1:])
    runtime = Runtime(RuntimeConfig(folder, backend_cfg=MegatronLiteConfig(optimizer=None)))
    engine = VllmEngine(
        runtime.bundle(), folder, plugin=True, attention="FLASH_ATTN", graphs="full_decode", max_model_len=800, max_step_tokens=517,
        max_sequences=48, temperature=1.0, cache_bytes=2 << 30,
    )  # fmt: skip
    prompts = TokenSetTask(runtime.hf_config["vocab_size"], 12, (1, 700), seed=0).prompts(0)
    trajectories = engine.generate(prompts, Sampling(max_tokens=64, n=4))
    save_bundle(bundle, trajectories, [0.0] * len(trajectories), engine.fingerprint(), 1.0)
