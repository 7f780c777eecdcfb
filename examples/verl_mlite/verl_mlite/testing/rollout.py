"""A rollout of verl, named `embedded`: lite's EmbeddedEngine in a Ray actor for each trainer rank. Importing this registers it."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from lite.errors import InputError
from lite.runtime.config import MegatronLiteConfig, RuntimeConfig
from lite.runtime.rollout.embedded import EmbeddedEngine
from lite.runtime.rollout.engine import Prompt, Sampling
from lite.runtime.runtime import Runtime

SKIP_SYNC_AFTER = "MLITE_TEST_SKIP_SYNC_AFTER"
"""Environment variable: no weights are synced after this global step, and everything that finds stale weights must find them."""

RECORDS = "MLITE_TEST_RECORDS"
"""Environment variable: what the server returns as routes at each step, in their order: own, other (the experts next to those) or none."""


def server_name(replica: int) -> str:
    return f"embedded_server_{replica}"


class EmbeddedServer:
    """Requests that arrive while a batch runs make up the next one."""

    def __init__(self, replica: int, config: Any, model_config: Any):
        self.replica, self.config = replica, config
        self.eos = (model_config.tokenizer.eos_token_id,)
        backend = MegatronLiteConfig(
            dtype={"bfloat16": "bf16", "float32": "fp32"}[config.dtype],  # type: ignore[arg-type]
            device="cpu",
            optimizer=None,
            override={k: v for k, v in model_config.override_config.items() if k != "attn_implementation"},
        )
        path = Path(model_config.local_path)
        bundle = Runtime(RuntimeConfig(str(path), backend_cfg=backend)).bundle()
        self.engine = EmbeddedEngine(bundle, path, record_routes=config.enable_rollout_routing_replay)
        self.running = asyncio.Lock()
        self.waiting: list[tuple[Prompt, Sampling, asyncio.Future]] = []
        self.arrived = 0
        self.global_steps: int | None = None

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any) -> TokenOutput:
        """The request's random stream is its own, made from its number and not from request_id, which is another one in every run."""
        self.arrived += 1
        prompt, answer = Prompt(f"{self.replica}-{self.arrived}", tuple(prompt_ids)), asyncio.get_running_loop().create_future()
        self.waiting.append((prompt, sampling(sampling_params, self.config, self.eos), answer))
        async with self.running:
            if not answer.done():
                await self._serve_waiting()
        trajectory = await answer
        return TokenOutput(
            token_ids=list(trajectory.response_ids),
            log_probs=trajectory.logprobs.tolist(),  # a double holds every fp32 number
            routed_experts=self._record(trajectory.routed_experts),
            stop_reason="completed",
            extra_fields={"global_steps": self.global_steps},
        )

    def _record(self, routes: Tensor | None) -> np.ndarray | None:
        """[prompt + response - 1, L, k] as vLLM returns it: unsigned, and zeros where a layer has no experts."""
        kind = dict(enumerate(os.environ.get(RECORDS, "").split())).get(self.global_steps or 0, "own")
        if routes is None or kind == "none":
            return None
        experts = self.engine.bundle.config.moe.experts
        if kind == "other":
            routes = torch.where(routes < 0, routes, (routes + 1) % experts)
        return routes.clamp(min=0).numpy().astype(np.uint8 if experts <= 256 else np.uint16)

    async def _serve_waiting(self) -> None:
        """All that wait, in one continuous batch for each way of sampling."""
        batches: dict[Sampling, list[tuple[Prompt, asyncio.Future]]] = {}
        for prompt, how, answer in self.waiting:
            batches.setdefault(how, []).append((prompt, answer))
        self.waiting = []
        for how, batch in batches.items():
            try:
                trajectories = await asyncio.to_thread(self.engine.generate, [prompt for prompt, _ in batch], how)
            except Exception as error:
                for _, answer in batch:
                    answer.set_exception(error)
            else:
                for (_, answer), trajectory in zip(batch, trajectories, strict=True):
                    answer.set_result(trajectory)

    async def update_weights(self, tensors: list[tuple[str, Tensor]], global_steps: int | None) -> None:
        """A sync in exact mode begins with what the trainer's weights are; the engine must then hold the same bytes."""
        from verl_mlite.engine import SYNC, write_answer

        facts = json.loads(bytes(tensors.pop(0)[1].tolist())) if tensors[0][0] == SYNC else None
        if facts is None and os.environ.get("MLITE_EXACT") == "1":
            raise InputError("weight sync", f"does not begin with {SYNC}, though MLITE_EXACT=1", "set it for the trainer's process, too")
        async with self.running:
            self.engine.update_weights(iter(tensors), facts["version"] if facts else global_steps or 0)
            if facts and self.engine.fingerprint() != facts["fingerprint"]:
                self.engine.weights.version = None
                raise InputError(
                    "weight sync", f"version {facts['version']}: the engine holds other bytes than the trainer", "do not train on"
                )
        if facts:
            held = {"version": facts["version"], "fingerprint": facts["fingerprint"], "handshake": {"engine": "embedded"}}
            write_answer(Path(facts["answer"]), held)
        self.global_steps = global_steps

    async def sleep(self) -> None:
        """Weights are lost, as those of a real server, so that no sync may be left out - unless a test wants to."""
        self.engine.sleep(1 if SKIP_SYNC_AFTER in os.environ else 2)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.engine.wake()

    async def nothing(self, *_: Any, **__: Any) -> None: ...

    clear_kv_cache = release_kv_cache = resume_kv_cache = abort_all_requests = resume_generation = start_profile = stop_profile = nothing


def sampling(params: dict[str, Any], config: Any, eos: tuple[int, ...]) -> Sampling:
    """verl's parameters. `Sampling` refuses by name what would change the distribution, and what it does not know."""
    params = {"seed": config.seed, "eos_token_ids": eos, "max_tokens": config.response_length} | params
    params.pop("logprobs", None)  # the engine always returns them
    if params.get("top_k") == -1:
        params["top_k"] = 0
    return Sampling(**params)


class EmbeddedReplica(RolloutReplica):
    async def launch_servers(self) -> None:
        from verl.utils.config import omega_conf_to_dataclass

        if self.world_size != 1:
            raise InputError("rollout", f"{self.world_size} ranks a replica", "set tensor, data and pipeline parallel sizes to 1")
        options = {"name": server_name(self.replica_rank), "num_cpus": 0, "max_concurrency": self.max_concurrency}
        model_config = omega_conf_to_dataclass(self.model_config)
        self._server_handle = ray.remote(EmbeddedServer).options(**options).remote(self.replica_rank, self.config, model_config)
        self._server_address = f"embedded:{self.replica_rank}"
        self.servers = [self._server_handle]


class ServerAdapter(BaseRollout):
    """The trainer rank's side of its server."""

    @property
    def server(self) -> Any:
        return ray.get_actor(server_name(int(os.environ["RANK"])))

    async def resume(self, tags: list[str]) -> None:
        await self.server.wake_up.remote(tags)

    async def release(self) -> None:
        await self.server.sleep.remote()

    async def update_weights(
        self, weights: Iterator[tuple[str, Tensor]], wire_format: str = "named_tensors", global_steps: int | None = None, **_: Any
    ) -> None:
        if wire_format != "named_tensors":
            raise InputError("weight sync", f"{wire_format} is not built", "set rollout.checkpoint_engine.backend=naive")
        if (global_steps or 0) > int(os.environ.get(SKIP_SYNC_AFTER, 1 << 62)):
            return
        with torch.no_grad():
            tensors = [(name, tensor.cpu().clone()) for name, tensor in weights]
        await self.server.update_weights.remote(tensors, global_steps)


_ROLLOUT_REGISTRY["embedded", "async"] = f"{__name__}.ServerAdapter"
RolloutReplicaRegistry.register("embedded", lambda: EmbeddedReplica)
