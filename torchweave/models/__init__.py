"""Hugging Face decoders, loaded unmodified and made ready to be captured. The only room that imports transformers' models."""

from __future__ import annotations

from torchweave.models.listing import import_models

import_models()  # before anything else of transformers is imported

from torchweave.models.attention import UnsupportedModel  # noqa: E402
from torchweave.models.decoder import DecoderStep  # noqa: E402
from torchweave.models.load import GenerationDefaults, LoadedModel, load  # noqa: E402

__all__ = [
    "DecoderStep",
    "GenerationDefaults",
    "LoadedModel",
    "UnsupportedModel",
    "load",
]
