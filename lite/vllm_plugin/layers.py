"""The layers that the plugin replaces, through vLLM's own registry of out-of-tree layers."""

import hashlib
import inspect
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lite.errors import InputError
from lite.primitive.kernels.vllm import norm


def install() -> None:
    """Registers the replacements; vLLM then builds them wherever a model asks for the original."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers.layernorm import RMSNorm

    if "RMSNorm" in op_registry_oot:
        raise InputError("vllm", f"another plugin replaces RMSNorm ({op_registry_oot['RMSNorm']})", "exclude it with VLLM_PLUGINS")

    class ExactRMSNorm(RMSNorm):
        """vLLM's RMSNorm, its residual branch computed by the kernels that the trainer calls."""

        def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
            if residual is None:
                return norm.rms_norm(x, self.weight, self.variance_epsilon)
            return norm.add_rms_norm(x, residual, self.weight, self.variance_epsilon)

    CustomOp.register_oot(ExactRMSNorm, name="RMSNorm")


def replaced_layers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Class, number and source hash of each replaced layer in the model. InputError where one of the originals is left."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.layernorm import RMSNorm

    exact = op_registry_oot.get("RMSNorm")
    norms = [m for m in model.modules() if isinstance(m, RMSNorm)]
    stock = [m for m in norms if exact is None or not isinstance(m, exact)]
    if stock or not norms:
        raise InputError("vllm worker", f"{len(stock)} of {len(norms)} RMSNorm layers are not the plugin's", "set MLITE_EXACT=1 for it")
    sources = (__file__, inspect.getfile(norm))
    digest = hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()
    return {"RMSNorm": {"class": f"{exact.__module__}.{exact.__name__}", "layers": len(norms), "source": digest}}
