"""The embedded engine: the reference kernels behind a cache and a continuous batch, on any machine."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lite import __version__
from lite.errors import InputError
from lite.model.protocol import ModelBundle
from lite.primitive.ckpt.safetensors_files import read_tensors
from lite.primitive.kernels import reference
from lite.runtime import routes
from lite.runtime.rollout.engine import Prompt, RolloutCounters, Sampling, Trajectory, request_seed
from lite.runtime.rollout.paged_cache import PAGE, CachedSequences, PagedCache
from lite.runtime.rollout.scheduler import Request, Scheduler
from lite.runtime.weights import DeployedWeights


class EmbeddedEngine:
    """bundle: a model of its own, not the trainer's; it is loaded from the checkpoint, as version 0, like any engine loads.

    max_step_tokens: tokens of one forward. max_sequences: requests that run at once. cache_tokens: capacity of the cache. context: how a
    step reads and writes it. record_routes: trajectories carry the experts that were chosen.
    """

    name = "embedded"

    def __init__(
        self,
        bundle: ModelBundle,
        folder: Path,
        *,
        max_step_tokens: int = 256,
        max_sequences: int = 32,
        cache_tokens: int = 1 << 15,
        context: type[CachedSequences] = CachedSequences,
        record_routes: bool = False,
    ):
        if max_step_tokens < 1 or max_sequences < 1:
            raise InputError("engine", f"max_step_tokens {max_step_tokens}, max_sequences {max_sequences}", "set both to 1 or more")
        if record_routes:
            routes.require_experts("record_routes", bundle.config)
        self.bundle, self.record_routes = bundle, record_routes
        self.weights = DeployedWeights(bundle)
        self.weights.load(read_tensors(folder), 0, folder)
        self.device = next(iter(self.weights.parameters.values())).device
        self.max_step_tokens, self.max_sequences, self.cache_tokens = max_step_tokens, max_sequences, cache_tokens
        self.context = context
        self.counters = RolloutCounters()
        self.asleep = False

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_tokens: Callable[[int], None] = lambda tokens: None
    ) -> list[Trajectory]:
        """See `RolloutEngine.generate`. on_tokens is told how many tokens each step sampled."""
        if self.asleep:
            raise InputError("engine", "is asleep", "call wake() first")
        version = self.weights.require()
        if len({prompt.uid for prompt in prompts}) < len(prompts):
            raise InputError("prompts", "two share a uid, and with it their random stream", "give each its own")
        cache = PagedCache(max(self.cache_tokens // PAGE, 1), self.device)
        scheduler = Scheduler(cache, self.max_step_tokens, self.max_sequences, self.counters)
        requests = [self._request(prompt, sample, sampling, cache) for prompt in prompts for sample in range(sampling.n)]
        scheduler.waiting.extend(requests)
        self.counters.sequences += len(requests)
        while scheduler.waiting or scheduler.running:
            on_tokens(self._step(scheduler, cache, sampling))
        return [
            Trajectory(
                r.prompt.uid, r.sample, r.prompt.ids, tuple(r.response), torch.stack(r.logprobs).cpu(), version,
                torch.cat(r.routes).cpu() if self.record_routes else None,
            )
            for r in requests
        ]  # fmt: skip

    def _request(self, prompt: Prompt, sample: int, sampling: Sampling, cache: PagedCache) -> Request:
        if not prompt.ids:
            raise InputError(f"prompt {prompt.uid}", "is empty", "give at least one token")
        config = self.bundle.config
        if not all(0 <= token < config.vocab_size for token in prompt.ids):
            raise InputError(f"prompt {prompt.uid}", f"holds a token outside the vocabulary of {config.vocab_size}", "check the tokenizer")
        longest, limit = len(prompt.ids) + sampling.max_tokens, config.max_positions
        if longest > limit:
            raise InputError(
                f"prompt {prompt.uid}", f"{len(prompt.ids)} + {sampling.max_tokens} tokens, the model allows {limit}", "shorten one of them"
            )
        if longest > cache.pages * PAGE:
            raise InputError(f"prompt {prompt.uid}", f"needs {longest} cache tokens of {cache.pages * PAGE}", "raise cache_tokens")
        generator = torch.Generator().manual_seed(request_seed(sampling.seed, prompt.uid, sample))
        return Request(prompt, sample, generator, list(prompt.ids))

    def _step(self, scheduler: Scheduler, cache: PagedCache, sampling: Sampling) -> int:
        """One forward over the scheduled tokens; requests whose last token was among them get their next one."""
        step = scheduler.next_step()
        ids = torch.tensor([t for r, new in step for t in r.tokens[r.computed : r.computed + new]], device=self.device)
        context = self.context(cache, [(r.pages, r.computed, new) for r, new in step])
        hidden = self._recorded(ids, context, step) if self.record_routes else self.bundle.module.hidden(ids, context)
        for request, new in step:
            request.computed += new
        done = [(request, row) for (request, _), row in zip(step, context.seqlens.cu_q[1:].tolist(), strict=True)
                if request.computed == len(request.tokens)]  # fmt: skip
        if not done:
            return 0
        vocab = self.bundle.config.vocab_size
        uniform = torch.stack([torch.rand(vocab, generator=request.generator) for request, _ in done]).to(self.device)
        rows = torch.tensor([row - 1 for _, row in done], device=self.device)
        temperature = torch.full((len(done),), sampling.temperature, device=self.device)
        sampled, logprobs = reference.sample(hidden[rows], self.bundle.module.head.weight, temperature, vocab, uniform)
        for (request, _), token, logprob in zip(done, sampled.tolist(), logprobs, strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
            if token in sampling.eos_token_ids or len(request.response) == sampling.max_tokens:
                scheduler.finish(request)
        return len(done)

    def _recorded(self, ids: Tensor, context: CachedSequences, step: list[tuple[Request, int]]) -> Tensor:
        """The step's hidden states; its requests keep their routes."""
        with routes.recording(self.bundle.module) as chosen:
            hidden = self.bundle.module.hidden(ids, context)
        by_request = routes.by_layer(chosen, self.bundle.layers).split([new for _, new in step])
        for (request, _), rows in zip(step, by_request, strict=True):
            request.routes.append(rows)
        return hidden

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name, "version": __version__, "plugin": "none", "batch_invariant": True, "attention": "reference",
            "graphs": "eager", "runner": "embedded", "page": PAGE, "handshake": [],
        }  # fmt: skip

    def update_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.weights.load(tensors, version, "weight sync")

    def fingerprint(self) -> str:
        self.weights.require()
        return self.weights.fingerprint()

    def sleep(self, level: int = 1) -> None:
        """The cache lives only while generate runs, so level 1 has nothing to free; level 2 makes the weights unusable."""
        self.asleep = True
        if level == 2:
            self.weights.version = None

    def wake(self) -> None:
        self.asleep = False

    def close(self) -> None:
        self.sleep(2)
