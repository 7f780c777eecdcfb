"""The exact Mamba-2 layer in vLLM: its state, what a step knows of it, and the layer itself; `replay.py` has the rule.

The layer is replaced through vLLM's registry and the backend through `register_backend`. A page of the engine's own cache holds the replay
state beside the stock one, so it is counted, handed out and freed with it. The size of a page is asked of the model's class too, which has
no extension point: its two class methods are replaced by their names when its first Mamba layer is built, before vLLM asks.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lite.errors import InputError
from lite.primitive.kernels.visible import SSDShape
from lite.primitive.kernels.vllm import mamba as kernels
from lite.vllm_plugin import replay

ExactBackend: Any = None  # set by `install`: vLLM looks a backend up by the name of its class
_extended: set[type] = set()  # the models' classes


def install() -> None:
    """What the registry of layers does not replace: the kernels' tiles, and the backend."""
    global ExactBackend
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    kernels.pin_autotuners()
    ExactBackend = _exact_backend()
    register_backend(MambaAttentionBackendEnum.MAMBA2, f"{__name__}.ExactBackend", is_mamba=True)


def extend_pages(config: Any) -> None:
    """The model's class then counts the replay state, as its layers do."""
    from vllm.model_executor.models import ModelRegistry

    model, _ = ModelRegistry.resolve_model_cls(config.model_config.architecture, model_config=config.model_config)
    if model in _extended:
        return
    shapes, dtypes = model.get_mamba_state_shape_from_config, model.get_mamba_state_dtype_from_config
    model.get_mamba_state_shape_from_config = staticmethod(
        lambda vllm_config: state_shapes(shapes(vllm_config), vllm_config.model_config.get_mamba_chunk_size())
    )
    model.get_mamba_state_dtype_from_config = staticmethod(lambda vllm_config: state_dtypes(dtypes(vllm_config)))
    _extended.add(model)


def state_shapes(stock: tuple[tuple[int, ...], ...], chunk: int) -> tuple[tuple[int, ...], ...]:
    """(convolution [W-1, C], state [H, P, N]) -> with the rows since the last boundary, as `replay.Pages`."""
    (width, channels), (heads, *state) = stock
    return (width, channels), (heads, *state), (chunk, channels), (chunk, heads)


def state_dtypes(stock: tuple[torch.dtype, torch.dtype]) -> tuple[torch.dtype, ...]:
    conv, state = stock
    return conv, state, conv, conv


def _exact_backend() -> type:
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend, Mamba2AttentionMetadata, Mamba2AttentionMetadataBuilder

    @dataclass
    class ExactMetadata(Mamba2AttentionMetadata):
        """computed_d: tokens before, of each request that decodes. pieces: the prompts of this step, None where there are none."""

        computed_d: Tensor | None = None
        pieces: replay.Pieces | None = None

    class ExactBuilder(Mamba2AttentionMetadataBuilder):
        metadata_cls = ExactMetadata

        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            # a graph reads it where it was captured
            self.computed_d = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **kwargs: Any) -> ExactMetadata:
            """A request of one token decodes, its first token too: whether a graph is replayed depends on shapes alone, and a batch of
            first tokens has the shape of a decode step. vLLM would call it a prefill and replay the graph on the last step's pages."""
            several = common_attn_metadata.query_start_loc_cpu.diff() != 1
            common = common_attn_metadata.replace(is_prefilling=common_attn_metadata.is_prefilling & several)
            metadata = replace(self._compute_common_metadata(common), chunk_size=self.chunk_size)
            if metadata.num_prefills == 0:
                return metadata
            prompts = slice(metadata.num_decodes, metadata.num_decodes + metadata.num_prefills)
            new = common.query_start_loc_cpu.diff()[prompts]
            computed = common.seq_lens_cpu_upper_bound[prompts] - new  # exact, but for speculative decoding
            pieces = replay.Pieces.of(computed.tolist(), new.tolist(), self.chunk_size, common.query_start_loc.device)
            return replace(metadata, pieces=pieces)

        def _update_metadata_for_cudagraph_capture(self, metadata: Any) -> Any:
            """Also called for the other groups of layers, with one builder's metadata and another one's page table. Padding has length 0
            and vLLM's empty page."""
            metadata = super()._update_metadata_for_cudagraph_capture(metadata)
            rows = len(metadata.state_indices_tensor_d)
            self.computed_d[:rows].copy_((metadata.seq_lens[:rows] - 1).clamp(min=0))
            return replace(metadata, computed_d=self.computed_d[:rows])

    class Backend(Mamba2AttentionBackend):
        @staticmethod
        def get_builder_cls() -> type:
            return ExactBuilder

        @classmethod
        def supports_batch_invariance(cls) -> bool:
            return True

    Backend.__qualname__ = "ExactBackend"
    return Backend


def exact_mixer() -> type:
    from vllm.config import get_current_vllm_config
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    class ExactMambaMixer2(MambaMixer2):
        """vLLM's Mamba-2 layer: its convolution and scan are the trainer's functions at every step."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            config = get_current_vllm_config()
            refuse(self, config, is_conv_state_dim_first())
            extend_pages(config)
            chunk = config.model_config.get_mamba_chunk_size()
            self.scan_shape = SSDShape(self.num_heads, self.head_dim, self.n_groups, self.ssm_state_size, chunk)

        def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> None:
            """output[T, H*P] of projected_states[T, gate | x|B|C | dt]: first the requests that decode, then pieces of prompts."""
            metadata = get_forward_context().attn_metadata
            if metadata is None:  # a run that measures memory, before there is a cache
                output.zero_()
                return
            step = metadata[self.prefix]
            _, xbc, dt = projected_states.split([self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size], dim=-1)
            weights = (self.conv1d.weight.squeeze(1), self.conv1d.bias, self.A, self.D, self.dt_bias)
            mixer, pages = replay.Mixer(*weights, self.scan_shape), replay.Pages(*self.kv_cache)
            d, p = step.num_decode_tokens, step.num_prefill_tokens
            if d:
                slots = step.state_indices_tensor_d[:, 0]
                output[:d] = replay.decode(kernels, mixer, pages, slots, step.computed_d, xbc[:d], dt[:d])
            if p:
                slots, prompts = step.state_indices_tensor_p, slice(d, d + p)
                output[prompts] = replay.prefill(kernels, mixer, pages, slots, step.pieces, xbc[prompts], dt[prompts])

        def get_state_shape(self) -> Any:
            return state_shapes(super().get_state_shape(), self.scan_shape.chunk)

        def get_state_dtype(self) -> Any:
            return state_dtypes(super().get_state_dtype())

    return ExactMambaMixer2


def refuse(mixer: Any, config: Any, channels_first: bool) -> None:
    """InputError for what was not verified, by its name."""
    cache = config.cache_config
    unverified = {
        f"a Mamba state in {cache.mamba_ssm_cache_dtype} (mamba_ssm_cache_dtype)": cache.mamba_ssm_cache_dtype != "float32",
        f"a convolution state in {cache.mamba_cache_dtype} (mamba_cache_dtype)": cache.mamba_cache_dtype != "auto",
        f"prefix caching of Mamba layers (mamba_cache_mode {cache.mamba_cache_mode})": cache.mamba_cache_mode != "none",
        "speculative decoding": config.speculative_config is not None,
        "transfer of its cache": config.kv_transfer_config is not None,
        "a Mamba layer in tensor parallelism": mixer.tp_size != 1,
        f"{mixer.activation} after the convolution": mixer.activation != "silu",
        "a Mamba layer without its norm": not mixer.use_rms_norm,
        "convolution states by channel (VLLM_SSM_CONV_STATE_LAYOUT)": channels_first,
    }
    for what in (what for what, found in unverified.items() if found):
        raise InputError("vllm", f"the model runs {what}, which was not verified", "run it otherwise or without MLITE_EXACT=1")


def exact_gated_norm() -> type:
    from vllm.model_executor.layers.mamba.mamba_mixer2 import Mixer2RMSNormGated

    class ExactMixer2RMSNormGated(Mixer2RMSNormGated):
        """vLLM's gated norm by the trainer's function."""

        def forward_cuda(self, x: Tensor, gate: Tensor) -> Tensor:
            return kernels.gated_rms_norm(x, gate, self.weight, self.n_groups, self.variance_epsilon)

        forward_native = forward_cuda

    return ExactMixer2RMSNormGated
