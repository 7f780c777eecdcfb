"""vLLM's own capture of routes, the released one: which column a layer's experts are recorded in, and that it sees what the router returns
with the plugin installed. Only what needs a GPU is replaced: the top-k kernel and the forward's context."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from lite.primitive.kernels import reference
from lite.runtime import routes
from tests.triton.test_triton_engine import installed  # noqa: F401

E, K, LAYERS = 8, 2, 6
SPARSE = (1, 4)  # of 6 layers


def topk(weights: Tensor, ids: Tensor, rows: Tensor, logits: Tensor, renormalize: bool) -> None:
    for out, found in zip((weights, ids), reference.topk_softmax(logits, K, renormalize), strict=True):
        out.copy_(found)


@pytest.mark.usefixtures("installed")
def test_vllm_records_what_the_router_returns_at_the_layers_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for absent in ("prometheus_client", "llguidance", "xgrammar"):  # the model runner imports them, and this environment has none
        monkeypatch.setitem(sys.modules, absent, MagicMock())
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer as capturer
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    monkeypatch.setattr(fused_topk_router.ops, "topk_softmax", topk)
    monkeypatch.setattr(capturer, "get_forward_context", lambda: SimpleNamespace(dp_metadata=None))
    monkeypatch.setattr(capturer, "current_platform", SimpleNamespace(device_type="cpu"))

    def runner(name: str) -> Any:
        made = object.__new__(MoERunner)
        nn.Module.__init__(made)
        made.layer_name = name
        made.router = fused_topk_router.FusedTopKRouter(K, E)
        return made

    names = [f"model.layers.{layer}.mlp.experts" for layer in SPARSE]
    beyond = "model.layers.6.mlp.experts"  # an MTP block is numbered after the model's layers
    model = nn.ModuleList([runner(name) for name in [*names, beyond]])
    config = SimpleNamespace(num_hidden_layers=LAYERS, num_experts_per_tok=K)
    parallel = SimpleNamespace(data_parallel_rank=0, tensor_parallel_size=1)
    settings = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=config), parallel_config=parallel)
    captured = capturer.RoutedExpertsCapturer(10, settings)
    GPUModelRunner._bind_routed_experts_capturer(SimpleNamespace(model=model), captured)

    x = torch.randn(7, 3)
    returned = [layer.router.select_experts(x, torch.randn(7, E))[1] for layer in model]
    record = captured.get_device_buffer()[:7].numpy()
    assert [layer for layer in range(LAYERS) if record[:, layer].any()] == list(SPARSE)
    mlps = tuple("moe" if layer in SPARSE else None for layer in range(LAYERS))
    found = routes.from_vllm(record, SimpleNamespace(layers=LAYERS, mlps=mlps))
    for layer, ids in zip(SPARSE, returned[:2], strict=True):
        assert torch.equal(found[:, layer], ids.short())
    assert not torch.equal(returned[0], returned[2]) and (found[:, [0, 2, 3, 5]] == -1).all()
    assert not TritonExperts.is_monolithic(), "a kernel that chooses experts itself would pass the capture by"
