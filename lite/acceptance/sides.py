"""The two sides of a proof: a trainer, and an engine with a model of its own, each loading the same checkpoint by itself."""

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lite.acceptance.first_layers import first_layers
from lite.acceptance.plants import Plant, check_applies
from lite.acceptance.proxy import write_proxy
from lite.acceptance.tasks import PromptFileTask, Task, TokenSetTask
from lite.errors import InputError
from lite.model.protocol import ModelBundle
from lite.model.registry import family
from lite.primitive.ckpt.safetensors_files import read_json
from lite.primitive.kernels.vllm.version import require_verified_version
from lite.primitive.ops.bridges import Ops, reference_ops, vllm_ops
from lite.runtime.config import MegatronLiteConfig, OptimizerConfig, RuntimeConfig
from lite.runtime.rollout.embedded import EmbeddedEngine
from lite.runtime.rollout.engine import RolloutEngine, Sampling
from lite.runtime.rollout.paged_cache import PAGE, CachedSequences
from lite.runtime.rollout.vllm import CACHE_BYTES, VllmEngine
from lite.runtime.rollout.vllm_cache import cache_bytes
from lite.runtime.runtime import Handle, Runtime


@dataclass(frozen=True)
class ProveConfig:
    """As the command line gives it. Exactly one of model (a checkpoint folder) and proxy (a family)."""

    out: Path
    model: Path | None = None
    proxy: str | None = None
    geometry: str = "tiny"
    layers: int | None = None
    engine: str = "embedded"
    plugin: bool = True
    attention: str = "TRITON_ATTN"
    graphs: str = "eager"
    updates: int = 2
    prompts: Path | None = None
    prompt_tokens: tuple[int, int] = (1, 40)
    response_tokens: int = 24
    groups: int = 4
    samples: int = 4
    dtype: str = "bf16"
    seed: int = 0
    temperature: float = 1.0
    lr: float = 1e-4
    plant: str | None = None
    resume: bool = False
    save_every: int = 10


def same_run(c: ProveConfig) -> dict[str, str]:
    """What may not change between a run and its resumption: everything but where it stops and how often it saves."""
    flags = {f.name: str(getattr(c, f.name)) for f in fields(c) if f.name not in ("out", "updates", "resume", "save_every")}
    return flags | ({"prompts": f"{c.prompts}, sha256 {hashlib.sha256(c.prompts.read_bytes()).hexdigest()}"} if c.prompts else {})


@dataclass
class Sides:
    folder: Path
    ops: Ops
    runtime: Runtime
    trainer: Handle
    engine: RolloutEngine
    task: Task
    sampling: Sampling


class PlantedRuntime(Runtime):
    """A trainer whose load is planted with an error."""

    def __init__(self, config: RuntimeConfig, plant: Plant):
        super().__init__(config)
        self.plant = plant

    def bundle(self, ops: Ops | None = None) -> ModelBundle:
        bundle = super().bundle(ops)
        bundle.weights = self.plant.table(bundle.weights)
        return bundle


def build_sides(c: ProveConfig, plant: Plant | None) -> Sides:
    """Raises InputError for anything that cannot be built, asked or planted, ProbeError where a kernel breaks its promise."""
    folder = c.model or c.out / "proxy"
    backend = MegatronLiteConfig(
        dtype=c.dtype,  # type: ignore[arg-type]
        optimizer=OptimizerConfig(lr=c.lr),
        override=first_layers(c.model, c.layers) if c.model else {},
    )
    if c.proxy is not None and not (c.resume and folder.exists()):
        write_proxy(c.proxy, folder, geometry=c.geometry, layers=c.layers, dtype=backend.torch_dtype, seed=c.seed)
    runtime_config = RuntimeConfig(hf_path=str(folder), backend_cfg=backend)
    runtime = PlantedRuntime(runtime_config, plant) if plant else Runtime(runtime_config)
    eos = eos_token_ids(folder, runtime.hf_config)
    sampling = Sampling(temperature=c.temperature, max_tokens=c.response_tokens, n=c.samples, seed=c.seed, eos_token_ids=eos)
    if c.prompts is not None:
        task: Task = PromptFileTask(c.prompts, folder, c.groups, eos)
    else:
        task = TokenSetTask(runtime.hf_config["vocab_size"], c.groups, c.prompt_tokens, c.seed)

    engine_bundle = Runtime(runtime_config).bundle()
    if c.engine == "vllm":
        # first: batch-invariant mode must be on before the trainer's first product
        vllm_engine = _vllm_engine(c, engine_bundle, folder, task)
        ops = vllm_ops(c.attention)
        trainer = runtime.build_model(ops, vllm_engine.page)
        if (cos_sin := trainer.bundle.module.cos_sin) is not None:
            vllm_engine.check_rotary(cos_sin)
        engine: RolloutEngine = vllm_engine
    else:
        ops = reference_ops()
        trainer = runtime.build_model(ops)
        engine = _embedded_engine(c, engine_bundle, folder, task, plant)
    runtime.train_mode(trainer)
    return Sides(folder, ops, runtime, trainer, engine, task, sampling)


def _embedded_engine(c: ProveConfig, bundle: ModelBundle, folder: Path, task: Task, plant: Plant | None) -> EmbeddedEngine:
    """Steps small enough to cut prompts, and three quarters of the cache that all running requests may need, so that full batches
    also meet preemption."""
    sequences = min(c.groups * c.samples, 32)
    longest = task.longest_prompt + c.response_tokens
    cache_tokens = max(sequences * longest * 3 // 4, longest + PAGE)
    step_tokens = max(48, sequences + task.longest_prompt - 1)
    return EmbeddedEngine(
        bundle, folder, max_step_tokens=step_tokens, max_sequences=sequences, cache_tokens=cache_tokens,
        context=plant.context if plant else CachedSequences,
    )  # fmt: skip


def _vllm_engine(c: ProveConfig, bundle: ModelBundle, folder: Path, task: Task) -> VllmEngine:
    """As above: odd steps that cut long prompts, up to 512 requests at once, and too little cache for all of them: three quarters of
    what they need, or half of what is being read in while one of them decodes; of a hybrid, whose pages hold thousands of tokens, what a
    quarter of them need."""
    sequences = min(c.groups * c.samples, 512)
    longest = task.longest_prompt + c.response_tokens
    step_tokens = max(2049, sequences)
    enough = min(task.total_tokens(c.samples, c.response_tokens) * 3 // 4, c.response_tokens * step_tokens // 2)
    return VllmEngine(
        bundle,
        folder,
        plugin=c.plugin,
        attention=c.attention,
        graphs=c.graphs,  # type: ignore[arg-type]
        max_model_len=longest,
        max_step_tokens=step_tokens,
        max_sequences=sequences,
        temperature=c.temperature,
        cache_tokens=max(enough, longest + 16 * PAGE),
        cache_bytes=cache_bytes(bundle.config, max(sequences // 4, 2), longest) if bundle.config.mamba else CACHE_BYTES,
    )


def eos_token_ids(folder: Path, hf_config: dict[str, Any]) -> tuple[int, ...]:
    """Of generation_config.json where there is one, else of config.json."""
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    given = generation.get("eos_token_id", hf_config.get("eos_token_id"))
    ids = () if given is None else tuple(given) if isinstance(given, list) else (given,)
    if not all(type(i) is int for i in ids):
        raise InputError(folder, f"eos_token_id = {given!r} is no token id", "correct config.json")
    return ids


def check_choice(c: ProveConfig, plant: Plant | None) -> None:
    """Whatever can be refused before anything is written or cleared."""
    if (c.model is None) == (c.proxy is None):
        raise InputError("prove", "needs one of --model and --proxy", "name a checkpoint folder or a family")
    low, high = c.prompt_tokens
    if not 1 <= low <= high:
        raise InputError("--prompt-tokens", f"{low}:{high} is no range of lengths from 1", "write SHORTEST:LONGEST")
    if c.engine == "vllm" and c.dtype != "bf16":
        raise InputError("--dtype", f"{c.dtype} with the vllm engine", "use bf16: its kernels are verified for nothing else")
    for name, value in (("--groups", c.groups), ("--samples", c.samples), ("--response-tokens", c.response_tokens)):
        if value < 1:
            raise InputError(name, f"{value} is not positive", "raise it")
    if c.samples < 2:
        raise InputError("--samples", f"{c.samples} sample a group has no group to be compared with", "raise it to 2 or more")
    if c.save_every < 1:
        raise InputError("--save-every", f"{c.save_every} is not positive", "raise it")
    if not 0 <= c.seed < 1 << 31:
        raise InputError("--seed", f"{c.seed} is out of range", "use 0 to 2147483647")
    if c.engine == "vllm" and c.model and c.layers:
        raise InputError("--layers", "is not built for a checkpoint with the vllm engine", "leave it out")
    for flag, path in (("--model", c.model), ("--prompts", c.prompts)):
        if path is not None and path.resolve().is_relative_to(c.out.resolve()):
            raise InputError(flag, f"{path} lies in --out, which is cleared", "name another --out")
    OptimizerConfig(lr=c.lr)
    Sampling(temperature=c.temperature)
    if c.proxy is not None:
        protocol = family(c.proxy)
        hf_config = protocol.proxy_config(c.geometry, c.layers)
    else:
        assert c.model is not None
        runtime = Runtime(RuntimeConfig(hf_path=c.model, backend_cfg=MegatronLiteConfig(override=first_layers(c.model, c.layers))))
        protocol, hf_config = runtime.protocol, runtime.hf_config
        eos_token_ids(c.model, hf_config)
    config = protocol.build_model_config(hf_config)
    if plant:
        check_applies(plant, protocol.WEIGHTS, config, c.engine, c.updates, c.groups * c.samples)
    flag, longest = "--prompt-tokens", high
    if c.prompts is not None:
        if c.model is None:
            raise InputError("--prompts", "needs a checkpoint with a tokenizer", "give --model, not --proxy")
        flag, longest = "--prompts", PromptFileTask(c.prompts, c.model, c.groups, ()).longest_prompt
    if longest + c.response_tokens > config.max_positions:
        both = f"prompts of up to {longest} tokens and --response-tokens {c.response_tokens}"
        raise InputError(flag, f"{both}, the model allows {config.max_positions} together", "shorten one of them")
    if c.engine == "vllm":
        require_verified_version()
