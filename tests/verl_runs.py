"""verl's own trainers in processes of their own, on the CPU, and the files that they are given."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from lite.acceptance.proxy import write_proxy

ON_CPU = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_mlite.testing.platform_cpu,verl_mlite.testing.rollout"}
TIMEOUT = 240  # seconds; a run takes less than a quarter of it on two idle cores
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2: a proxy's end of sequence is 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """Anything that two samples seldom share."""
    return sum(map(ord, solution_str)) % 101 / 100
'''

# Updates and scores are packed under different budgets. v1's queue waits without a word for as many CPUs as it wants, and has a process
# for each of its storage units. verl counts its workers by GPUs.
GRPO = """
model_engine=mlite algorithm.adv_estimator=grpo
data.train_batch_size=4 data.max_prompt_length=64 data.max_response_length=12
data.dataloader_num_workers=0 data.filter_overlong_prompts=False
actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=192
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=256
actor_rollout_ref.rollout.name=embedded actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.temperature=0.8
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.agent.num_workers=1
reward.num_workers=1 reward.custom_reward_function.name=compute_score
trainer.nnodes=1 trainer.total_epochs=1 trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.include_dashboard=False
"""
SFT = """
+model.override_config.attn_implementation=sdpa model.use_remove_padding=False
data.train_batch_size=8 data.max_length=128 data.max_token_len_per_gpu=256 data.num_workers=0
trainer.total_epochs=1
"""

Metrics = dict[str, float]


def write_policy(folder: Path, family: str, dtype: torch.dtype) -> Path:
    """A tiny checkpoint of the family, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_proxy(family, folder, geometry="tiny", layers=4 if family == "nemotron_h" else 2, dtype=dtype, seed=0)
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    pad, start, end = SPECIAL
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=end, additional_special_tokens=[start])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def write_data(folder: Path) -> None:
    """sft.parquet, rl.parquet and reward.py."""
    import pandas

    questions = [(f"add {i} and {i * i}", str(i + i * i)) for i in range(32)]
    user = lambda question: {"role": "user", "content": question}
    sft = [{"messages": [user(question), {"role": "assistant", "content": answer}]} for question, answer in questions]
    rl = [
        {"data_source": "test", "prompt": [user(question)], "reward_model": {"style": "rule", "ground_truth": answer},
         "extra_info": {"index": i}}
        for i, (question, answer) in enumerate(questions)
    ]  # fmt: skip
    pandas.DataFrame(sft).to_parquet(folder / "sft.parquet")
    pandas.DataFrame(rl).to_parquet(folder / "rl.parquet")
    (folder / "reward.py").write_text(REWARD)


def train_ppo(
    data: Path, policy: Path, dtype: str, *overrides: str, ranks: int = 1, steps: int = 3, ends: str = "", **environment: str
) -> list[Metrics]:
    """GRPO on `embedded`, in exact mode unless said otherwise. ends: what a run prints that has to fail. -> the metrics of each step."""
    with tempfile.TemporaryDirectory(prefix="mv", dir="/tmp") as ray:  # Ray's sockets live in it: their paths may have 107 characters
        return _run(
            [sys.executable, "-m", "verl.trainer.main_ppo"],
            *GRPO.split(),
            f"data.train_files={data}/rl.parquet",
            f"data.val_files={data}/rl.parquet",
            f"reward.custom_reward_function.path={data}/reward.py",
            f"actor_rollout_ref.model.path={policy}",
            f"actor_rollout_ref.actor.engine.dtype={dtype}",
            f"actor_rollout_ref.rollout.dtype={dtype}",
            f"trainer.n_gpus_per_node={ranks}",
            f"trainer.total_training_steps={steps}",
            f"+ray_kwargs.ray_init.num_gpus={ranks}",
            f"+ray_kwargs.ray_init._temp_dir={ray}",
            *overrides,
            ends=ends,
            **{"MLITE_EXACT": "1"} | environment,
        )


def train_sft(data: Path, policy: Path, *overrides: str, ranks: int = 1, steps: int = 1, **environment: str) -> list[Metrics]:
    """-> the metrics of each step."""
    return _run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", "verl.trainer.sft_trainer"],
        *SFT.split(),
        f"model.path={policy}",
        f"data.train_files={data}/sft.parquet",
        f"trainer.total_training_steps={steps}",
        *overrides,
        **environment,
    )


def _run(command: list[str], *overrides: str, ends: str = "", **environment: str) -> list[Metrics]:
    """A run in a folder of its own; fails with the end of what it printed. None of its processes outlives it. See `train_ppo`."""
    with tempfile.TemporaryDirectory(prefix="mlite-verl-") as folder:
        path = Path(folder)
        common = [
            "hydra.searchpath=[pkg://verl_mlite.config]", f"hydra.run.dir={path}/hydra", "trainer.device=cpu", "trainer.logger=[file]",
            "trainer.resume_mode=disable", f"trainer.default_local_dir={path}/checkpoints",
        ]  # fmt: skip
        env = os.environ | {
            **ON_CPU, "VERL_FILE_LOGGER_PATH": f"{path}/metrics",
            "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HYDRA_FULL_ERROR": "1", "PYTHONWARNINGS": "ignore",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),  # or Ray writes one into the home directory
        } | environment  # fmt: skip
        with open(path / "log", "w+") as log:
            process = subprocess.Popen([*command, *common, *overrides], env=env, cwd=path, stdout=log, stderr=log, start_new_session=True)
            try:
                code: int | None = process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
            log.seek(0)
            printed = log.read()
        as_wanted = code not in (0, None) and ends in printed if ends else code == 0
        assert as_wanted, f"{command} ended {'by force' if code is None else f'with {code}'}:\n{printed[-20000:]}"
        return [json.loads(line)["data"] for line in (path / "metrics").read_text().splitlines()]


def _end(process: subprocess.Popen) -> None:
    """Ray's processes follow their driver; its group is whoever else it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
