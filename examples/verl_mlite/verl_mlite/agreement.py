"""What verl's diagnostics cannot say: how many logprobs differ in a byte, over how many tokens, and whether samples were distinct."""

from collections import Counter, defaultdict
from typing import Any

import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from lite.primitive.compare import bits
from verl_mlite.batches import response_lengths


class Agreement:
    """Counts of one policy, added up until `take` hands them to the next step's metrics. Every rank counts its own part and has the sums.

    verl drops what a scoring pass reports, so its counts go out with the update that follows.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def score(self, log_probs: Tensor, data: TensorDict) -> None:
        """Old logprobs (nested [B, j]) against the rollout's, and the groups' samples. Collective. Nothing where the batch holds no
        rollout_log_probs: then nothing is compared, and no count is reported."""
        if counts := _compared("old", log_probs, data):
            groups, collapsed = _groups(data)
            self.counts.update(counts | {"groups": groups, "collapsed_groups": collapsed})

    def actor(self, log_probs: Tensor, data: TensorDict) -> None:
        """The same of the forward that training differentiates, where the weights are still those of the rollout. Collective."""
        self.counts.update(_compared("actor", log_probs, data))

    def take(self) -> dict[str, list[int]]:
        """Metric name -> one value, as verl's train metrics want them."""
        counts, self.counts = self.counts, Counter()
        return {f"mlite/{name}": [count] for name, count in counts.items()}


def _compared(path: str, log_probs: Tensor, data: TensorDict) -> dict[str, int]:
    if "rollout_log_probs" not in data:
        return {}
    rollout, mask = _padded(data["rollout_log_probs"]), _padded(data["response_mask"]).bool()
    own = no_padding_2_padding(log_probs, data).to(rollout.device)
    differs = bits(own[mask].float()) != bits(rollout[mask].float())
    mismatch, tokens = _summed(int(differs.sum()), int(mask.sum()))
    return {f"{path}_mismatch": mismatch, f"{path}_tokens": tokens}


def _padded(tensor: Tensor) -> Tensor:
    return tensor.to_padded_tensor(0) if tensor.is_nested else tensor


def _groups(data: TensorDict) -> tuple[int, int]:
    """-> (groups of more than one sample over all ranks, those of them whose samples are all the same)."""
    uids = tu.get(data, "uid")
    if uids is None:
        return 0, 0
    lengths, responses = response_lengths(data).tolist(), data["responses"]
    rows = responses.unbind() if responses.is_nested else [row[:n] for row, n in zip(responses, lengths, strict=True)]
    mine = [(str(uid), tuple(row.tolist())) for uid, row in zip(uids, rows, strict=True)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    samples: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for uid, row in (pair for part in everyone for pair in part):
        samples[uid].append(row)
    several = [rows for rows in samples.values() if len(rows) > 1]
    return len(several), sum(len(set(rows)) == 1 for rows in several)


def _summed(*counts: int) -> list[int]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, counts)
    return [sum(count) for count in zip(*everyone, strict=True)]
