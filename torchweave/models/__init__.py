"""Hugging Face decoders, loaded unmodified and made ready to be captured. The only room that imports transformers' models."""

from __future__ import annotations

from torchweave.models.lazy_imports import postponed
from torchweave.models.model_listing import import_models

with postponed():
    import_models()  # before anything else of transformers is imported

    from torchweave.models.attention import UnsupportedModel
    from torchweave.models.decoder import DecoderStep
    from torchweave.models.load import GenerationDefaults, LoadedModel, load

__all__ = [
    "DecoderStep",
    "GenerationDefaults",
    "LoadedModel",
    "UnsupportedModel",
    "load",
]
