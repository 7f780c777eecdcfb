"""The rollout bundle: what an engine said, kept on disk before anything scores it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lite.errors import InputError
from lite.primitive.compare import Comparison, bits, compare_bytes
from lite.runtime.rollout.engine import Trajectory


def save_bundle(path: Path, trajectories: Sequence[Trajectory], rewards: Sequence[float], fingerprint: str, temperature: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    flat = lambda rows: torch.tensor([t for row in rows for t in row], dtype=torch.int64)  # noqa: E731
    tensors = {
        "prompt_ids": flat(t.prompt_ids for t in trajectories),
        "prompt_lens": torch.tensor([len(t.prompt_ids) for t in trajectories]),
        "response_ids": flat(t.response_ids for t in trajectories),
        "response_lens": torch.tensor([len(t.response_ids) for t in trajectories]),
        "logprobs": torch.cat([t.logprobs for t in trajectories]),
        "sample": torch.tensor([t.sample for t in trajectories]),
        "reward": torch.tensor(rewards, dtype=torch.float32),
    }
    metadata = {
        "schema": "1",
        "uids": json.dumps([t.uid for t in trajectories]),
        "policy_version": str(trajectories[0].policy_version),
        "fingerprint": fingerprint,
        "temperature": repr(temperature),
    }
    scratch = path.with_suffix(".partial")
    save_file(tensors, scratch, metadata=metadata)
    scratch.replace(path)


def rollout_sha256(trajectories: Sequence[Trajectory]) -> str:
    """Over every response's uid, sample, token ids and logprob bytes: equal for two runs that said the same."""
    digest = hashlib.sha256()
    for t in trajectories:
        digest.update(json.dumps([t.uid, t.sample, t.prompt_ids, t.response_ids]).encode())
        digest.update(bits(t.logprobs).numpy().tobytes())
    return digest.hexdigest()


def load_bundle(path: Path) -> tuple[list[Trajectory], dict[str, str]]:
    """-> (trajectories, metadata: policy_version, fingerprint of the weights that the engine held, temperature, uids). InputError for a
    file that is no rollout bundle."""
    try:
        with safe_open(path, framework="pt") as file:
            meta, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        uids, version = json.loads(meta["uids"]), int(meta["policy_version"])
        prompts = tensors["prompt_ids"].split(tensors["prompt_lens"].tolist())
        responses = tensors["response_ids"].split(tensors["response_lens"].tolist())
        logprobs = tensors["logprobs"].split(tensors["response_lens"].tolist())
        samples = tensors["sample"].tolist()
        found = [
            Trajectory(uid, sample, tuple(p.tolist()), tuple(r.tolist()), lp, version)
            for uid, sample, p, r, lp in zip(uids, samples, prompts, responses, logprobs, strict=True)
        ]
        if len({(t.uid, t.sample) for t in found}) < len(found):
            raise ValueError("it holds a (uid, sample) twice")
        meta["fingerprint"], float(meta["temperature"])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise InputError(path, f"is no rollout bundle ({error})", "give a file that `mlite prove` wrote under rollout/") from None
    return found, meta


@dataclass(frozen=True)
class BundleComparison:
    """Two bundles by (uid, sample). only_left, only_right: keys the other lacks. other_tokens: keys whose token ids differ.
    logprobs: over the responses with equal tokens, None where there is none."""

    only_left: list[tuple[str, int]]
    only_right: list[tuple[str, int]]
    other_tokens: list[tuple[str, int]]
    logprobs: Comparison | None
    first: tuple[str, int, int] | None

    @property
    def exact(self) -> bool:
        same_keys = not (self.only_left or self.only_right or self.other_tokens)
        return same_keys and self.logprobs is not None and self.logprobs.exact

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        parts = [f"{len(keys)} responses {what}" for keys, what in ((self.only_left, "only left"), (self.only_right, "only right"),
                 (self.other_tokens, "with other tokens")) if keys]  # fmt: skip
        if self.logprobs is not None:
            parts.append(f"{self.logprobs.mismatch} of {self.logprobs.valid_tokens} logprobs differ")
        if self.first is not None:
            parts.append("first at uid {}, sample {}, token {}".format(*self.first))
        return ", ".join(parts)


def compare_bundles(left: Sequence[Trajectory], right: Sequence[Trajectory]) -> BundleComparison:
    """Order and batching do not matter. InputError where the two have no response in common."""
    a, b = ({(t.uid, t.sample): t for t in side} for side in (left, right))
    common = [key for key in a if key in b]
    if not common:
        raise InputError("compare", "the bundles have no (uid, sample) in common", "compare bundles of the same prompts")
    same = [k for k in common if (a[k].prompt_ids, a[k].response_ids) == (b[k].prompt_ids, b[k].response_ids)]
    result = first = None
    if same:
        result = compare_bytes(torch.cat([a[k].logprobs for k in same]), torch.cat([b[k].logprobs for k in same]))
        differing = ((k, bits(a[k].logprobs) != bits(b[k].logprobs)) for k in same)
        first = next(((*k, int(differs.nonzero()[0])) for k, differs in differing if differs.any()), None)
    return BundleComparison(
        only_left=[k for k in a if k not in b],
        only_right=[k for k in b if k not in a],
        other_tokens=[k for k in common if k not in same],
        logprobs=result,
        first=first,
    )


def bundle_files(path: Path) -> dict[str, Path]:
    """Bundles by policy name: of a run's folder, of its rollout folder, or the one file."""
    if path.is_file():
        return {path.stem: path}
    files = sorted((path / "rollout" if (path / "rollout").is_dir() else path).glob("*.safetensors"))
    if not files:
        raise InputError(path, "holds no rollout bundle", "give a bundle or the --out folder of `mlite prove`")
    return {file.stem: file for file in files}
