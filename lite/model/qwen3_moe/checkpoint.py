"""The weight table: the shared decoder's, and the experts, one tensor each in the checkpoint and stacked here."""

from lite.primitive.ckpt.spec import Weight, WeightTable
from lite.primitive.modules.decoder import DecoderConfig
from lite.primitive.modules.decoder_hf import DECODER_WEIGHTS
from lite.primitive.modules.moe import MoEConfig


def _sparse(c: DecoderConfig, layer: int) -> bool:
    return c.mlps[layer] == "moe"


def _moe(c: DecoderConfig) -> MoEConfig:
    assert c.moe is not None
    return c.moe


_MLP = "model.layers.{layer}.mlp."
_EXPERT = _MLP + "experts.{expert}."

WEIGHTS: WeightTable = (
    *DECODER_WEIGHTS,
    Weight("layers.{layer}.mlp.router.weight", (_MLP + "gate.weight",), at=_sparse),
    Weight(
        "layers.{layer}.mlp.experts.w13",
        (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"),
        rows=lambda c: (_moe(c).intermediate,) * 2,
        experts=lambda c: _moe(c).experts,
        at=_sparse,
        shard_axis=1,
    ),
    Weight(
        "layers.{layer}.mlp.experts.w2",
        (_EXPERT + "down_proj.weight",),
        rows=lambda c: (c.hidden,),
        experts=lambda c: _moe(c).experts,
        at=_sparse,
        shard_axis=2,
    ),
)
