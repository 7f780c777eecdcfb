"""Assembly: the shared decoder as it is."""

import torch

from lite.primitive.modules.decoder import Decoder, DecoderConfig
from lite.primitive.ops.bridges import Ops


def assemble(config: DecoderConfig, ops: Ops, dtype: torch.dtype) -> Decoder:
    return Decoder(config, ops, dtype)
