"""What every rollout engine is asked for, and what it gives back."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lite.errors import InputError

# Beyond it logits vanish beside the rounding of the softmax: every token gets the same logprob, whatever the weights.
HOTTEST = 100.0


@dataclass(frozen=True)
class Prompt:
    uid: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. n samples a prompt, each with its own random stream made from (seed, uid, sample).

    The filters and penalties below change the distribution that is sampled, so the trainer's softmax(logits / T) would no longer be its
    logprob: exact mode refuses all but their neutral values.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    n: int = 1
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        for name, value in neutral.items():
            if getattr(self, name) != value:
                raise InputError(f"sampling.{name}", f"{getattr(self, name)} is refused in exact mode", f"set it to {value}: the trainer "
                                 "scores softmax(logits / temperature) over the whole vocabulary")  # fmt: skip
        if not 0 < self.temperature <= HOTTEST:
            raise InputError("sampling.temperature", f"{self.temperature} is not above 0 and at most {HOTTEST}", "choose one between")
        if self.max_tokens < 1 or self.n < 1:
            raise InputError("sampling", f"max_tokens {self.max_tokens} and n {self.n} must be at least 1", "raise them")


@dataclass(frozen=True)
class Trajectory:
    """One response. logprobs[len(response_ids)] fp32: each was returned by the step that sampled its token. routed_experts
    [tokens - 1, L, k]: what `lite.runtime.routes` says, of prompt and response but for the last token; None where it was not recorded."""

    uid: str
    sample: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: Tensor
    policy_version: int
    routed_experts: Tensor | None = None


@dataclass
class RolloutCounters:
    """What the scheduler went through, so that a receipt can say which situations its tokens met."""

    sequences: int = 0
    rows_max_in_batch: int = 0
    chunked_prefills: int = 0  # prompts that took more than one step
    mixed_batches: int = 0  # steps with both decoding and prefilling rows
    joins: int = 0  # requests admitted while others were decoding
    preemptions: int = 0


class RolloutEngine(Protocol):
    counters: RolloutCounters

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, on_tokens: Callable[[int], None]) -> list[Trajectory]:
        """n trajectories a prompt, prompt by prompt, in the order given. on_tokens is told how many tokens were sampled."""

    def facts(self) -> dict[str, Any]:
        """The receipt's "engine" entry: name, version, plugin, batch_invariant, attention, graphs, runner, page, handshake."""

    def update_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Every weight by its Hugging Face name, complete or an InputError; a failed update leaves an engine that refuses to generate."""

    def fingerprint(self) -> str:
        """sha256 of the weights that the engine itself holds, as `primitive.ckpt.hf_weights.fingerprint` computes it."""

    def sleep(self, level: int = 1) -> None:
        """1: gives the cache back. 2: the weights too; they must be synced after wake."""

    def wake(self) -> None: ...

    def close(self) -> None: ...


def request_seed(seed: int, uid: str, sample: int) -> int:
    """One random stream a request: distinct samples of a group even under one fixed seed, the same ones whatever the batch."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{uid}/{sample}".encode(), digest_size=8).digest(), "big") >> 1
