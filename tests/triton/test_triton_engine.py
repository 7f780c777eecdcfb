"""The plugin in the released vLLM, as far as it goes without a GPU: its registries, its Mamba-2 layer and its metadata builder are the real
ones, and only kernels are replaced by a plain recurrence. Steps are told to the builder as the model runner tells them.

A CUDA graph is played by its rule: a replayed step runs on the metadata of its capture, so it sees what the builder has put into the same
tensors since, and nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lite.errors import InputError
from lite.primitive.compare import bits
from lite.primitive.kernels.visible import SSDShape
from lite.primitive.parallel.packing import Seqlens
from lite.vllm_plugin import layers, stock_decode
from lite.vllm_plugin import mamba as plugin
from tests import recurrence

L, W = 4, 4
SHAPE = SSDShape(heads=2, head_dim=3, groups=1, state=2, chunk=L)
INNER, C = 6, 10
SIZES = [INNER, C, SHAPE.heads]
MAX_REQUESTS, NULL = 6, 0


def config(**changed: Any) -> SimpleNamespace:
    from vllm.config import CompilationConfig

    hf_config = SimpleNamespace(mamba_num_heads=2, mamba_head_dim=3, n_groups=1, ssm_state_size=2, conv_kernel=W)
    cache = {"mamba_ssm_cache_dtype": "float32", "mamba_cache_dtype": "auto", "mamba_cache_mode": "none", "mamba_block_size": 64,
             "mamba_page_size_padded": None}  # fmt: skip
    model = {"architecture": "NemotronHForCausalLM", "dtype": torch.float32, "model_impl": "auto", "max_model_len": 64,
             "hf_config": hf_config, "get_mamba_chunk_size": lambda: L}  # fmt: skip
    graphs = SimpleNamespace(has_full_cudagraphs=lambda: True)
    compilation = CompilationConfig(custom_ops=["all"])
    object.__setattr__(compilation, "cudagraph_mode", graphs)
    return SimpleNamespace(
        compilation_config=compilation, num_speculative_tokens=0, speculative_config=None, kv_transfer_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=1, decode_context_parallel_size=1),
        model_config=SimpleNamespace(**{k: changed.get(k, v) for k, v in model.items()}),
        cache_config=SimpleNamespace(**{k: changed.get(k, v) for k, v in cache.items()}),
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQUESTS),
    )  # fmt: skip


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    """The plugin in this process, as `register` installs it, and taken out again."""
    from vllm.distributed import parallel_state
    from vllm.model_executor import custom_op
    from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM
    from vllm.v1.attention.backends import registry, utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(custom_op, "op_registry_oot", {})
        patch.setattr(registry, "_MAMBA_ATTN_OVERRIDES", {})
        for module in layers._linear_callers():
            patch.setattr(module, "linear_batch_invariant", module.linear_batch_invariant)
        for name in ("get_mamba_state_shape_from_config", "get_mamba_state_dtype_from_config"):
            patch.setattr(NemotronHForCausalLM, name, getattr(NemotronHForCausalLM, name))
        patch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=1, rank_in_group=0))
        patch.setattr(utils, "PIN_MEMORY", False)  # there is no CUDA to pin for
        patch.setattr(utils, "np_to_pinned_tensor", torch.from_numpy)
        patch.setattr(plugin, "_extended", set())
        layers.install()
        patch.setattr(plugin, "kernels", recurrence)
        yield


def build_mixer(settings: SimpleNamespace, prefix: str = "layers.0.mixer") -> Any:
    import vllm.config.vllm as vllm_config
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_config, "_current_vllm_config", settings)
        mixer = MambaMixer2(
            hidden_size=8, ssm_state_size=2, conv_kernel_size=W, intermediate_size=INNER, use_conv_bias=True, use_bias=False, n_groups=1,
            num_heads=2, head_dim=3, model_config=settings.model_config, cache_config=settings.cache_config, prefix=prefix,
        )  # fmt: skip
    for name, parameter in mixer.named_parameters():
        parameter.data.copy_(-torch.rand(parameter.shape) - 0.1 if name == "A" else torch.randn(parameter.shape))
    return mixer


@pytest.mark.usefixtures("installed")
def test_vllm_builds_the_exact_layer_and_backend() -> None:
    from vllm.v1.attention.selector import _cached_get_mamba_attn_backend

    settings = config()
    mixer = build_mixer(settings)
    assert type(mixer).__name__ == "ExactMambaMixer2" and type(mixer.norm).__name__ == "ExactMixer2RMSNormGated"
    backend = _cached_get_mamba_attn_backend.__wrapped__(mixer.mamba_type)
    assert backend is plugin.ExactBackend and backend.supports_batch_invariance() and backend.is_ssm()
    found = layers.replaced_layers(torch.nn.ModuleList([mixer, norm_layer(settings)]))
    assert found["MambaMixer2"]["layers"] == found["Mixer2RMSNormGated"]["layers"] == 1


@pytest.mark.usefixtures("installed")
def test_vllm_builds_its_own_layer_in_the_mode_that_it_refuses_it_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor import custom_op
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends import mamba2_attn, registry
    from vllm.v1.attention.selector import _cached_get_mamba_attn_backend

    monkeypatch.setattr(custom_op, "op_registry_oot", dict(custom_op.op_registry_oot))
    monkeypatch.setattr(registry, "_MAMBA_ATTN_OVERRIDES", {})
    chosen = _cached_get_mamba_attn_backend.__wrapped__
    with pytest.raises(RuntimeError, match="batch_invariant mode is not supported"):
        chosen(registry.MambaAttentionBackendEnum.MAMBA2)
    stock_decode.keep_stock_decode()
    mixer = build_mixer(config())
    assert type(mixer).__name__ == "MambaMixer2" and type(mixer.norm).__name__ == "ExactMixer2RMSNormGated"
    assert mixer.get_kv_cache_spec(config()).shapes == ((W - 1, C), (2, 3, 2))
    backend = chosen(mixer.mamba_type)
    assert backend is stock_decode.StockBackend and backend.get_builder_cls() is mamba2_attn.Mamba2AttentionMetadataBuilder
    assert backend.is_ssm() and resolve_obj_by_qualname(stock_decode.WORKER) is stock_decode.worker


def norm_layer(settings: SimpleNamespace) -> Any:
    import vllm.config.vllm as vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_config, "_current_vllm_config", settings)
        return RMSNorm(8)


@pytest.mark.usefixtures("installed")
def test_the_page_that_the_model_asks_for_is_the_layers() -> None:
    from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM
    from vllm.v1.kv_cache_interface import MambaSpec

    settings = config()
    spec = build_mixer(settings).get_kv_cache_spec(settings)
    shapes, dtypes = (getattr(NemotronHForCausalLM, f"get_mamba_state_{what}_from_config")(settings) for what in ("shape", "dtype"))
    assert spec.shapes == shapes == ((W - 1, C), (2, 3, 2), (L, C), (L, 2)) and spec.dtypes == dtypes
    real = plugin.state_shapes(((3, 6144), (64, 64, 128)), 128), plugin.state_dtypes((torch.bfloat16, torch.float32))
    page = MambaSpec(shapes=real[0], dtypes=real[1], block_size=-1).page_size_bytes
    assert page == 2 * 3 * 6144 + 4 * 64 * 64 * 128 + 2 * 128 * (6144 + 64)
    assert offsets_divide(*real) and not offsets_divide(((3, 5), (2, 2)), (torch.bfloat16, torch.float32))


def offsets_divide(shapes: Any, dtypes: Any) -> bool:
    """As vLLM lays state tensors into a page, one after the other."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    return all(sum(sizes[:i]) % dtype.itemsize == 0 for i, dtype in enumerate(dtypes))


REFUSED = {
    "a Mamba state in bfloat16": {"mamba_ssm_cache_dtype": "bfloat16"},
    "a Mamba state in auto": {"mamba_ssm_cache_dtype": "auto"},
    "a convolution state in float32": {"mamba_cache_dtype": "float32"},
    "prefix caching of Mamba layers": {"mamba_cache_mode": "align"},
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("what", REFUSED)
def test_what_was_not_verified_is_refused_by_name(what: str) -> None:
    with pytest.raises(InputError, match=what):
        build_mixer(config(**REFUSED[what]))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("what", "value"), [("speculative", "speculative decoding"), ("kv_transfer", "transfer of its cache")])
def test_other_engines_of_the_cache_are_refused_by_name(what: str, value: str) -> None:
    settings = config()
    setattr(settings, f"{what}_config", SimpleNamespace())
    with pytest.raises(InputError, match=value):
        build_mixer(settings)


# Steps.


@dataclass
class Request:
    projected: Tensor  # [n, gate | x|B|C | dt]
    prompt: int
    want: Tensor
    slots: tuple[int, int]
    computed: int = 0


class Engine:
    """Two groups of layers with one layer each, as hybrids have them: the second one's metadata is the first's with another page table."""

    def __init__(self) -> None:
        self.settings = config()
        self.mixers = [build_mixer(self.settings, f"layers.{i}.mixer") for i in range(2)]
        specs = [mixer.get_kv_cache_spec(self.settings) for mixer in self.mixers]
        builder = plugin.ExactBackend.get_builder_cls()
        self.builders = [builder(spec, [m.prefix], self.settings, torch.device("cpu")) for spec, m in zip(specs, self.mixers, strict=True)]
        for mixer, spec in zip(self.mixers, specs, strict=True):
            page = torch.full((8, spec.page_size_bytes // 4), torch.nan)
            pieces = page.split([torch.Size(shape).numel() for shape in spec.shapes], dim=1)
            mixer.kv_cache = [piece.unflatten(1, shape) for piece, shape in zip(pieces, spec.shapes, strict=True)]
        self.graphs = {size: self.metadata([(1, 1)] * size, [(NULL, NULL)] * size, [True] * size, capture=True) for size in (2, 4)}

    def request(self, length: int, prompt: int, slots: tuple[int, int]) -> Request:
        projected, mixer, seqlens = torch.randn(length, sum(SIZES)), self.mixers[0], Seqlens.of([length], [length])
        wants = []
        for mixer in self.mixers:
            _, xbc, dt = projected.split(SIZES, dim=-1)
            rows = recurrence.causal_conv1d(xbc, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, None, seqlens)
            wants.append(recurrence.ssd_scan(rows, dt, mixer.A, mixer.D, mixer.dt_bias, None, seqlens, SHAPE)[0])
        return Request(projected, prompt, torch.stack(wants), slots)

    def metadata(self, lengths: list[tuple[int, int]], slots: list[tuple[int, int]], decoding: list[bool], capture: bool = False) -> Any:
        """lengths: (new tokens, tokens with them) of each request, padding last. -> the metadata of both groups."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts, total = Seqlens.of([n for n, _ in lengths], [1]).cu_q, torch.tensor([t for _, t in lengths]).int()
        common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=total, seq_lens_cpu_upper_bound=total, num_reqs=len(lengths),
            num_actual_tokens=int(starts[-1]), max_query_len=max(n for n, _ in lengths), max_seq_len=64,
            block_table_tensor=torch.tensor([[s] for s, _ in slots]).int(), slot_mapping=torch.zeros(0),
            is_prefilling=~torch.tensor(decoding),
        )  # fmt: skip
        first, second = self.builders
        table = torch.tensor([[s] for _, s in slots]).int()
        if capture:
            return [b.build_for_cudagraph_capture(common.replace(block_table_tensor=t))
                    for b, t in ((first, common.block_table_tensor), (second, table))]  # fmt: skip
        found = first.build(0, common)
        return [found, second.update_block_table(found, table, common.slot_mapping)]

    def step(self, requests: list[Request], new: list[int], padding: int = 0) -> tuple[list[int], bool]:
        """requests in vLLM's order: those that decode, continued prompts, new prompts. -> (those with a wrong bit, whether a graph ran)."""
        graph = self.graphs.get(len(requests) + padding) if set(new) == {1} else None
        padding = padding if graph else 0
        lengths = [(n, r.computed + n) for r, n in zip(requests, new, strict=True)] + [(0, 0)] * padding
        decoding = [r.computed >= r.prompt for r in requests] + [True] * padding
        metadata = self.metadata(lengths, [r.slots for r in requests] + [(NULL, NULL)] * padding, decoding)
        projected = torch.cat([r.projected[r.computed : r.computed + n] for r, n in zip(requests, new, strict=True)])
        projected = torch.cat([projected, torch.full((padding, sum(SIZES)), torch.nan)])
        outputs = torch.stack([self._run(i, (graph or metadata)[i], projected) for i in range(2)])
        wrong, start = [], 0
        for i, (request, n) in enumerate(zip(requests, new, strict=True)):
            want = request.want[:, request.computed : request.computed + n]
            wrong += [] if torch.equal(bits(outputs[:, start : start + n].contiguous()), bits(want.contiguous())) else [i]
            request.computed += n
            start += n
        return wrong, graph is not None

    def _run(self, i: int, metadata: Any, projected: Tensor) -> Tensor:
        from vllm.forward_context import override_forward_context

        mixer, output = self.mixers[i], torch.full((len(projected), INNER), torch.nan)
        with torch.inference_mode(), override_forward_context(SimpleNamespace(attn_metadata={mixer.prefix: metadata})):
            mixer.conv_ssm_forward(projected, output)
        return output


@pytest.fixture
def engine(installed: None) -> Engine:
    torch.manual_seed(0)
    return Engine()


def test_prefill_in_pieces_beside_decode_and_graphs_have_the_bits_of_one_scan(engine: Engine) -> None:
    a, b = engine.request(14, 6, (1, 2)), engine.request(12, 7, (3, 4))
    assert engine.step([a], [6]) == ([], False)
    assert engine.step([a, b], [1, 3]) == ([], False)
    assert engine.step([a, b], [1, 4]) == ([], False)
    for _ in range(5):
        assert engine.step([a, b], [1, 1]) == ([], True)
    assert engine.step([a], [1], padding=1) == ([], True)


def test_a_batch_of_first_tokens_replays_the_decode_graph_and_has_the_right_bits(engine: Engine) -> None:
    """Their pages hold what others left; the graph last ran on other pages."""
    old = [engine.request(9, 3, (1, 2)), engine.request(9, 4, (3, 4))]
    engine.step(old, [3, 4])
    assert engine.step(old, [1, 1]) == ([], True)
    firsts = [engine.request(3, 1, (1, 2)), engine.request(3, 3, (5, 6))]
    assert engine.step(firsts, [1, 1]) == ([], True)
    assert engine.step([old[1], firsts[0], firsts[1]], [1, 1, 1], padding=1) == ([], True)


def test_a_first_token_beside_longer_prompts_is_prefilled_or_decoded_alike(engine: Engine) -> None:
    one, two, long = engine.request(5, 1, (1, 2)), engine.request(5, 1, (3, 4)), engine.request(5, 5, (5, 6))
    assert engine.step([one, long, two], [1, 5, 1]) == ([], False)
    assert engine.step([one, two], [1, 1]) == ([], True)


def test_a_page_is_taken_over_without_being_cleared_and_a_preempted_request_starts_again(engine: Engine) -> None:
    a = engine.request(11, 9, (1, 2))
    assert engine.step([a], [9]) == ([], False)
    b = engine.request(8, 2, (1, 2))
    assert engine.step([b], [2]) == ([], False)
    a.computed, a.slots = 0, (3, 1)
    assert engine.step([a], [5]) == ([], False)
    assert engine.step([a], [4]) == ([], False)
    assert engine.step([b, a], [1, 1]) == ([], True)
    assert engine.step([engine.request(2, 2, (3, 7))], [2]) == ([], False)
    assert engine.step([b, a], [1, 1]) == ([1], True), "a page that two requests write to must be noticed"


def test_a_graph_that_reads_what_was_not_filled_again_is_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the builder makes new tensors in place of those that the graph was captured with."""
    requests = [engine.request(9, 3, (1, 2)), engine.request(9, 4, (3, 4))]
    engine.step(requests, [3, 4])
    for builder in engine.builders:
        builder.computed_d = builder.computed_d.clone()
    assert engine.step(requests, [1, 1]) == ([0, 1], True)


def test_first_tokens_that_count_as_a_prefill_while_a_graph_runs_are_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: vLLM's own sorting of the requests."""
    old = [engine.request(9, 3, (1, 2)), engine.request(9, 4, (3, 4))]
    engine.step(old, [3, 4])
    engine.step(old, [1, 1])
    monkeypatch.setattr(type(engine.builders[0]), "build", lambda builder, _, common: builder._compute_common_metadata(common))
    assert engine.step([engine.request(3, 1, (5, 6)), engine.request(3, 1, (6, 7))], [1, 1]) == ([0, 1], True)


def test_before_there_is_a_cache_the_layer_gives_zeros(engine: Engine) -> None:
    from vllm.forward_context import override_forward_context

    output = torch.full((3, INNER), torch.nan)
    with override_forward_context(SimpleNamespace(attn_metadata=None)):
        engine.mixers[0].conv_ssm_forward(torch.randn(3, sum(SIZES)), output)
    assert not output.any()
