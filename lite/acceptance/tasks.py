"""What the policy is asked and how an answer is rewarded. Rewards must vary inside a group, or GRPO has nothing to learn from."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from lite.errors import InputError
from lite.runtime.rollout.engine import Prompt

LINE = '{"uid": str, "prompt_ids": [int], "reasoning_gym": {"dataset": str, "entry": {...}}}'


class Task(Protocol):
    reward_rule: str
    """How rewards are given and why they vary inside a group, in one sentence; it goes into the receipt."""

    longest_prompt: int
    """In tokens."""

    def prompts(self, round_index: int) -> list[Prompt]:
        """The prompts of one round; uids are unique in it."""

    def reward(self, uid: str, response_ids: Sequence[int]) -> float: ...

    def total_tokens(self, samples: int, response_tokens: int) -> int:
        """At most, of all sequences of a round together."""


class TokenSetTask:
    """Random prompts; a response earns the share of its tokens that lie in a fixed random half of the vocabulary.

    For proxies, whose tokens mean nothing: sampled responses differ, so their shares do, and a policy can learn the set.
    """

    reward_rule = "share of response tokens in a fixed random half of the vocabulary; sampled responses differ, so it varies in a group"

    def __init__(self, vocab_size: int, groups: int, prompt_tokens: tuple[int, int], seed: int):
        self.vocab_size, self.groups, self.prompt_tokens, self.seed = vocab_size, groups, prompt_tokens, seed
        self.longest_prompt = prompt_tokens[1]
        self.rewarded = torch.rand(vocab_size, generator=torch.Generator().manual_seed(seed)) < 0.5

    def prompts(self, round_index: int) -> list[Prompt]:
        """Lengths spread evenly from the shortest to the longest, both ends included."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + round_index)
        low, high = self.prompt_tokens
        lengths = [low + (high - low) * i // max(self.groups - 1, 1) for i in range(self.groups)]
        return [
            Prompt(f"r{round_index}-{i}", tuple(torch.randint(self.vocab_size, (length,), generator=generator).tolist()))
            for i, length in enumerate(lengths)
        ]

    def reward(self, uid: str, response_ids: Sequence[int]) -> float:
        return float(self.rewarded[list(response_ids)].float().mean())

    def total_tokens(self, samples: int, response_tokens: int) -> int:
        return self.groups * samples * (sum(self.prompt_tokens) // 2 + response_tokens)


class PromptFileTask:
    """Prompts from a JSONL file, a line each, as `LINE` shows.

    A response is decoded with the checkpoint's tokenizer and scored by the reasoning-gym data set that made the question; to that is
    added a little for how near its last number is to the answer, so that wrong answers are told apart too.
    """

    reward_rule = (
        "reasoning-gym's own score of the decoded answer (partial credit by its share of the text), plus 0.2 / (1 + distance of its last "
        "number from the answer); sampled answers differ in wording and number, so it varies in a group"
    )

    def __init__(self, path: Path, checkpoint: Path, groups: int, eos_token_ids: Sequence[int]):
        self.path, self.groups, self.eos_token_ids = path, groups, set(eos_token_ids)
        self.lines = _read_lines(path)
        if len({line["uid"] for line in self.lines}) < len(self.lines):
            raise InputError(path, "gives a uid twice", "give each prompt its own")
        if len(self.lines) < groups:
            raise InputError(path, f"holds {len(self.lines)} prompts for {groups} groups", "add prompts or lower --groups")
        self.by_uid = {line["uid"]: line for line in self.lines}
        self.longest_prompt = max(len(line["prompt_ids"]) for line in self.lines)
        self.tokenizer = _tokenizer(checkpoint)
        self.datasets = {name: _dataset(path, name) for name in {line["reasoning_gym"]["dataset"] for line in self.lines}}

    def prompts(self, round_index: int) -> list[Prompt]:
        """The next `groups` lines, round after round, from the start again at the end."""
        first = round_index * self.groups
        chosen = [self.lines[(first + i) % len(self.lines)] for i in range(self.groups)]
        return [Prompt(line["uid"], tuple(line["prompt_ids"])) for line in chosen]

    def reward(self, uid: str, response_ids: Sequence[int]) -> float:
        spec = self.by_uid[uid]["reasoning_gym"]
        text = self.tokenizer.decode([t for t in response_ids if t not in self.eos_token_ids]).strip()
        score = float(self.datasets[spec["dataset"]].score_answer(text, spec["entry"]))
        number, answer = _last_number(text), _last_number(str(spec["entry"]["answer"]))
        if number is not None and answer is not None:
            score += 0.2 / (1.0 + abs(number - answer))
        return score

    def total_tokens(self, samples: int, response_tokens: int) -> int:
        return self.groups * samples * (self.longest_prompt + response_tokens)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The file's lines, each checked to be a prompt that can be asked and rewarded."""
    try:
        texts = path.read_text().removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(path, f"cannot be read ({error})", "give a JSONL file of prompts") from None
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            spec = line["reasoning_gym"]
            known = all(isinstance(text, str) for text in (line["uid"], spec["dataset"], spec["entry"]["answer"]))
            ids = line["prompt_ids"]
            ok = known and isinstance(ids, list) and all(type(i) is int for i in ids)
        except (json.JSONDecodeError, KeyError, TypeError):
            ok = False
        if not ok:
            raise InputError(f"{path}:{number}", "is no prompt", f"write {LINE}")
        if not ids:
            raise InputError(f"{path}:{number}", "the prompt is empty", "give at least one token")
        lines.append(line)
    return lines


def _dataset(path: Path, name: str) -> Any:
    """The reasoning-gym data set of that name, for its scoring."""
    try:
        import reasoning_gym

        return reasoning_gym.create_dataset(name, size=1, seed=0)
    except ImportError as error:
        raise InputError("--prompts", f"needs reasoning-gym ({error})", "pip install '.[demo]' in the checkout") from None
    except (ValueError, KeyError):
        raise InputError(path, f"reasoning-gym has no data set {name!r}", "name one that it has") from None


def _tokenizer(checkpoint: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise InputError("--prompts", "needs transformers for its tokenizer", "pip install '.[demo]' in the checkout") from None
    try:
        return AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError) as error:
        raise InputError(checkpoint, f"holds no tokenizer ({str(error).splitlines()[0]})", "add its files") from None


def _last_number(text: str) -> float | None:
    found = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(found[-1]) if found else None
