"""The shared decoder skeleton: embedding, layers around one residual stream, final norm, head.

A layer is a mixer of the sequence (attention, Mamba-2), an MLP (or a mixture of experts), or the one after the other. A family's folder
fills in a `DecoderConfig`; nothing here knows a family.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lite.errors import InputError
from lite.primitive.kernels.probe import ModelShapes
from lite.primitive.modules.attention import GQAttention
from lite.primitive.modules.context import SequenceContext
from lite.primitive.modules.head import LMHead, TokenScores
from lite.primitive.modules.linear import Embedding, Linear
from lite.primitive.modules.mamba2 import Mamba2Config, Mamba2Mixer
from lite.primitive.modules.mlp import MLP, GatedMLP
from lite.primitive.modules.moe import MoE, MoEConfig
from lite.primitive.modules.norm import RMSNorm
from lite.primitive.modules.rotary import RotaryConfig, cos_sin_table
from lite.primitive.ops.bridges import Ops

MixerKind = Literal["attention", "mamba"]
MLPKind = Literal["gated", "relu2", "moe"]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """mixers, mlps: what each layer has, None where it has none. rotary None: attention knows no positions."""

    vocab_size: int
    hidden: int
    intermediate: int
    mixers: tuple[MixerKind | None, ...]
    mlps: tuple[MLPKind | None, ...]
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int  # the longest sequence, prompt and response together
    rotary: RotaryConfig | None
    tied_head: bool
    moe: MoEConfig | None = None
    mamba: Mamba2Config | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    padded_vocab_size: int | None = None  # rows of the embedding and head tables, where they are padded

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise InputError("config.json", f"{self.heads} query heads cannot share {self.kv_heads} key heads", "correct one of them")

    @property
    def layers(self) -> int:
        return len(self.mixers)


def build_mixer(kind: MixerKind, layer: int, c: DecoderConfig, ops: Ops, dtype: torch.dtype) -> nn.Module:
    if kind == "mamba":
        assert c.mamba is not None
        return Mamba2Mixer(layer, c.hidden, c.mamba, c.norm_eps, ops, dtype)
    return GQAttention(
        layer, c.hidden, c.heads, c.kv_heads, c.head_dim, ops, dtype,
        qkv_bias=c.qkv_bias, out_bias=c.out_bias, qk_norm_eps=c.norm_eps if c.qk_norm else None,
    )  # fmt: skip


def build_mlp(kind: MLPKind, c: DecoderConfig, ops: Ops, dtype: torch.dtype) -> nn.Module:
    if kind == "moe":
        assert c.moe is not None
        return MoE(c.hidden, c.moe, ops, dtype)
    if kind == "relu2":
        return MLP(c.hidden, c.intermediate, ops, dtype)
    return GatedMLP(c.hidden, c.intermediate, ops, dtype, bias=c.mlp_bias)


class DecoderLayer(nn.Module):
    def __init__(self, layer: int, config: DecoderConfig, ops: Ops, dtype: torch.dtype):
        super().__init__()
        c = config
        self.mixer: nn.Module | None = None
        self.mlp: nn.Module | None = None
        if (mixer := c.mixers[layer]) is not None:
            self.mixer_norm = RMSNorm(c.hidden, c.norm_eps, ops, dtype)
            self.mixer = build_mixer(mixer, layer, c, ops, dtype)
        if (mlp := c.mlps[layer]) is not None:
            self.mlp_norm = RMSNorm(c.hidden, c.norm_eps, ops, dtype)
            self.mlp = build_mlp(mlp, c, ops, dtype)

    def forward(
        self, x: Tensor, residual: Tensor | None, context: SequenceContext, cos_sin: Tensor | None, routes: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x[T, H] is what the previous layer adds to the residual stream (the embedding, for the first). -> the same for the next.
        routes[T, k]: see `MoE`; without meaning where the layer has no experts."""
        if self.mixer is not None:
            x, residual = self.mixer_norm.add(x, residual)
            x = self.mixer(x, context, cos_sin)
        if self.mlp is not None:
            x, residual = self.mlp_norm.add(x, residual)
            x = self.mlp(x, routes) if isinstance(self.mlp, MoE) else self.mlp(x)
        assert residual is not None
        return x, residual


class Decoder(nn.Module):
    """Parameters are the deployed image of the weights: what inference reads, in the model dtype; the optimizer keeps the masters."""

    cos_sin: Tensor | None

    def __init__(self, config: DecoderConfig, ops: Ops, dtype: torch.dtype):
        super().__init__()
        c = self.config = config
        rows = c.padded_vocab_size or c.vocab_size
        self.embed = Embedding(rows, c.hidden, ops, dtype)
        self.layers = nn.ModuleList(DecoderLayer(i, c, ops, dtype) for i in range(c.layers))
        self.norm = RMSNorm(c.hidden, c.norm_eps, ops, dtype)
        head = self.embed.weight if c.tied_head else nn.Parameter(torch.empty(rows, c.hidden, dtype=dtype))
        self.head = LMHead(head, c.vocab_size, ops)
        self.register_buffer("cos_sin", cos_sin_table(c.rotary, dtype) if c.rotary else None, persistent=False)

    def routers(self) -> list[nn.Module]:
        return [m.router for m in self.modules() if isinstance(m, MoE)]

    def probe_shapes(self) -> ModelShapes:
        """The shapes at which this model calls its kernels."""
        c = self.config
        linears = {(m.weight.shape[0], m.weight.shape[1]) for m in self.modules() if isinstance(m, Linear)}
        norms = {m.weight.shape[0] for m in self.modules() if isinstance(m, RMSNorm)}
        return ModelShapes(
            linears=tuple(sorted(linears)),
            norms=tuple(sorted(norms)),
            attention=(c.heads, c.kv_heads, c.head_dim) if "attention" in c.mixers else None,
            swiglu=(c.intermediate,) if "gated" in c.mlps else (),
            head=(c.vocab_size, c.hidden),
            mamba=(c.mamba.shape, c.mamba.conv_width, c.mamba.shape.groups) if c.mamba else None,
            moe=(c.moe.experts, c.moe.k, c.hidden, c.moe.intermediate, c.moe.activation) if c.moe else None,
            relu2=tuple(sorted({m.up.weight.shape[0] for m in self.modules() if isinstance(m, MLP)})),
        )

    def hidden(self, input_ids: Tensor, context: SequenceContext, routes: Tensor | None = None) -> Tensor:
        """input_ids[T] -> normalised hidden states [T, H]. routes[T, L, k]: layer i takes routes[:, i] (see `MoE`)."""
        x, residual = self.embed(input_ids), None
        for i, layer in enumerate(self.layers):
            x, residual = layer(x, residual, context, self.cos_sin, None if routes is None else routes[:, i])
        assert residual is not None
        return self.norm.add(x, residual)[0]

    def forward(
        self,
        input_ids: Tensor,
        context: SequenceContext,
        labels: Tensor,
        temperature: Tensor,
        scored_rows: Tensor | None = None,
        with_entropy: bool = True,
        routes: Tensor | None = None,
    ) -> TokenScores:
        """Scores of labels[T] under temperature[T], [T] each.

        scored_rows (int64): only these rows go through the head, the others are 0; a row's bytes do not depend on it. routes: see `hidden`.
        """
        hidden = self.hidden(input_ids, context, routes)
        if scored_rows is None:
            return self.head(hidden, labels, temperature, with_entropy)
        scores = self.head(hidden[scored_rows], labels[scored_rows], temperature[scored_rows], with_entropy)
        zeros = torch.zeros(input_ids.shape, dtype=torch.float32, device=hidden.device)
        return TokenScores(zeros.index_copy(0, scored_rows, scores.logprob), zeros.index_copy(0, scored_rows, scores.entropy))
