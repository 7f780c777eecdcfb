"""The weight table: the shared decoder's, under Hugging Face's usual names."""

from lite.primitive.modules.decoder_hf import DECODER_WEIGHTS

WEIGHTS = DECODER_WEIGHTS
