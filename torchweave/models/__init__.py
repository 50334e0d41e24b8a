"""Hugging Face decoders, loaded unmodified and prepared for capture. No other package imports transformers' models."""

from __future__ import annotations

from torchweave.utils.transformers_import import import_models, postponed

with postponed():
    import_models()  # before any other import of transformers

    from torchweave.models.attention import UnsupportedModel
    from torchweave.models.decoder import DecoderStep
    from torchweave.models.generation import GenerationDefaults
    from torchweave.models.load import LoadedModel, load

__all__ = [
    "DecoderStep",
    "GenerationDefaults",
    "LoadedModel",
    "UnsupportedModel",
    "load",
]
