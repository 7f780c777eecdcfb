"""A weight sync of the exact arm, inside verl's vLLM worker. Only such a worker imports this module: verl's part of it needs vLLM.

Named to verl by `actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls`.
"""

import json
import logging
import os
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from lite import vllm_plugin
from lite.errors import InputError
from lite.primitive.ckpt.hf_weights import fingerprint
from lite.runtime.rollout.vllm_weights import held
from verl_mlite.engine import SYNC, write_answer

logger = logging.getLogger("verl_mlite")
logger.setLevel(os.environ.get("VERL_LOGGING_LEVEL", "INFO"))

EXACT_WORKER = {
    "batch_invariant": True, "prefix_caching": False, "compilation_mode": 0, "runner": "vllm.v1.worker.gpu_model_runner",
}  # fmt: skip
"""What every exact worker's handshake says."""


class ExactWorkerExtension(vLLMColocateWorkerExtension):
    """vLLM mixes this into its worker, which must have none of these names: its own are prefixed."""

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """verl calls this when the engine is up. Its own version masks the logits of ids beyond the tokenizer, which changes every
        logprob's denominator; the trainer counts all of them. InputError names what an exact engine does not run."""
        if os.environ.get("MLITE_EXACT") != "1":
            found = os.environ.get("MLITE_EXACT", "unset")
            raise InputError("MLITE_EXACT", f"is {found} in vLLM's worker", "forward it as 1, or leave worker_extension_cls out")
        config = self.vllm_config
        for what, found in {
            f"{len(banned_token_ids or ())} banned token ids (banned_token_ids)": banned_token_ids,
            "adapters (lora_config)": config.lora_config,
            "quantized weights (quant_config)": config.quant_config,
            "speculative decoding (speculative_config)": config.speculative_config,
        }.items():
            if found:
                raise InputError("vllm worker", f"has {what}, for which no trainer has the same logprobs", "run without it")

    def update_weights_from_ipc(self, peft_config: dict | None = None, base_sync_done: bool = False, use_shm: bool = False) -> None:
        """All weights of one policy, and proof that the worker holds them, or InputError. Nothing is processed after loading: some of
        vLLM's steps there would be wrong a second time."""
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        self.mlite_policy_version: int | None = None
        sync = Sync(self.get_model(), peft_config)
        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=sync.receive)
        version, digest = sync.checked()
        said = ""
        if not hasattr(self, "mlite_handshake"):
            self.mlite_handshake = _handshake(self)
            said = f", handshake {json.dumps(self.mlite_handshake, sort_keys=True)}"
        self.mlite_policy_version = version
        answer = {"version": version, "fingerprint": digest, "handshake": self.mlite_handshake}
        write_answer(Path(sync.facts["answer"]), answer)
        logger.info("vLLM holds policy version %d, fingerprint %s%s", version, digest, said)


class Sync:
    """The buckets of one weight sync. What is wrong with them is kept for `checked`: a receiver that raises before the last bucket leaves
    the trainer waiting for its answer for ever."""

    def __init__(self, model: Any, peft_config: Any):
        self.model = model
        self.facts: dict[str, Any] = {}
        self.times: Counter[str] = Counter()
        self.loaded: set[str] = set()
        self.error: Exception | None = None
        if peft_config:
            self.error = InputError("weight sync", f"brings an adapter ({peft_config})", "train all weights: set model.lora.rank to 0")

    def receive(self, bucket: list[tuple[str, Tensor]], is_last: bool) -> None:
        if self.error is None:
            try:
                self._load(bucket)
            except Exception as error:
                # the traceback is kept as text: its frames would hold the bucket, and the receiver could not let go of its memory
                logger.error("a bucket of a weight sync was not loaded:\n%s", traceback.format_exc())
                self.error = error.with_traceback(None)
                self.error.__cause__ = self.error.__context__ = None

    def _load(self, bucket: list[tuple[str, Tensor]]) -> None:
        if not self.facts:
            if not bucket or bucket[0][0] != SYNC:
                first = bucket[0][0] if bucket else "nothing"
                raise InputError("weight sync", f"begins with {first}, not {SYNC}", "set MLITE_EXACT=1 for the trainer's workers too")
            self.facts = json.loads(bucket[0][1].cpu().numpy().tobytes())
            bucket = bucket[1:]
        self.times.update(name for name, _ in bucket)
        if bucket:
            self.loaded |= set(self.model.load_weights(iter(bucket)))

    def checked(self) -> tuple[int, str]:
        """-> (version, fingerprint) of the policy that the model now holds."""
        if self.error is not None:
            raise self.error
        rows = self.facts["rows"]
        expected = {hf for hf, _, _ in rows}
        wrong = {
            "missing": expected - set(self.times),
            "unexpected": set(self.times) - expected,
            "doubled": {name for name, times in self.times.items() if times > 1},
        }
        if what := ", ".join(f"{len(names)} {kind} {sorted(names)[:3]}" for kind, names in wrong.items() if names):
            raise InputError("weight sync", what, "send each tensor once")
        # vLLM names a stack of experts without the module that holds it
        names = (name for name, _ in self.model.named_parameters())
        unloaded = [name for name in names if name.replace(".experts.routed_experts.", ".experts.") not in self.loaded]
        if unloaded:
            raise InputError("weight sync", f"vLLM did not load {sorted(unloaded)[:3]}", "check the checkpoint names")
        found = fingerprint(held(self.model, rows))
        if found != self.facts["fingerprint"]:
            what = f"vLLM holds fingerprint {found[:16]} of version {self.facts['version']}, the trainer {self.facts['fingerprint'][:16]}"
            raise InputError("weight sync", what, "do not go on: the two hold different weights")
        return self.facts["version"], found


def _handshake(worker: Any) -> dict[str, Any]:
    answer = vllm_plugin.handshake(worker)
    graphs = answer.get("graphs")
    if answer | EXACT_WORKER != answer or graphs not in ("NONE", "FULL_DECODE_ONLY"):
        raise InputError("vllm worker", f"runs {answer}", f"exact mode needs {EXACT_WORKER} and graphs of decode steps or none")
    return answer
