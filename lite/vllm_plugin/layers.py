"""What the plugin replaces in vLLM: layers through its own registry of out-of-tree layers, and the function behind every linear layer.

Each replacement calls the very function that the trainer's kernel set holds.
"""

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from lite.errors import InputError
from lite.primitive.kernels.vllm import experts, gemm, norm, router
from lite.primitive.kernels.vllm import mamba as mamba_kernels
from lite.vllm_plugin import mamba, replay


def install() -> None:
    """Registers the replacements; vLLM then builds them wherever a model asks for the original."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot

    replacements = {name: build() for name, (build, _) in LAYERS.items()}
    for name in replacements:
        if name in op_registry_oot:
            raise InputError("vllm", f"another plugin replaces {name} ({op_registry_oot[name]})", "exclude it with VLLM_PLUGINS")
    for name, replacement in replacements.items():
        CustomOp.register_oot(replacement, name=name)
    mamba.install()
    # every linear layer calls this function by its module's name for it; vLLM has no registry there
    for module in _linear_callers():
        module.linear_batch_invariant = gemm.linear  # type: ignore[attr-defined]


def _linear_callers() -> tuple[ModuleType, ...]:
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    return linear, vocab_parallel_embedding


def _exact_rms_norm() -> type:
    from vllm.model_executor.layers.layernorm import RMSNorm

    class ExactRMSNorm(RMSNorm):
        """vLLM's RMSNorm, its residual branch too computed by the kernels that the trainer calls."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            if not self.has_weight or self.variance_size_override is not None:
                what = "the model has an RMSNorm without a weight or over a part of its row, which was not verified"
                raise InputError("vllm", what, "run it without MLITE_EXACT=1")

        def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
            if residual is None:
                return norm.rms_norm(x, self.weight, self.variance_epsilon)
            return norm.add_rms_norm(x, residual, self.weight, self.variance_epsilon)

        forward_native = forward_cuda  # what vLLM calls where its custom ops are off

    return ExactRMSNorm


def _exact_gate_linear() -> type:
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    class ExactGateLinear(GateLinear):
        """vLLM's router, one kernel for every number of tokens."""

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            if self.bias is not None:
                raise InputError("vllm", "the model's router has a bias, which was not verified", "run it without MLITE_EXACT=1")
            return router.router_logits(x, self.weight, self.out_dtype or x.dtype), None

    return ExactGateLinear


def _exact_experts() -> type:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    class ExactExperts(UnquantizedFusedMoEMethod):
        """vLLM's routed experts, always in the aligned form."""

        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)
            unverified = {
                f"experts by {self.unquantized_backend.value}": self.unquantized_backend.name != "TRITON",
                "expert parallelism": layer.expert_map is not None,
                "router weights on the experts' input": layer.apply_router_weight_on_input,
                "experts with a bias": self.moe.has_bias,
                "a clamped activation": self.moe_quant_config.gemm1_clamp_limit is not None,
                "shared experts inside the kernel": self.mk_can_overlap_shared_experts,
            }
            for what in (what for what, found in unverified.items() if found):
                raise InputError("vllm", f"the model runs {what}, which was not verified", "run it without MLITE_EXACT=1")

        def forward_cuda(
            self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: Any, shared_experts_input: Any
        ) -> Tensor:
            return experts.routed_experts(x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids, layer.activation.value)

        forward_native = forward_cuda

    return ExactExperts


# class name in vLLM: (builds its replacement, the modules whose functions that calls)
LAYERS: dict[str, tuple[Callable[[], type], tuple[ModuleType, ...]]] = {
    "RMSNorm": (_exact_rms_norm, (norm,)),
    "GateLinear": (_exact_gate_linear, (router, gemm)),
    "UnquantizedFusedMoEMethod": (_exact_experts, (experts,)),
    "MambaMixer2": (mamba.exact_mixer, (mamba, replay, mamba_kernels)),
    "Mixer2RMSNormGated": (mamba.exact_gated_norm, (mamba, mamba_kernels)),
}


def replaced_layers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Class, number and source hash of each replaced layer in the model. InputError where one of the originals is left."""
    from vllm.model_executor.custom_op import op_registry_oot

    found = {}
    for name, (_, kernels) in LAYERS.items():
        exact = op_registry_oot.get(name)
        # an original is known by its name: the replacement is a subclass, so the name is among its bases
        layers = [m for m in model.modules() if any(base.__name__ == name for base in type(m).__mro__)]
        stock = [m for m in layers if exact is None or not isinstance(m, exact)]
        if stock or (name == "RMSNorm" and not layers):
            what = f"{len(stock)} of {len(layers)} {name} layers are not the plugin's"
            raise InputError("vllm worker", what, "set MLITE_EXACT=1 for it")
        if layers:
            found[name] = {"class": f"{exact.__module__}.{exact.__name__}", "layers": len(layers), "source": _source_hash(*kernels)}
    if not all(module.linear_batch_invariant is gemm.linear for module in _linear_callers()):  # type: ignore[attr-defined]
        raise InputError("vllm worker", "its linear layers do not call the plugin's function", "set MLITE_EXACT=1 for it")
    return found | {"linear": {"class": f"{gemm.__name__}.linear", "source": _source_hash(gemm)}}


def _source_hash(*kernels: ModuleType) -> str:
    sources = (__file__, *(inspect.getfile(module) for module in kernels))
    return hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()
