"""A small random checkpoint of a family, on disk like any other, with weights of realistic magnitude.

Magnitude matters: with weights of 1e-3 a mixer moves a bf16 residual by nothing, and every comparison passes, the wrong ones too.
Projections keep their input's scale, norms scatter around 1, the embedding is of the residual's usual size and the head's logits
spread over a few nats; routers choose, and no expert always wins; a scan's time steps are those that Mamba-2 starts from. The receipt
says by how much each mixer moves the residual and is inconclusive where that is too little.
"""

from pathlib import Path
from typing import Any

import torch

from lite.model.protocol import ParallelConfig
from lite.model.registry import family
from lite.primitive.ckpt.hf_weights import export_weights
from lite.primitive.ckpt.safetensors_files import write_checkpoint
from lite.primitive.modules.linear import Embedding, Linear
from lite.primitive.modules.mamba2 import Mamba2Mixer
from lite.primitive.modules.moe import Experts, SigmoidRouter, SoftmaxRouter
from lite.primitive.modules.norm import RMSNorm
from lite.primitive.ops.bridges import reference_ops


@torch.no_grad()
def write_proxy(name: str, folder: Path, *, geometry: str, layers: int | None, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """-> the config.json written."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    protocol = family(name)
    hf_config = protocol.proxy_config(geometry, layers)
    config = protocol.build_model_config(hf_config)
    with torch.device(device):
        bundle = protocol.build_model(
            config, impl_cfg=protocol.ImplConfig(), parallel=ParallelConfig(), kernels=reference_ops(), dtype=torch.float32
        )
    generator = torch.Generator(device).manual_seed(seed)

    def normal(parameter: torch.Tensor, std: float, mean: float = 0.0) -> None:
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator, device=device))

    model = bundle.module
    normal(model.head.weight, 2.0 * config.hidden**-0.5)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            normal(module.weight, 0.1, mean=1.0)
        elif isinstance(module, SoftmaxRouter | SigmoidRouter):
            normal(module.weight, 2.0 * config.hidden**-0.5)
            if isinstance(module, SigmoidRouter):
                normal(module.bias, 0.1)
        elif isinstance(module, Linear):
            normal(module.weight, module.weight.shape[1] ** -0.5)
            if module.bias is not None:
                normal(module.bias, 0.1)
        elif isinstance(module, Experts):
            normal(module.w13, module.w13.shape[2] ** -0.5)
            normal(module.w2, (config.moe.k / module.w2.shape[2]) ** 0.5)  # the mean of k independent experts is smaller by k**0.5
        elif isinstance(module, Mamba2Mixer):
            normal(module.conv_weight, module.config.conv_width**-0.5)
            if module.conv_bias is not None:
                normal(module.conv_bias, 0.1)
            normal(module.norm_weight, 0.1, mean=1.0)
            normal(module.D, 0.1, mean=1.0)
            normal(module.decay.A_log, 0.8, mean=1.5)  # A: -1 .. -16
            normal(module.dt_bias, 1.0, mean=-4.0)  # time steps: 0.002 .. 0.1
        elif isinstance(module, Embedding) and module.weight is not model.head.weight:
            normal(module.weight, 0.5)
    parameters = dict(model.to(dtype).named_parameters())
    hf_config["dtype"] = str(dtype).removeprefix("torch.")
    write_checkpoint(folder, hf_config, export_weights(bundle.weights, config, bundle.layers, parameters))
    return hf_config
