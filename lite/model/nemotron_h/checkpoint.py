"""The weight table. A layer's block is its `mixer` in the checkpoint, whatever it is; here MLPs and experts are the layer's `mlp`."""

from collections.abc import Callable

from lite.primitive.ckpt.spec import Skip, Weight, WeightTable
from lite.primitive.modules.decoder import DecoderConfig
from lite.primitive.modules.decoder_hf import qkv_rows
from lite.primitive.modules.mamba2 import Mamba2Config
from lite.primitive.modules.moe import MoEConfig


def _mixer(kind: str) -> Callable[[DecoderConfig, int], bool]:
    return lambda c, layer: c.mixers[layer] == kind


def _mlp(kind: str) -> Callable[[DecoderConfig, int], bool]:
    return lambda c, layer: c.mlps[layer] == kind


def _mamba(flag: Callable[[Mamba2Config], bool]) -> Callable[[DecoderConfig, int], bool]:
    return lambda c, layer: c.mixers[layer] == "mamba" and c.mamba is not None and flag(c.mamba)


def _moe(c: DecoderConfig) -> MoEConfig:
    assert c.moe is not None
    return c.moe


_LAYER = "backbone.layers.{layer}."
_MIXER = _LAYER + "mixer."
_EXPERT = _MIXER + "experts.{expert}."

WEIGHTS: WeightTable = (
    Weight("embed.weight", ("backbone.embeddings.weight",), shard_axis=0),
    Weight("layers.{layer}.mixer_norm.weight", (_LAYER + "norm.weight",), at=lambda c, layer: c.mixers[layer] is not None),
    Weight("layers.{layer}.mlp_norm.weight", (_LAYER + "norm.weight",), at=lambda c, layer: c.mlps[layer] is not None),
    *(
        Weight(f"layers.{{layer}}.mixer.{native}", (_MIXER + hf,), at=_mixer("mamba"), unit_axis=unit_axis)
        for native, hf, unit_axis in (
            ("in_proj.weight", "in_proj.weight", None),
            ("conv_weight", "conv1d.weight", 1),
            ("decay.A_log", "A_log", None),
            ("D", "D", None),
            ("dt_bias", "dt_bias", None),
            ("norm_weight", "norm.weight", None),
            ("out_proj.weight", "out_proj.weight", None),
        )
    ),
    Weight("layers.{layer}.mixer.conv_bias", (_MIXER + "conv1d.bias",), at=_mamba(lambda m: m.conv_bias)),
    Weight("layers.{layer}.mixer.in_proj.bias", (_MIXER + "in_proj.bias",), at=_mamba(lambda m: m.proj_bias)),
    Weight("layers.{layer}.mixer.out_proj.bias", (_MIXER + "out_proj.bias",), at=_mamba(lambda m: m.proj_bias)),
    Weight(
        "layers.{layer}.mixer.qkv.weight",
        tuple(_MIXER + f"{part}_proj.weight" for part in "qkv"),
        rows=qkv_rows,
        at=_mixer("attention"),
        shard_axis=0,
    ),
    Weight("layers.{layer}.mixer.out.weight", (_MIXER + "o_proj.weight",), at=_mixer("attention"), shard_axis=1),
    Weight("layers.{layer}.mlp.up.weight", (_MIXER + "up_proj.weight",), at=_mlp("relu2"), shard_axis=0),
    Weight("layers.{layer}.mlp.down.weight", (_MIXER + "down_proj.weight",), at=_mlp("relu2"), shard_axis=1),
    Weight("layers.{layer}.mlp.router.weight", (_MIXER + "gate.weight",), at=_mlp("moe")),
    Weight("layers.{layer}.mlp.router.bias", (_MIXER + "gate.e_score_correction_bias",), at=_mlp("moe")),
    Weight(
        "layers.{layer}.mlp.experts.w13",
        (_EXPERT + "up_proj.weight",),
        rows=lambda c: (_moe(c).intermediate,),
        experts=lambda c: _moe(c).experts,
        at=_mlp("moe"),
        shard_axis=1,
    ),
    Weight(
        "layers.{layer}.mlp.experts.w2",
        (_EXPERT + "down_proj.weight",),
        rows=lambda c: (c.hidden,),
        experts=lambda c: _moe(c).experts,
        at=_mlp("moe"),
        shard_axis=2,
    ),
    Weight("layers.{layer}.mlp.shared.up.weight", (_MIXER + "shared_experts.up_proj.weight",), at=_mlp("moe"), shard_axis=0),
    Weight("layers.{layer}.mlp.shared.down.weight", (_MIXER + "shared_experts.down_proj.weight",), at=_mlp("moe"), shard_axis=1),
    Weight("norm.weight", ("backbone.norm_f.weight",)),
    Weight("head.weight", ("lm_head.weight",), shard_axis=0),
    Skip("mtp.*", "a block that predicts further tokens, which neither training nor rollout runs"),
)
