"""verl's own FSDP2 engine with our counts of differing logprob bytes: what the regular baseline has, where the exact arm has 0.

Loaded by VERL_USE_EXTERNAL_MODULES=verl_mlite.counted_fsdp2. verl looks for an engine of a device and vendor before one of the
device, so nothing of verl's is replaced.
"""

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_mlite.agreement import Agreement


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cuda", vendor="nvidia")
class CountedFSDP2(FSDPEngineWithLMHead):
    def __init__(self, **options: Any):
        super().__init__(**options)
        self.agreement = Agreement()

    def infer_batch(self, data: TensorDict, loss_function: Callable | None = None) -> dict[str, Any]:
        output = super().infer_batch(data, loss_function)
        self.agreement.score(output["model_output"]["log_probs"], data)
        return output

    def train_batch(self, data: TensorDict, loss_function: Callable) -> dict[str, Any]:
        output = super().train_batch(data, loss_function)
        output["metrics"] |= self.agreement.take()
        return output
