"""What a person looks at: rollout against trainer logprob, reward and gradient norm, and the first mismatch where there is one."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lite.acceptance.bundle import load_bundle
from lite.acceptance.result_folder import PLOTS, ROLLOUT, SCORES


def gone(out: Path, receipt: dict[str, Any]) -> list[str]:
    """Policies whose rollout or scores are no longer there: of a long run they may have been deleted to save space."""
    names = [policy["policy"] for policy in receipt["policies"]]
    return [name for name in names if not all((out / kept / f"{name}.safetensors").exists() for kept in (ROLLOUT, SCORES))]


def draw_plots(out: Path, receipt: dict[str, Any]) -> list[str]:
    """Writes PNGs under out/plots, of what is there. -> their paths relative to out; none where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    (out / PLOTS).mkdir(exist_ok=True)
    missing = gone(out, receipt)
    there = [policy for policy in receipt["policies"] if policy["policy"] not in missing]
    drawn = [_logprobs(out, there) if there else None, _training(out, receipt), _first_mismatch(out, receipt, missing)]
    return [plot for plot in drawn if plot]


def _save(figure: Any, out: Path, name: str) -> str:
    import matplotlib.pyplot as plt

    figure.savefig(out / PLOTS / name, dpi=110, bbox_inches="tight")
    plt.close(figure)
    return f"{PLOTS}/{name}"


def _logprobs(out: Path, every: list[dict[str, Any]]) -> str:
    import matplotlib.pyplot as plt

    policies = every if len(every) <= 6 else [*every[:3], *every[-3:]]
    figure, axes = plt.subplots(1, len(policies), figsize=(4.2 * len(policies), 4.2), squeeze=False)
    for axis, policy in zip(axes[0], policies, strict=True):
        name = policy["policy"]
        rollout = torch.cat([t.logprobs for t in load_bundle(out / ROLLOUT / f"{name}.safetensors")[0]])
        scores = load_file(out / SCORES / f"{name}.safetensors")
        low = float(min(rollout.min(), scores["actor"].min()))
        axis.plot([low, 0], [low, 0], color="0.8", linewidth=1, zorder=0)
        axis.scatter(rollout, scores["score"], s=14, facecolors="none", edgecolors="tab:blue", linewidths=0.6, label="score (no grad)")
        axis.scatter(rollout, scores["actor"], s=3, color="tab:orange", label="actor (grad)")
        axis.set_title(f"{name}: {policy['actor']['valid_tokens']} tokens\nmismatch {policy['score']['mismatch']} score, "
                       f"{policy['actor']['mismatch']} actor", fontsize=9)  # fmt: skip
        axis.set_xlabel("rollout logprob (nats)")
    axes[0][0].set_ylabel("trainer logprob (nats)")
    axes[0][0].legend(fontsize=7)
    return _save(figure, out, "logprobs.png")


def _training(out: Path, receipt: dict[str, Any]) -> str:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2))
    rewards = [p["reward_mean"] for p in receipt["policies"]]
    few = len(rewards) <= 10
    left.plot(rewards, marker="o" if few else None, linewidth=1)
    if not few:
        means = [sum(rewards[i - 9 : i + 1]) / 10 for i in range(9, len(rewards))]
        left.plot(range(9, len(rewards)), means, color="tab:orange", label="mean of ten")
        left.legend(fontsize=7)
    left.set_title("mean reward per policy", fontsize=9)
    left.set_xlabel("policy")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    steps = [u["step"] for u in receipt["updates"]]
    right.plot(steps, [u["grad_norm"] for u in receipt["updates"]], marker="o" if few else None, color="tab:red", linewidth=1)
    right.set_title("gradient norm per update", fontsize=9)
    right.set_xlabel("update")
    return _save(figure, out, "training.png")


def _first_mismatch(out: Path, receipt: dict[str, Any], missing: list[str]) -> str | None:
    """The failing response, token by token: how far the trainer is from the rollout."""
    import matplotlib.pyplot as plt

    for policy in receipt["policies"]:
        for path in ("score", "actor"):
            where = policy[path]["first_mismatch"]
            if where is None:
                continue
            if policy["policy"] in missing:
                return None
            trajectories = load_bundle(out / ROLLOUT / f"{policy['policy']}.safetensors")[0]
            trainer = load_file(out / SCORES / f"{policy['policy']}.safetensors")[path]
            lengths = [len(t.response_ids) for t in trajectories]
            index = next(i for i, t in enumerate(trajectories) if (t.uid, t.sample) == (where["uid"], where["sample"]))
            difference = (trainer.split(lengths)[index] - trajectories[index].logprobs).tolist()
            figure, axis = plt.subplots(figsize=(8.4, 3.2))
            axis.bar(range(len(difference)), difference, color="tab:red")
            axis.axvline(where["position"], color="0.6", linewidth=1, linestyle="--")
            axis.set_title(f"first mismatch: {policy['policy']} {path}, uid {where['uid']} sample {where['sample']}, "
                           f"response token {where['position']}", fontsize=9)  # fmt: skip
            axis.set_xlabel("response token")
            axis.set_ylabel("trainer - rollout (nats)")
            return _save(figure, out, "first_mismatch.png")
    return None
