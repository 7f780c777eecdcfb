"""The released vLLM wheel in this process, exact by the plugin, or as it is where the plugin is off."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lite.errors import InputError, ProbeError
from lite.model.protocol import ModelBundle
from lite.primitive.ckpt.hf_weights import fingerprint
from lite.primitive.compare import bits
from lite.runtime import routes
from lite.runtime.rollout.engine import Prompt, RolloutCounters, Sampling, Trajectory, request_seed
from lite.runtime.rollout.vllm_weights import Rows, held, weight_rows

CACHE_BYTES = 8 << 30
# functions may be sent to the worker; nothing is fetched or reported
ENVIRONMENT = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def prepare_environment(plugin: bool, in_process: bool = True, batch_invariant: bool = True) -> None:
    """Must run before anything imports vllm: it reads some of these when its modules load. in_process: the engine lives in this process,
    so that a trainer shares its device. batch_invariant: off only without the plugin, for models that vLLM itself refuses to run so."""
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    os.environ["VLLM_BATCH_INVARIANT"] = "1" if batch_invariant else "0"
    if plugin:
        os.environ["MLITE_EXACT"] = "1"
    else:
        os.environ.pop("MLITE_EXACT", None)


def build_llm(
    folder: Path,
    *,
    plugin: bool,
    attention: str,
    graphs: str,
    in_process: bool = True,
    async_scheduling: bool = False,
    hybrid: bool = False,
    **options: Any,
) -> Any:
    """vLLM's own `LLM` of a checkpoint in batch-invariant mode: eager or with graphs of decode steps, never compiled, without prefix
    cache. hybrid: the model has Mamba layers; vLLM alone does not run them in that mode. options: more of `LLM`'s arguments."""
    prepare_environment(plugin, in_process, batch_invariant=plugin or not hybrid)
    if hybrid:
        from lite.primitive.kernels.vllm.mamba import pin_autotuners

        pin_autotuners()  # before the engine runs: a trainer in this process calls the same kernels
        options["mamba_ssm_cache_dtype"] = "float32"
    from vllm import LLM

    eager = graphs == "eager"
    return LLM(
        model=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=eager,
        compilation_config={"mode": 0, "cudagraph_mode": "NONE" if eager else "FULL_DECODE_ONLY", "custom_ops": ["all"]},
        attention_backend=attention,
        enable_prefix_caching=False,
        enable_flashinfer_autotune=False,
        async_scheduling=async_scheduling,
        gpu_memory_utilization=0.3,
        seed=0,
        **options,
    )


class VllmEngine:
    """bundle: an unloaded model of the same checkpoint, for its weight table. cache_tokens: capacity, None for what fits into
    cache_bytes; a hybrid always gets that: its pages hold thousands of tokens, or a request's state. sleep_mode: whether `sleep` will be
    called; vLLM then allocates by a pool of its own. record_routes: trajectories carry the experts that were chosen (V1 runner only).

    attention: FLASH_ATTN or TRITON_ATTN. graphs: eager or full_decode (CUDA graphs of decode steps). Raises InputError where the plugin
    is on and a worker's handshake does not prove it.
    """

    name = "vllm"

    def __init__(
        self,
        bundle: ModelBundle,
        folder: Path,
        *,
        plugin: bool,
        attention: str,
        graphs: Literal["eager", "full_decode"],
        max_model_len: int,
        max_step_tokens: int,
        max_sequences: int,
        temperature: float,
        cache_tokens: int | None = None,
        cache_bytes: int = CACHE_BYTES,
        sleep_mode: bool = False,
        record_routes: bool = False,
    ):
        hybrid = bundle.config.mamba is not None
        if record_routes:
            routes.require_experts("record_routes", bundle.config)
        self.counters = RolloutCounters()
        self.plugin, self.attention, self.graphs, self.temperature = plugin, attention, graphs, temperature
        self.on_tokens: Callable[[int], None] = lambda tokens: None
        self.llm = build_llm(
            folder,
            plugin=plugin,
            attention=attention,
            graphs=graphs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_step_tokens,
            max_num_seqs=max_sequences,
            logprobs_mode="raw_logprobs" if temperature == 1.0 else "processed_logprobs",
            num_gpu_blocks_override=None if cache_tokens is None or hybrid else -(-cache_tokens // PAGE),
            kv_cache_memory_bytes=cache_bytes,
            scheduler_cls=counting_scheduler(self.counters, lambda tokens: self.on_tokens(tokens)),
            enable_sleep_mode=sleep_mode,
            hybrid=hybrid,
            **({"enable_return_routed_experts": True} if record_routes else {}),
        )
        self.weight_rows = weight_rows(bundle)
        self.model_config, self.record_routes, self.max_model_len = bundle.config, record_routes, max_model_len
        self.llm.collective_rpc(_set_version, args=(0,))
        self.handshakes: list[dict[str, Any]] = self._handshakes() if plugin else []

    def _handshakes(self) -> list[dict[str, Any]]:
        from lite.vllm_plugin import handshake

        found = self.llm.collective_rpc(handshake)
        asked = {
            "attention": [self.attention], "batch_invariant": True, "prefix_caching": False, "compilation_mode": 0,
            "graphs": {"eager": "NONE", "full_decode": "FULL_DECODE_ONLY"}[self.graphs], "runner": "vllm.v1.worker.gpu_model_runner",
        }  # fmt: skip
        for answer in found:
            if answer | asked != answer:
                raise InputError("vllm worker", f"runs {answer}", f"it was asked for {asked}")
        return found

    @property
    def page(self) -> int:
        return int(self.llm.llm_engine.vllm_config.cache_config.block_size)

    def facts(self) -> dict[str, Any]:
        import vllm

        runner, invariant = self.llm.collective_rpc(_runner_and_mode)[0]
        return {
            "name": self.name, "version": vllm.__version__, "plugin": "on" if self.plugin else "off", "batch_invariant": invariant,
            "attention": self.attention, "graphs": self.graphs, "runner": runner, "page": self.page, "handshake": self.handshakes,
        }  # fmt: skip

    def check_rotary(self, cos_sin: Tensor) -> None:
        """The trainer's table of cosines and sines against the workers'. Raises ProbeError at the first differing position."""
        for table in (table for tables in self.llm.collective_rpc(_rotary_tables) for table in tables):
            own = cos_sin[: len(table)]
            differs = (bits(table[: len(own)].to(own.device)) != bits(own)).any(1)
            if differs.any():
                raise ProbeError(f"rotary table: position {int(differs.nonzero()[0])} differs between trainer and engine")

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_tokens: Callable[[int], None] = lambda tokens: None
    ) -> list[Trajectory]:
        """See `RolloutEngine.generate`."""
        from vllm import SamplingParams

        if sampling.temperature != self.temperature:
            raise InputError("sampling.temperature", f"{sampling.temperature} at an engine built for {self.temperature}", "build another")
        requests, params = [], []
        for prompt in prompts:
            if not prompt.ids or len(prompt.ids) + sampling.max_tokens > self.max_model_len:
                raise InputError(f"prompt {prompt.uid}", f"{len(prompt.ids)} tokens and {sampling.max_tokens} to come",
                                 f"give 1 to {self.max_model_len - sampling.max_tokens} tokens")  # fmt: skip
            for sample in range(sampling.n):
                requests.append((prompt, sample))
                params.append(SamplingParams(
                    temperature=sampling.temperature, max_tokens=sampling.max_tokens, logprobs=0, detokenize=False, ignore_eos=True,
                    stop_token_ids=list(sampling.eos_token_ids), seed=request_seed(sampling.seed, prompt.uid, sample),
                ))  # fmt: skip
        self.on_tokens = on_tokens
        outputs = self.llm.generate([{"prompt_token_ids": list(p.ids)} for p, _ in requests], params, use_tqdm=False)
        self.counters.sequences += len(requests)
        version = self.llm.collective_rpc(_version)[0]
        found = []
        for (prompt, sample), output in zip(requests, outputs, strict=True):
            ids = tuple(output.outputs[0].token_ids)
            logprobs = torch.tensor([row[token].logprob for row, token in zip(output.outputs[0].logprobs, ids, strict=True)])
            record = routes.from_vllm(output.outputs[0].routed_experts, self.model_config) if self.record_routes else None
            found.append(Trajectory(prompt.uid, sample, prompt.ids, ids, logprobs, version, record))
        return found

    def update_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.llm.collective_rpc(_load, args=(list(tensors), [hf for hf, _, _ in self.weight_rows], version))

    def fingerprint(self) -> str:
        return self.llm.collective_rpc(_fingerprint, args=(self.weight_rows,))[0]

    def sleep(self, level: int = 1) -> None:
        """Frees the device: level 1 keeps the weights on the host, level 2 drops them. Needs sleep_mode."""
        if level == 2:
            self.llm.collective_rpc(_set_version, args=(None,))
        self.llm.sleep(level)

    def wake(self) -> None:
        """After level 2 the weights hold nothing: sync them before anything is generated, or `generate` raises InputError."""
        self.llm.wake_up()

    def close(self) -> None:
        del self.llm


PAGE = 16


# What follows runs inside a worker.


def _set_version(worker: Any, version: int | None) -> None:
    worker.mlite_policy_version = version


def _runner_and_mode(worker: Any) -> tuple[str, bool]:
    return type(worker.model_runner).__module__, os.environ.get("VLLM_BATCH_INVARIANT") == "1"


def _version(worker: Any) -> int:
    if worker.mlite_policy_version is None:
        raise InputError("vllm worker", "its weights are not whole", "sync them")
    return worker.mlite_policy_version


def _load(worker: Any, tensors: list[tuple[str, Tensor]], expected: list[str], version: int) -> None:
    """All weights or an InputError: vLLM itself only warns of what it did not get."""
    worker.mlite_policy_version = None
    names = [name for name, _ in tensors]
    missing, extra = sorted(set(expected) - set(names)), sorted(set(names) - set(expected))
    doubled = sorted(name for name, times in Counter(names).items() if times > 1)
    if missing or extra or doubled:
        lists = {"missing": missing, "unexpected": extra, "doubled": doubled}
        what = ", ".join(f"{len(found)} {kind} {found[:3]}" for kind, found in lists.items() if found)
        raise InputError("weight sync", what, "send each tensor once")
    model = worker.get_model()
    loaded = set(model.load_weights(iter(tensors)))
    # it names a stack of experts without the module that holds it
    unloaded = {name for name, _ in model.named_parameters() if name.replace(".experts.routed_experts.", ".experts.") not in loaded}
    if unloaded:
        raise InputError("weight sync", f"vLLM did not load {sorted(unloaded)[:3]}", "check the checkpoint names")
    torch.cuda.synchronize()
    worker.mlite_policy_version = version


def _fingerprint(worker: Any, rows: list[Rows]) -> str:
    return fingerprint(held(worker.get_model(), rows))


def _rotary_tables(worker: Any) -> list[Tensor]:
    """Each once: layers of one geometry share theirs."""
    tables = [m.cos_sin_cache for m in worker.get_model().modules() if "cos_sin_cache" in dict(m.named_buffers(recurse=False))]
    return list({table.data_ptr(): table for table in tables}.values())


def counting_scheduler(counters: RolloutCounters, on_tokens: Callable[[int], None], asynchronous: bool = False) -> type:
    """vLLM's scheduler, telling the counters what it schedules, and on_tokens how many tokens each step samples."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    class CountingScheduler(AsyncScheduler if asynchronous else Scheduler):  # type: ignore[misc]
        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            step = super().schedule(*args, **kwargs)
            decoding, cut, sampling = [], 0, 0
            for request_id, new in step.num_scheduled_tokens.items():
                request = self.requests[request_id]
                before = request.num_computed_tokens - new
                decoding.append(before >= request.num_prompt_tokens)
                cut += before == 0 and new < request.num_prompt_tokens
                sampling += not request.is_prefill_chunk
            counters.rows_max_in_batch = max(counters.rows_max_in_batch, step.total_num_scheduled_tokens)
            counters.chunked_prefills += cut
            counters.mixed_batches += any(decoding) and not all(decoding)
            counters.joins += len(step.scheduled_new_reqs) if any(decoding) else 0
            on_tokens(sampling)
            return step

        def _preempt_request(self, *args: Any, **kwargs: Any) -> Any:
            counters.preemptions += 1
            return super()._preempt_request(*args, **kwargs)

    return CountingScheduler
