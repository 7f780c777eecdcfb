"""Kernel times of an engine in this process: one prefill, and a window of steps in which every request decodes."""

from collections.abc import Callable
from typing import Any

from benchmarks.profiles import Watch, summary

Ids = list[tuple[int, ...]]


def profile_engine(
    llm: Any,
    generate: Callable[[Ids, int, int], int],
    prompts: Callable[[int, int, int], Ids],
    concurrency: int,
    length: int,
    steps: int,
    step_tokens: int,
    seed: int,
    device: str = "cuda",
) -> dict[str, Any]:
    """generate(prompts, tokens for each, seed); prompts(number, length, seed).

    Each window runs twice, first without the profiler: wall time comes from there.
    """
    prefill_steps = -(-concurrency * length // step_tokens)
    # decoding rows take room from prompts, so these take a little longer; requests must last until the window has closed
    start = prefill_steps + prefill_steps // 8 + 12
    output = start + 2 * steps + 16

    generate(prompts(1, length, seed), 1, seed)
    generate(prompts(concurrency, length, seed + 1), 4, seed)
    prefill, decode = [], []
    for profiled in (False, True):
        watch, asked = Watch(device, profiled), prompts(1, length, seed + 2 + profiled)
        watch.begin()
        generate(asked, 1, seed)
        watch.end()
        prefill.append(watch)
    for profiled in (False, True):
        watch = Watch(device, profiled)
        with _window(llm.llm_engine, watch, start, steps):
            generate(prompts(concurrency, length, seed + 4 + profiled), output, seed)
        decode.append(watch)
    return {"prefill": summary(prefill[0].seconds, prefill[1], 1), "decode": summary(decode[0].seconds, decode[1], steps)}


class _window:  # noqa: N801  (a context manager, used as one)
    """Steps start .. start + steps of the engine are watched. The instance's step shadows the class's and is taken away again."""

    def __init__(self, engine: Any, watch: Watch, start: int, steps: int):
        self.engine, self.watch, self.start, self.stop = engine, watch, start, start + steps

    def __enter__(self) -> None:
        step, taken = self.engine.step, 0

        def watched() -> Any:
            nonlocal taken
            if taken == self.start:
                self.watch.begin()
            outputs = step()
            taken += 1
            if taken == self.stop:
                self.watch.end()
            return outputs

        self.engine.step = watched

    def __exit__(self, *_: object) -> None:
        del self.engine.step
