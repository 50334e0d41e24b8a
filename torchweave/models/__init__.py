"""Hugging Face decoders, loaded unmodified and made ready to be captured. The only room that imports transformers."""

from __future__ import annotations

from torchweave.models.attention import UnsupportedModel
from torchweave.models.decoder import DecoderStep
from torchweave.models.load import GenerationDefaults, LoadedModel, load
from torchweave.models.tokenizer import TextStream, Tokenizer

__all__ = [
    "DecoderStep",
    "GenerationDefaults",
    "LoadedModel",
    "TextStream",
    "Tokenizer",
    "UnsupportedModel",
    "load",
]
