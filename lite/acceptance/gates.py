"""The gates: each claim that needs a GPU, as one command of at most 9 minutes and the end that it must have.

Adding a gate is adding an entry to GATES; `mlite gates` runs them, and evidence/NAME.json is the receipt of each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lite.errors import InputError, nearest

# examples/demo/prepare.py makes them; the runner puts them where the commands of proofs run
CHECKPOINT, PROMPTS = "SmolLM2-135M-Instruct", "prompts.jsonl"


@dataclass(frozen=True)
class Gate:
    """shows: what the expected end shows. command: as the receipt records it, so without a path of any machine; its first word is mlite
    or pytest. expected: pass, fail or inconclusive. reason: a regular expression to be found in the receipt's reason. differs_at: the
    policies with differing tokens on both paths, exactly these. rises: standard errors by which the mean reward of the last policies is to
    be above that of the first. env: what the command needs besides in its environment. demo: whether it needs CHECKPOINT or PROMPTS."""

    name: str
    shows: str
    command: tuple[str, ...]
    expected: str = "pass"
    reason: str = ""
    differs_at: tuple[str, ...] = ()
    rises: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    demo: bool = False

    @property
    def plant(self) -> str | None:
        return self.command[self.command.index("--plant") + 1] if "--plant" in self.command else None


def _prove(
    name: str,
    shows: str,
    *flags: str,
    expected: str = "pass",
    reason: str = "",
    differs_at: str = "",
    rises: float | None = None,
    **env: str,
) -> Gate:
    command = ("mlite", "prove", "--engine", "vllm", *" ".join(flags).split(), "--out", name)
    return Gate(name, shows, command, expected, reason, tuple(differs_at.split()), rises, env, demo=CHECKPOINT in command)


def _pytest(name: str, shows: str, file: str, *chosen: str, demo: bool = False) -> Gate:
    return Gate(name, shows, ("pytest", f"tests/gpu/{file}", "-m", "gpu", *chosen), demo=demo)


SMOLLM2 = f"--model {CHECKPOINT}"
QWEN3 = "--proxy qwen3 --geometry real --layers 4"
QWEN3_MOE = "--proxy qwen3_moe --geometry real --layers 4"
NEMOTRON_H = "--proxy nemotron_h --geometry real --layers 8"
LOAD = "--groups 12 --samples 4 --response-tokens 160"  # 23,040 tokens over three policies where no response ends early
SMALL_LOAD = "--groups 8 --samples 4 --response-tokens 32 --prompt-tokens 1:300"
FLASH, TRITON, FULL_DECODE = "--attention FLASH_ATTN", "--attention TRITON_ATTN", "--graphs full_decode"

GATES: tuple[Gate, ...] = (
    _prove("smollm2-triton-eager", "A trained model is exact up to its context's end.", SMOLLM2, LOAD, "--prompt-tokens 1:8032", TRITON),
    _prove("smollm2-triton-graphs-t0.6", "It is exact with CUDA graphs and another temperature, too.",
           SMOLLM2, LOAD, "--prompt-tokens 1:3000", TRITON, FULL_DECODE, "--temperature 0.6"),
    _prove("smollm2-flash-refused", "FlashAttention at head size 64 is refused before anything is generated.",
           SMOLLM2, LOAD, "--prompt-tokens 1:64", FLASH, expected="inconclusive",
           reason=r"decode equals prefill broken at shape .9, 3, 64.*row"),
    _prove("smollm2-stale", "A missed weight sync is seen at every policy after it.",
           SMOLLM2, SMALL_LOAD, "--plant stale-weights", expected="fail", differs_at="theta1 theta2"),
    _prove("smollm2-one-ulp", "One bit of one token is seen at every policy.",
           SMOLLM2, SMALL_LOAD, "--plant one-ulp", expected="fail", differs_at="theta0 theta1 theta2"),
    _prove("smollm2-200-updates", "It stays exact through two hundred updates, and learns from them.",
           SMOLLM2, f"--prompts {PROMPTS} --updates 200 --groups 8 --samples 8 --response-tokens 32 --lr 1e-6 --save-every 50",
           TRITON, FULL_DECODE, rises=2.0),
    _prove("qwen3-flash-eager", "Layers of Qwen3-8B's size are exact with FlashAttention.", QWEN3, LOAD, "--prompt-tokens 1:9300", FLASH),
    _prove("qwen3-flash-graphs", "With FlashAttention and CUDA graphs, too.", QWEN3, LOAD, "--prompt-tokens 1:9300", FLASH, FULL_DECODE),
    _prove("qwen3-triton-eager", "With vLLM's Triton attention, too.", QWEN3, LOAD, "--prompt-tokens 1:9300", TRITON),
    _prove("qwen3-triton-graphs", "With both of these, too.", QWEN3, LOAD, "--prompt-tokens 1:9300", TRITON, FULL_DECODE),
    _prove("qwen3-flash-plugin-off", "vLLM's own batch-invariant mode is not enough: the plugin is what makes it exact.",
           QWEN3, "--plugin off", FLASH, "--groups 12 --samples 4 --response-tokens 64 --prompt-tokens 1:700",
           expected="fail", differs_at="theta0 theta1 theta2",
           VLLM_USE_FLASHINFER_SAMPLER="0"),  # stock vLLM asks for it where flashinfer is not installed
    _prove("qwen3-moe-flash-eager", "Layers of Qwen3-30B-A3B's size are exact.", QWEN3_MOE, LOAD, "--prompt-tokens 1:9300", FLASH),
    _prove("qwen3-moe-flash-graphs", "With CUDA graphs, too.", QWEN3_MOE, LOAD, "--prompt-tokens 1:9300", FLASH, FULL_DECODE),
    _prove("nemotron-h-flash-eager", "Layers of Nemotron-3-Nano's size are exact: Mamba-2, attention, experts, by replay.",
           NEMOTRON_H, LOAD, "--prompt-tokens 1:9300", FLASH),
    _prove("nemotron-h-flash-graphs", "With CUDA graphs, too.", NEMOTRON_H, LOAD, "--prompt-tokens 1:9300", FLASH, FULL_DECODE),
    _prove("nemotron-h-plugin-off", "vLLM's own decode of Mamba-2 is other arithmetic than its prefill.",
           NEMOTRON_H, "--plugin off", FLASH, "--groups 12 --samples 4 --response-tokens 64 --prompt-tokens 1:700",
           expected="fail", differs_at="theta0 theta1 theta2", VLLM_USE_FLASHINFER_SAMPLER="0"),
    _pytest("moe-inference", "Qwen3-30B-A3B's layers decode as they prefill, whole and in pieces.", "test_moe_inference.py"),
    _pytest("mamba-inference", "Nemotron-3-Nano's layers decode as they prefill, whole and in pieces, with CUDA graphs.",
            "test_mamba_inference.py"),
    _pytest("mamba-kernels", "Mamba-2's kernels keep the contract at that geometry, and their backwards the fp64 formula.",
            "test_vllm_mamba.py"),
    _pytest("mamba-upstream", "They agree with the references that mamba-ssm and causal-conv1d test theirs with.",
            "test_upstream_references.py"),
    _pytest("engine-sync", "An update reaches the engine whole, through two syncs in a row, sleep and wake.", "test_engine_sync.py"),
    _pytest("kernels", "vLLM's kernels keep the contract, and their backwards the fp64 formula.", "test_vllm_kernels.py"),
    _pytest("fsdp", "Sharded over two GPUs, recomputed, offloaded: one process's forward bytes, and its training within stated limits.",
            "test_two_gpus.py"),
    _pytest("verl-smollm2", "verl's main_ppo with its own vLLM rollout: both counters are 0 after every update, reload, sleep and wake.",
            "test_verl.py", "-k", "smollm2", demo=True),
    _pytest("verl-qwen3", "With layers of Qwen3-8B's size, too.", "test_verl.py", "-k", "qwen3", demo=True),
    _pytest("verl-nemotron-h", "With Nemotron-3-Nano's layers, too.", "test_verl.py", "-k", "nemotron_h", demo=True),
    _pytest("verl-baseline", "verl's own trainer beside vLLM as installed differs at every update.",
            "test_verl.py", "-k", "baseline", demo=True),
    _pytest("route-replay", "vLLM's routes are those of the trainer, and replayed they give its logprobs.", "test_vllm_routes.py"),
    _pytest("fsdp-engine", "Both ranks of a sharded trainer agree with vLLM at every policy.", "test_two_gpus_engine.py"),
)  # fmt: skip


def choose(names: Sequence[str]) -> list[Gate]:
    """The gates of those names in the order of the list; all of them for no names. InputError for a name that is not there."""
    known = {gate.name for gate in GATES}
    for name in names:
        if name not in known:
            raise InputError("--only", f"there is no gate {name!r}", nearest(name, known))
    return [gate for gate in GATES if not names or gate.name in names]
