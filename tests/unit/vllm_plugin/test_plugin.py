"""The plugin on a small fake of vLLM: inert unless asked, refusing by name, and replacing what it says that it replaces."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lite.errors import InputError
from lite.primitive.kernels.vllm import experts, flash_set, gemm, norm, router, triton_set
from lite.primitive.kernels.vllm import mamba as mamba_kernels
from lite.vllm_plugin import PINS, handshake, layers, mamba, register, replay, stock_decode
from tests.checkpoints import same

ROOT = Path(__file__).parents[3]


# A fake of what the plugin touches, with vLLM 0.26.0's semantics.


class FakeAttention(nn.Module):
    def __init__(self, backend: str):
        super().__init__()
        self.attn_backend = SimpleNamespace(get_name=lambda: backend)


FakeAttention.__name__ = "Attention"


def fake_modules() -> dict[str, ModuleType]:
    def rms_norm_batch_invariant(input: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None) -> Any:
        x = input if residual is None else residual.add_(input)  # the fused kernel writes into both of its inputs
        wide = x.float()
        y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
        return y if residual is None else (input.copy_(y), residual)

    replacements: dict[str, type] = {}

    class CustomOp(nn.Module):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__new__(replacements.get(cls.__name__, cls))

        @classmethod
        def register_oot(cls, decorated: type | None = None, name: str | None = None) -> Any:
            def decorator(layer: type) -> type:
                key = name if name is not None else cls.__name__
                assert key not in replacements, f"Duplicate op name: {key}"
                layer.name = key
                replacements[key] = layer
                return layer

            return decorator if decorated is None else decorator(decorated)

    class RMSNorm(CustomOp):
        def __init__(self, hidden_size: int, eps: float = 1e-6):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(1 + 0.1 * torch.randn(hidden_size).bfloat16()), eps
            self.has_weight, self.variance_size_override = True, None

        def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
            return rms_norm_batch_invariant(x, self.weight.data, self.variance_epsilon, residual=residual)

    class GateLinear(CustomOp):
        """By the number of rows, as vLLM's: other bits below 17."""

        def __init__(self, hidden: int, experts: int, out_dtype: torch.dtype | None = None, bias: bool = False):
            super().__init__()
            self.weight, self.out_dtype = nn.Parameter(torch.randn(experts, hidden).bfloat16()), out_dtype
            self.bias = nn.Parameter(torch.zeros(experts)) if bias else None

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return (x.float() @ self.weight.float().t()) * (1 + (len(x) <= 16) * 2**-20), None

    class UnquantizedFusedMoEMethod(CustomOp):
        mk_can_overlap_shared_experts = False

        def __init__(self, backend: str = "TRITON", has_bias: bool = False, clamp: float | None = None):
            super().__init__()
            self.unquantized_backend = SimpleNamespace(name=backend, value=backend.lower())
            self.moe = SimpleNamespace(has_bias=has_bias)
            self.moe_quant_config = SimpleNamespace(gemm1_clamp_limit=clamp)

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.processed = True

        def forward_cuda(self, *_: Any) -> str:
            return "stock"

    class Mixer2RMSNormGated(CustomOp):
        def __init__(self, hidden: int = 8, n_groups: int = 2):
            super().__init__()
            self.weight, self.n_groups, self.variance_epsilon = nn.Parameter(torch.randn(hidden)), n_groups, 1e-5

    class MambaMixer2(CustomOp):
        """A state of two tensors, and of what the replacement asks."""

        tp_size, activation, use_rms_norm, num_heads, head_dim, n_groups, ssm_state_size = 1, "silu", True, 4, 2, 1, 3

        def get_state_shape(self) -> Any:
            return (3, 14), (4, 2, 3)

        def get_state_dtype(self) -> Any:
            return torch.bfloat16, torch.float32

    class Hybrid:
        @classmethod
        def get_mamba_state_shape_from_config(cls, config: Any) -> Any:
            return (3, 14), (4, 2, 3)

        @classmethod
        def get_mamba_state_dtype_from_config(cls, config: Any) -> Any:
            return torch.bfloat16, torch.float32

    class Autotuner:
        def __init__(self, name: str):
            self.configs, self.cache, self.base_fn = ["first", "second"], {}, SimpleNamespace(__name__=name)

    class Backend:
        @classmethod
        def supports_batch_invariance(cls) -> bool:
            return False

    def resolved(architecture: str, model_config: Any) -> tuple[type, str]:
        assert (architecture, model_config) == ("Hybrid", model)
        return Hybrid, architecture

    backends: dict[str, str] = {}
    cache = SimpleNamespace(mamba_ssm_cache_dtype="float32", mamba_cache_dtype="auto", mamba_cache_mode="none")
    model = SimpleNamespace(architecture="Hybrid", get_mamba_chunk_size=lambda: 16)
    config = SimpleNamespace(cache_config=cache, model_config=model, speculative_config=None, kv_transfer_config=None)
    ops, layers_mamba = "vllm.model_executor.layers.mamba.ops", "vllm.model_executor.layers.mamba"

    def linear_batch_invariant(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return (input.float() @ weight.float().t()).to(input.dtype)

    moe = "vllm.model_executor.layers.fused_moe"
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.model_executor": {},
        "vllm.model_executor.custom_op": {"CustomOp": CustomOp, "op_registry_oot": replacements},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.linear": {"linear_batch_invariant": linear_batch_invariant},
        "vllm.model_executor.layers.vocab_parallel_embedding": {"linear_batch_invariant": linear_batch_invariant},
        moe: {},
        f"{moe}.router": {},
        f"{moe}.router.gate_linear": {"GateLinear": GateLinear},
        f"{moe}.unquantized_fused_moe_method": {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod},
        "vllm.model_executor.layers.layernorm": {"RMSNorm": RMSNorm},
        "vllm.model_executor.layers.batch_invariant": {"rms_norm_batch_invariant": rms_norm_batch_invariant},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.forward_context": {"get_forward_context": None},
        layers_mamba: {},
        f"{layers_mamba}.mamba_mixer2": {"MambaMixer2": MambaMixer2, "Mixer2RMSNormGated": Mixer2RMSNormGated},
        f"{layers_mamba}.mamba_utils": {"is_conv_state_dim_first": lambda: False},
        ops: {},
        **{f"{ops}.{name}": {"kernel": Autotuner(name)} for name in mamba_kernels.SCAN_KERNELS},
        "vllm.model_executor.models": {"ModelRegistry": SimpleNamespace(resolve_model_cls=resolved)},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {
            "MambaAttentionBackendEnum": SimpleNamespace(MAMBA2="MAMBA2"),
            "register_backend": lambda backend, path, is_mamba: backends.__setitem__(backend, path), "registered": backends,
        },
        "vllm.v1.attention.backends.mamba2_attn": {
            "Mamba2AttentionBackend": Backend, "Mamba2AttentionMetadata": type("Metadata", (), {}),
            "Mamba2AttentionMetadataBuilder": type("Builder", (), {}),
        },
        "triton": {},
        "triton.runtime": {},
        "triton.runtime.autotuner": {"Autotuner": Autotuner},
    }  # fmt: skip
    found = {}
    for name, content in contents.items():
        found[name] = ModuleType(name)
        found[name].__dict__.update(content)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(found[parent], leaf, found[name])  # `from package import module` reads it there
    return found


class FakeVllm:
    def __init__(self, modules: dict[str, ModuleType]):
        self.registry: dict[str, type] = modules["vllm.model_executor.custom_op"].op_registry_oot
        self.rms_norm: type[nn.Module] = modules["vllm.model_executor.layers.layernorm"].RMSNorm
        self.kernel = modules["vllm.model_executor.layers.batch_invariant"].rms_norm_batch_invariant
        self.linear_callers = [modules[f"vllm.model_executor.layers.{name}"] for name in ("linear", "vocab_parallel_embedding")]
        self.gate = modules["vllm.model_executor.layers.fused_moe.router.gate_linear"].GateLinear
        self.modules = modules
        self.mixer = modules["vllm.model_executor.layers.mamba.mamba_mixer2"].MambaMixer2
        self.gated_norm = modules["vllm.model_executor.layers.mamba.mamba_mixer2"].Mixer2RMSNormGated
        self.config = modules["vllm.config"].get_current_vllm_config()
        self.experts = modules["vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"].UnquantizedFusedMoEMethod

    def model(self, norms: int = 3, backends: tuple[str, ...] = ("TRITON_ATTN",)) -> nn.Module:
        return nn.ModuleList([*(self.rms_norm(8) for _ in range(norms)), *(FakeAttention(b) for b in backends), nn.Linear(2, 2)])


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    modules = fake_modules()
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "triton")]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"vllm": "0.26.0"}[name])
    mamba_kernels.pin_autotuners.cache_clear()
    yield FakeVllm(modules)
    mamba_kernels.pin_autotuners.cache_clear()


@pytest.fixture
def environment() -> Iterator[Any]:
    """Exact mode as a user turns it on; the process gets its own environment back."""
    before = dict(os.environ)
    for name in PINS:
        os.environ.pop(name, None)
    os.environ.update(MLITE_EXACT="1", VLLM_BATCH_INVARIANT="1")
    yield os.environ
    os.environ.clear()
    os.environ.update(before)


# The entry point.


def declared(pyproject: str) -> dict[str, str]:
    return tomllib.loads(pyproject)["project"].get("entry-points", {}).get("vllm.general_plugins", {})


def test_the_entry_point_is_declared_and_leads_to_register() -> None:
    points = declared((ROOT / "pyproject.toml").read_text())
    assert list(points) == ["mlite"]
    assert EntryPoint("mlite", points["mlite"], "vllm.general_plugins").load() is register


def test_the_entry_point_under_another_group_would_be_seen() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert declared(text.replace('"vllm.general_plugins"', '"vllm.platform_plugins"')) == {}
    with pytest.raises(AttributeError):
        EntryPoint("mlite", "lite.vllm_plugin:registers", "vllm.general_plugins").load()


def test_an_installed_package_carries_the_entry_point() -> None:
    try:
        distribution = importlib.metadata.distribution("megatron-lite")
    except PackageNotFoundError:
        pytest.skip("megatron-lite runs from its sources here")
    points = [(p.name, p.value) for p in distribution.entry_points if p.group == "vllm.general_plugins"]
    assert points == [("mlite", "lite.vllm_plugin:register")]


# Inert without MLITE_EXACT=1.

INERT = """
import json, os, sys
before = dict(os.environ)
from lite.vllm_plugin import register
{planted}
register()
heavy = [m for m in sys.modules if m.split(".")[0] in ("vllm", "torch") or m.startswith(("lite.primitive", "lite.vllm_plugin.layers"))]
print(json.dumps(sorted(heavy) + sorted(k for k in {{*before, *os.environ}} if before.get(k) != os.environ.get(k))))
"""


def traces(exact: str | None, planted: str = "") -> list[str]:
    """What a process is left with by `register()`: modules that it imported, variables that it changed."""
    env = {k: v for k, v in os.environ.items() if k != "MLITE_EXACT" and k not in PINS}
    env |= {"PYTHONPATH": str(ROOT)} | ({} if exact is None else {"MLITE_EXACT": exact})
    done = subprocess.run([sys.executable, "-c", INERT.format(planted=planted)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("exact", [None, "", "0", "true"])
def test_without_the_switch_the_plugin_leaves_no_trace(exact: str | None) -> None:
    assert traces(exact) == []


@pytest.mark.parametrize(
    ("planted", "trace"),
    [
        ("os.environ['VLLM_USE_V2_MODEL_RUNNER'] = '0'", "VLLM_USE_V2_MODEL_RUNNER"),
        ("os.environ.pop('PATH')", "PATH"),
        ("import lite.primitive", "lite.primitive"),
        ("sys.modules['vllm'] = os", "vllm"),
    ],
)
def test_a_trace_would_be_seen(planted: str, trace: str) -> None:
    assert traces(None, planted) == [trace]


# With it: refusals by name, pins otherwise.


@pytest.mark.parametrize("found", ["0.25.9", "0.26.1", "0.26.0rc1", "0.26", "0.27.0+cu129"])
def test_an_unverified_version_is_refused_by_name(vllm: FakeVllm, environment: Any, monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with pytest.raises(InputError) as error:
        register()
    assert f"vllm: version {found} was not verified" in str(error.value) and "0.26.0" in str(error.value)
    assert not vllm.registry and not PINS.keys() & environment.keys()


def test_a_missing_vllm_is_refused(vllm: FakeVllm, environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(InputError, match="vllm: is not installed"):
        register()
    assert not vllm.registry


@pytest.mark.parametrize("value", ["0", "", "true", None])
def test_batch_invariant_mode_must_be_on(vllm: FakeVllm, environment: Any, value: str | None) -> None:
    environment.pop("VLLM_BATCH_INVARIANT")
    if value is not None:
        environment["VLLM_BATCH_INVARIANT"] = value
    with pytest.raises(InputError) as error:
        register()
    assert str(error.value).startswith("VLLM_BATCH_INVARIANT: is ")
    assert "unset" in str(error.value) if value is None else value in str(error.value)
    assert not vllm.registry


@pytest.mark.parametrize("name", PINS)
def test_a_pin_of_another_value_is_refused_by_name(vllm: FakeVllm, environment: Any, name: str) -> None:
    environment[name] = "1"
    with pytest.raises(InputError, match=f"^{name}: is 1 "):
        register()
    assert environment[name] == "1" and not vllm.registry


@pytest.mark.parametrize("found", ["0.26.0", "0.26.0+cu129"])
@pytest.mark.parametrize("already", [True, False])
def test_pins_are_set_and_the_layers_installed(
    vllm: FakeVllm, environment: Any, monkeypatch: pytest.MonkeyPatch, found: str, already: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    environment.update(PINS if already else {})
    before = dict(environment)
    register()
    assert dict(environment) == before | PINS
    assert list(vllm.registry) == ["RMSNorm", "GateLinear", "UnquantizedFusedMoEMethod", "MambaMixer2", "Mixer2RMSNormGated"]
    assert all(module.linear_batch_invariant is gemm.linear for module in vllm.linear_callers)


# The replaced layer.


def test_the_replacement_is_what_vllm_builds(vllm: FakeVllm) -> None:
    stock = vllm.rms_norm(8)
    layers.install()
    exact = vllm.registry["RMSNorm"]
    assert issubclass(exact, vllm.rms_norm) and exact is not vllm.rms_norm and exact.name == "RMSNorm"
    assert type(vllm.rms_norm(8)) is exact and type(stock) is vllm.rms_norm
    assert exact.forward_cuda is not vllm.rms_norm.forward_cuda


def test_a_second_plugin_is_refused_by_name(vllm: FakeVllm) -> None:
    class Foreign(vllm.rms_norm):
        pass

    vllm.registry["RMSNorm"] = Foreign
    with pytest.raises(InputError, match=r"another plugin replaces RMSNorm \(.*Foreign.*VLLM_PLUGINS"):
        layers.install()
    assert vllm.registry == {"RMSNorm": Foreign}


def test_both_processes_call_the_same_functions(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer looks the functions up in the very module that the trainer's kernel sets take them from."""
    for kernels in (flash_set, triton_set):
        assert kernels.rms_norm is norm.rms_norm and kernels.add_rms_norm is norm.add_rms_norm
    layers.install()
    layer, x, residual = vllm.rms_norm(8, 1e-5), torch.randn(3, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(norm, "rms_norm", lambda *args: calls.append(("rms_norm", *args)) or "alone")
    monkeypatch.setattr(norm, "add_rms_norm", lambda *args: calls.append(("add_rms_norm", *args)) or "added")
    assert layer.forward_cuda(x) == "alone" and layer.forward_cuda(x, residual) == "added"
    expected = [("rms_norm", x, layer.weight, 1e-5), ("add_rms_norm", x, residual, layer.weight, 1e-5)]
    assert all(a is b or a == b for call, want in zip(calls, expected, strict=True) for a, b in zip(call, want, strict=True))


def written(layer: Any, *inputs: Tensor) -> list[int]:
    """Which of its inputs the layer wrote into or handed out as its own output, the weight last."""
    held = [*inputs, layer.weight.data]
    before = [t.clone() for t in held]
    outputs = layer.forward_cuda(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    shared = {t.data_ptr() for t in outputs}
    return [i for i, (t, was) in enumerate(zip(held, before, strict=True)) if not same(t, was) or t.data_ptr() in shared]


@pytest.mark.parametrize("rows", [1, 7, 256])
def test_the_replacement_gives_the_trainers_bytes_and_writes_nothing(vllm: FakeVllm, rows: int) -> None:
    layers.install()
    layer, x, residual = vllm.rms_norm(48), torch.randn(rows, 48).bfloat16(), torch.randn(rows, 48).bfloat16()
    assert written(layer, x) == written(layer, x, residual) == []
    assert same(layer.forward_cuda(x), triton_set.rms_norm(x, layer.weight, layer.variance_epsilon))
    y, total = layer.forward_cuda(x, residual)
    want, want_total = triton_set.add_rms_norm(x, residual, layer.weight, layer.variance_epsilon)
    assert same(y, want) and same(total, want_total) and same(total, x + residual)
    assert same(y, vllm.kernel(x + residual, layer.weight, layer.variance_epsilon))


def test_a_layer_that_writes_would_be_seen(vllm: FakeVllm) -> None:
    """The stock one does."""
    x, residual = torch.randn(2, 3, 8).bfloat16()
    assert written(vllm.rms_norm(8), x, residual) == [0, 1]


# Routers, experts, linear layers.


@pytest.mark.parametrize(("out_dtype", "called"), [(torch.float32, "mm"), (None, "linear"), (torch.bfloat16, "linear")])
def test_the_router_calls_one_kernel_for_any_number_of_rows(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, out_dtype: torch.dtype | None, called: str
) -> None:
    layers.install()
    gate, calls = vllm.gate(16, 4, out_dtype), []

    def product(name: str) -> Any:
        return lambda x, w, *bias, out_dtype=None: calls.append(name) or torch.zeros(len(x), 4, dtype=out_dtype or x.dtype)

    monkeypatch.setattr(torch, "mm", product("mm"))
    monkeypatch.setattr(router, "linear", product("linear"))
    for rows in (1, 16, 17, 300):
        logits, bias = gate(torch.zeros(rows, 16).bfloat16())
        assert bias is None and logits.shape == (rows, 4) and logits.dtype == (out_dtype or torch.bfloat16)
    assert calls == [called] * 4


def test_a_router_with_a_bias_is_refused(vllm: FakeVllm) -> None:
    layers.install()
    with pytest.raises(InputError, match="router has a bias"):
        vllm.gate(8, 4, bias=True)(torch.zeros(2, 8).bfloat16())


def moe_layer(**changed: Any) -> SimpleNamespace:
    weights = {"w13_weight": "w13", "w2_weight": "w2", "activation": SimpleNamespace(value="silu")}
    return SimpleNamespace(**{**weights, "expert_map": None, "apply_router_weight_on_input": False, "processed": False, **changed})


def test_the_experts_are_the_trainers(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    layers.install()
    method, layer, calls = vllm.experts(), moe_layer(), []
    monkeypatch.setattr(experts, "routed_experts", lambda *args: calls.append(args) or "ours")
    method.process_weights_after_loading(layer)
    assert layer.processed and type(method) is vllm.registry["UnquantizedFusedMoEMethod"]
    assert method.forward_cuda(layer, "x", "weights", "ids", None, None) == method.forward_native(layer, "x", "weights", "ids", None, None)
    assert calls == [("x", "w13", "w2", "weights", "ids", "silu")] * 2


@pytest.mark.parametrize(
    ("method", "layer", "what"),
    [
        ({"backend": "FLASHINFER_CUTLASS"}, {}, "experts by flashinfer_cutlass"),
        ({"has_bias": True}, {}, "experts with a bias"),
        ({"clamp": 7.0}, {}, "a clamped activation"),
        ({}, {"expert_map": torch.zeros(4)}, "expert parallelism"),
        ({}, {"apply_router_weight_on_input": True}, "router weights on the experts' input"),
    ],
)
def test_experts_that_were_not_verified_are_refused_by_name(
    vllm: FakeVllm, method: dict[str, Any], layer: dict[str, Any], what: str
) -> None:
    layers.install()
    with pytest.raises(InputError, match=f"the model runs {what}, which was not verified"):
        vllm.experts(**method).process_weights_after_loading(moe_layer(**layer))


def test_shared_experts_inside_the_kernel_are_refused(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    layers.install()
    monkeypatch.setattr(vllm.experts, "mk_can_overlap_shared_experts", True)
    with pytest.raises(InputError, match="shared experts inside the kernel"):
        vllm.experts().process_weights_after_loading(moe_layer())


@pytest.mark.parametrize("name", ["gate", "experts", "mixer", "gated_norm"])
def test_a_stock_layer_of_each_kind_fails_the_handshake(vllm: FakeVllm, environment: Any, name: str) -> None:
    build = {"gate": lambda: vllm.gate(8, 4), "experts": vllm.experts, "mixer": vllm.mixer, "gated_norm": vllm.gated_norm}[name]
    stock = build()
    register()
    exact = build()
    found = handshake(worker(nn.ModuleList([vllm.model(), exact])))["replaced"]
    assert [found[n]["layers"] for n in layers.LAYERS if n in found and n != "RMSNorm"] == [1]
    with pytest.raises(InputError, match=r"1 of 2 \w+ layers are not the plugin's"):
        handshake(worker(nn.ModuleList([vllm.model(), exact, stock])))


@pytest.mark.parametrize("which", [0, 1])
def test_a_linear_that_is_vllms_own_fails_the_handshake(vllm: FakeVllm, environment: Any, which: int) -> None:
    register()
    vllm.linear_callers[which].linear_batch_invariant = lambda *args: None
    with pytest.raises(InputError, match="linear layers do not call the plugin's function"):
        handshake(worker(vllm.model()))


# Mamba-2. What the layer computes is tested in test_mamba_replay.py, with vLLM's real builder of its metadata in tests/triton.


def test_a_mamba_layer_holds_the_replay_state_and_its_model_asks_for_as_much(vllm: FakeVllm, environment: Any) -> None:
    register()
    mixer, _ = vllm.mixer(), vllm.mixer()
    hybrid = vllm.modules["vllm.model_executor.models"].ModelRegistry.resolve_model_cls("Hybrid", vllm.config.model_config)[0]
    shapes, dtypes = ((3, 14), (4, 2, 3), (16, 14), (16, 4)), (torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16)
    assert mixer.get_state_shape() == hybrid.get_mamba_state_shape_from_config(vllm.config) == shapes
    assert mixer.get_state_dtype() == hybrid.get_mamba_state_dtype_from_config(vllm.config) == dtypes
    assert mixer.scan_shape == (4, 2, 1, 3, 16)


def test_the_mamba_backend_is_found_by_its_name_and_every_kernel_of_the_scan_is_pinned(vllm: FakeVllm, environment: Any) -> None:
    register()
    path = vllm.modules["vllm.v1.attention.backends.registry"].registered["MAMBA2"]
    assert path == f"{mamba.__name__}.ExactBackend" and mamba.ExactBackend.supports_batch_invariance()
    kernels = [vllm.modules[f"vllm.model_executor.layers.mamba.ops.{name}"].kernel for name in mamba_kernels.SCAN_KERNELS]
    assert all(kernel.configs == ["first"] for kernel in kernels)


def test_a_worker_that_keeps_vllms_own_decode_builds_the_stock_layer_among_the_plugins(
    vllm: FakeVllm, environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Worker:
        def __init__(self, rank: int):
            self.rank, self.model = rank, nn.ModuleList([vllm.model(), vllm.mixer(), vllm.gated_norm()])

    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=Worker))
    register()
    module, _, name = stock_decode.WORKER.rpartition(".")
    built = vars(sys.modules[module])[name](rank=3)
    assert built.rank == 3 and type(built.model[1]) is vllm.mixer and type(built.model[2]).__name__ == "ExactMixer2RMSNormGated"
    assert built.model[1].get_state_shape() == ((3, 14), (4, 2, 3)), "no replay state in its page"
    path = vllm.modules["vllm.v1.attention.backends.registry"].registered["MAMBA2"]
    assert path == f"{stock_decode.__name__}.StockBackend" and stock_decode.StockBackend.supports_batch_invariance()
    assert "get_builder_cls" not in vars(stock_decode.StockBackend), "its metadata is vLLM's"
    with pytest.raises(InputError, match="1 of 1 MambaMixer2 layers are not the plugin's"):
        layers.replaced_layers(built.model)


def test_a_kernel_that_has_chosen_its_tiles_is_refused(vllm: FakeVllm, environment: Any) -> None:
    vllm.modules["vllm.model_executor.layers.mamba.ops.ssd_chunk_scan"].kernel.cache["shape"] = "second"
    with pytest.raises(InputError, match="ssd_chunk_scan has chosen its tiles by time"):
        register()


@pytest.mark.parametrize(
    ("place", "name", "value", "what"),
    [
        ("cache_config", "mamba_ssm_cache_dtype", "bfloat16", r"a Mamba state in bfloat16 \(mamba_ssm_cache_dtype\)"),
        ("cache_config", "mamba_ssm_cache_dtype", "auto", "a Mamba state in auto"),
        ("cache_config", "mamba_cache_dtype", "float32", "a convolution state in float32"),
        ("cache_config", "mamba_cache_mode", "all", "prefix caching of Mamba layers"),
        (None, "speculative_config", "eagle", "speculative decoding"),
        (None, "kv_transfer_config", "nixl", "transfer of its cache"),
        ("layer", "tp_size", 2, "a Mamba layer in tensor parallelism"),
        ("layer", "activation", "gelu", "gelu after the convolution"),
        ("layer", "use_rms_norm", False, "a Mamba layer without its norm"),
    ],
)
def test_a_mamba_layer_that_was_not_verified_is_refused_by_name(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, place: str | None, name: str, value: Any, what: str
) -> None:
    layers.install()
    holder = vllm.config if place is None else vllm.mixer if place == "layer" else getattr(vllm.config, place)
    monkeypatch.setattr(holder, name, value)
    with pytest.raises(InputError, match=f"the model runs {what}.*, which was not verified"):
        vllm.mixer()


def test_the_gated_norm_is_the_trainers(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    layers.install()
    layer, calls = vllm.gated_norm(), []
    monkeypatch.setattr(mamba_kernels, "gated_rms_norm", lambda *args: calls.append(args) or "ours")
    assert layer.forward_cuda("x", "gate") == layer.forward_native("x", "gate") == "ours"
    assert all(call == ("x", "gate", layer.weight, 2, 1e-5) for call in calls) and len(calls) == 2


def test_several_ranks_are_refused(vllm: FakeVllm, environment: Any) -> None:
    register()
    with pytest.raises(InputError, match="is one of 2, which was not verified"):
        handshake(worker(vllm.model(), ranks=2))


@pytest.mark.parametrize("broken", [{"has_weight": False}, {"variance_size_override": 4}])
def test_a_norm_that_was_not_verified_is_refused(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, broken: dict[str, Any]) -> None:
    init = vllm.rms_norm.__init__

    def other(self: Any, *args: Any) -> None:
        init(self, *args)
        vars(self).update(broken)

    monkeypatch.setattr(vllm.rms_norm, "__init__", other)
    layers.install()
    with pytest.raises(InputError, match="RMSNorm without a weight or over a part of its row"):
        vllm.rms_norm(8)


# The handshake.


def worker(model: nn.Module, ranks: int = 1) -> SimpleNamespace:
    class Runner:
        pass

    Runner.__module__ = "vllm.v1.worker.gpu_model_runner"
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=ranks),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL_DECODE_ONLY"), mode=0),
        cache_config=SimpleNamespace(block_size=16, enable_prefix_caching=False),
        model_config=SimpleNamespace(logprobs_mode="raw_logprobs"),
    )
    return SimpleNamespace(vllm_config=config, get_model=lambda: model, model_runner=Runner())


def test_the_handshake_tells_what_runs(vllm: FakeVllm, environment: Any) -> None:
    register()
    found = handshake(worker(vllm.model(norms=5, backends=("TRITON_ATTN", "TRITON_ATTN"))))
    replaced = found.pop("replaced")
    assert found == {
        "plugin": "0.1.0", "vllm": "0.26.0", "batch_invariant": True, "attention": ["TRITON_ATTN"],
        "runner": "vllm.v1.worker.gpu_model_runner", "graphs": "FULL_DECODE_ONLY", "compilation_mode": 0, "page": 16,
        "prefix_caching": False, "logprobs_mode": "raw_logprobs",
    }  # fmt: skip
    assert list(replaced) == ["RMSNorm", "linear"] and replaced["RMSNorm"]["layers"] == 5 and len(replaced["RMSNorm"]["source"]) == 64
    assert replaced["RMSNorm"]["class"] == "lite.vllm_plugin.layers.ExactRMSNorm"
    assert json.loads(json.dumps(found)) == found, "a receipt holds it"


def test_the_handshake_tells_another_truth(vllm: FakeVllm, environment: Any) -> None:
    register()
    environment["VLLM_BATCH_INVARIANT"] = "0"
    other = worker(vllm.model(backends=("TRITON_ATTN", "FLASH_ATTN")))
    other.vllm_config.cache_config.enable_prefix_caching = True
    found = handshake(other)
    assert found["attention"] == ["FLASH_ATTN", "TRITON_ATTN"] and not found["batch_invariant"] and found["prefix_caching"]


def test_one_stock_layer_fails_the_handshake(vllm: FakeVllm, environment: Any) -> None:
    stock = vllm.rms_norm(8)
    register()
    model = nn.ModuleList([vllm.model(norms=2), nn.Sequential(stock)])
    with pytest.raises(InputError, match="1 of 3 RMSNorm layers are not the plugin's"):
        handshake(worker(model))
    assert handshake(worker(model[0]))["replaced"]["RMSNorm"]["layers"] == 2


def test_a_worker_that_never_registered_fails_the_handshake(vllm: FakeVllm) -> None:
    with pytest.raises(InputError, match="3 of 3 RMSNorm layers"):
        handshake(worker(vllm.model()))


def test_a_model_without_a_norm_proves_nothing(vllm: FakeVllm) -> None:
    layers.install()
    with pytest.raises(InputError, match="0 of 0 RMSNorm layers"):
        layers.replaced_layers(nn.Linear(2, 2))


CALLED = {
    "RMSNorm": [layers, norm],
    "GateLinear": [layers, router, gemm],
    "UnquantizedFusedMoEMethod": [layers, experts],
    "MambaMixer2": [layers, mamba, replay, mamba_kernels],
    "Mixer2RMSNormGated": [layers, mamba, mamba_kernels],
    "linear": [layers, gemm],
}


@pytest.mark.parametrize(("name", "module"), [(name, module) for name, modules in CALLED.items() for module in modules])
def test_a_changed_source_changes_the_hash(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, module: ModuleType
) -> None:
    layers.install()
    model = nn.ModuleList([vllm.model(), vllm.gate(8, 4), vllm.experts(), vllm.mixer(), vllm.gated_norm()])
    source = lambda: layers.replaced_layers(model)[name]["source"]
    before, copy = source(), tmp_path / "copy.py"
    copy.write_bytes(Path(str(module.__file__)).read_bytes())
    monkeypatch.setattr(module, "__file__", str(copy))
    assert source() == before, "the path is no part of it"
    copy.write_bytes(copy.read_bytes() + b"\n")
    assert source() != before
