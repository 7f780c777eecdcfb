"""A worker like `benchmarks.rollout_worker`, whose engine only waits: a token of its takes spec["token_seconds"]."""

import time
from types import SimpleNamespace

from benchmarks.legs import serve
from benchmarks.rollout_worker import commands

SIZES = {"max_model_len": 96, "max_num_batched_tokens": 64, "max_num_seqs": 2, "kv_cache_memory_bytes": 1, "gpu_memory_utilization": 0.3}

REPLACED = {"exact": ["ExactMambaMixer2", "ExactRMSNorm"], "bi_ssu": ["ExactRMSNorm"], "stock": []}


class FakeEngine:
    def step(self):
        time.sleep(1e-4)


def build(spec):
    print("a library's chatter on stdout must not be read as an answer")
    if spec.get("broken"):
        raise ValueError("no such\nengine")
    engine = FakeEngine()

    def generate(prompts, output, seed):
        for _ in range(output):
            engine.step()
        time.sleep(spec["token_seconds"] * output * len(prompts))
        return len(prompts) * output

    handle = commands(SimpleNamespace(llm_engine=engine), generate, spec)

    def dispatch(command):
        if command["do"] == "fail":
            raise RuntimeError("out of memory")
        return handle(command)

    options = SIZES | {"async_scheduling": spec["arm"] == "stock", "replaced": REPLACED[spec["arm"]]} | spec.get("options", {})
    handshake = spec.get("handshake", [{"plugin": "0"}] if spec["arm"] == "exact" else [])
    return {"options": options, "handshake": handshake}, dispatch


if __name__ == "__main__":
    serve(build)
