"""Continuous batching: which tokens of which requests go into the next step."""

from collections import deque
from dataclasses import dataclass, field

import torch

from lite.runtime.rollout.engine import Prompt, RolloutCounters
from lite.runtime.rollout.paged_cache import PagedCache


@dataclass(eq=False)
class Request:
    """tokens: prompt and response so far. computed: how many of them are in the cache. routes: of these, where they are recorded."""

    prompt: Prompt
    sample: int
    generator: torch.Generator
    tokens: list[int]
    logprobs: list[torch.Tensor] = field(default_factory=list)
    routes: list[torch.Tensor] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    prefill_steps: int = 0

    @property
    def response(self) -> list[int]:
        return self.tokens[len(self.prompt.ids) :]

    @property
    def decoding(self) -> bool:
        return len(self.tokens) - self.computed == 1 and len(self.tokens) > len(self.prompt.ids)


class Scheduler:
    """Running requests first, in order of arrival, then waiting ones; prompts are cut where the step's tokens run out. When the
    cache is full the youngest request gives its pages back and is computed again later (recomputation is exact, so it costs time only).
    """

    def __init__(self, cache: PagedCache, max_step_tokens: int, max_sequences: int, counters: RolloutCounters):
        self.cache, self.counters = cache, counters
        self.max_step_tokens, self.max_sequences = max_step_tokens, max_sequences
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def next_step(self) -> list[tuple[Request, int]]:
        """(request, how many of its tokens) for the next forward; their pages are taken."""
        step: list[tuple[Request, int]] = []
        budget = self.max_step_tokens
        for request in list(self.running):
            if request not in self.running:  # preempted for an older one
                continue
            new = min(len(request.tokens) - request.computed, budget)
            if new and self._make_room(request, request.computed + new):
                step.append((request, new))
                budget -= new
        while self.waiting and budget and len(self.running) < self.max_sequences:
            request = self.waiting[0]
            new = min(len(request.tokens), budget)
            if not self.cache.grow(request.pages, new):
                break
            self.counters.joins += any(r.decoding for r in self.running)
            self.running.append(self.waiting.popleft())
            step.append((request, new))
            budget -= new
        self._count(step)
        return step

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Takes pages for it, from the youngest running requests where none is free. False where it was itself the youngest."""
        while not self.cache.grow(request.pages, tokens):
            victim = self.running.pop()
            self.cache.release(victim.pages)
            victim.computed = victim.prefill_steps = 0
            victim.routes.clear()
            self.waiting.appendleft(victim)
            self.counters.preemptions += 1
            if victim is request:
                return False
        return True

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.release(request.pages)

    def _count(self, step: list[tuple[Request, int]]) -> None:
        c = self.counters
        decoding = [request.decoding for request, _ in step]
        c.rows_max_in_batch = max(c.rows_max_in_batch, sum(new for _, new in step))
        c.mixed_batches += any(decoding) and not all(decoding)
        for (request, _), decodes in zip(step, decoding, strict=True):
            if not decodes:
                request.prefill_steps += 1
                c.chunked_prefills += request.prefill_steps == 2
