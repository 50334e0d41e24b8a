"""The forward of an image-text model over the flattened tokens of a step, with rows of images from a pool.

A token id of at least `first_image_id` stands for the row `id - first_image_id` of the pool. One graph serves text and images:
for text, the pool costs one read of a row that is in the GPU's cache.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchweave.models.decoder import DecoderStep, PoolingStep
from torchweave.models.multimodal.support import BOTH_WAYS, decoder_of, text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torchweave.ops.attention.op import LayerSpec
    from torchweave.ops.recurrent.op import RecurrentSpec
    from torchweave.pooling import Pooling

ROPE_AXES = 3
"""Rows of the positions of models that rotate by time, height and width (mRoPE, arXiv 2409.12191)."""


class ImageDecoderStep(DecoderStep):
    """One forward of an unmodified image-text model, without its vision tower.

    Attributes:
        rope_axes: rows of the positions; 0: one position a token.
        both_ways: consecutive image tokens see each other in both directions.
        deepstack_layers: layers that add features of an image of their own (DeepStack, arXiv 2406.04334).
        image_rows: the pool `[R, hidden * (1 + deepstack_layers)]`, written by the encoder between steps.
        first_image_id: the smallest token id that is no token of the vocabulary.
    """

    image_rows: Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        attention_layers: list[LayerSpec],
        vocab_size: int,
        max_model_len: int,
        recurrent_layers: Sequence[RecurrentSpec] = (),
    ) -> None:
        both_ways = model.config.model_type in BOTH_WAYS
        layers = [replace(layer, lookahead=both_ways) for layer in attention_layers]
        super().__init__(model, layers, vocab_size, max_model_len, recurrent_layers)
        self.both_ways = both_ways
        inner: Any = model.model
        embedding: Any = model.get_input_embeddings()
        self.rope_axes = ROPE_AXES if hasattr(inner, "get_rope_index") else 0
        self.deepstack_layers = _hook_deepstack(model)
        self.hidden_size = int(text_config(model).hidden_size)
        self.first_image_id = max(vocab_size, int(embedding.weight.shape[0]))
        self.allocate_image_rows(1)

    def allocate_image_rows(self, num_rows: int) -> None:
        """Make the pool as large as `num_rows`; before capture, since the graph holds its address."""
        weight: Any = self.model.get_input_embeddings().weight  # type: ignore[union-attr]
        width = self.hidden_size * (1 + self.deepstack_layers)
        rows = torch.zeros(num_rows, width, dtype=weight.dtype, device=weight.device)
        self.register_buffer("image_rows", rows, persistent=False)

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_index: Tensor, rope_offsets: Tensor | None = None
    ) -> Any:
        """As `DecoderStep.forward`; rope_offsets int64 `[rope_axes, T]` is what each axis adds to a token's position."""
        return self._logits_and_hidden_states(input_ids, positions, logits_index, rope_offsets)

    def _logits(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, positions: Tensor, logits_index: Tensor, rope_offsets: Tensor | None
    ) -> Tensor:
        model: Any = self.model
        is_image = input_ids >= self.first_image_id
        rows = self.image_rows[(input_ids - self.first_image_id).clamp(min=0)]
        words = model.get_input_embeddings()(torch.where(is_image, 0, input_ids))
        selected, hidden = is_image[:, None], self.hidden_size
        embeds = torch.where(selected, rows[:, :hidden], words)[None]
        position_ids = positions[None] if rope_offsets is None else (positions[None] + rope_offsets)[:, None]
        given = {"inputs_embeds": embeds, "position_ids": position_ids, "use_cache": False}
        if not self.deepstack_layers:
            return model(**given, logits_to_keep=logits_index).logits[0]
        parts = zip(model.model.language_model.layers, rows[:, hidden:].split(hidden, dim=1), strict=False)
        # The hidden states that a pipeline stage receives have the features of earlier layers in them.
        added = [None if hasattr(layer, "is_missing") else torch.where(selected, part, 0) for layer, part in parts]
        output = model.model.language_model(**given, visual_pos_masks=is_image, deepstack_visual_embeds=added)
        return model.lm_head(output.last_hidden_state[:, logits_index])[0]


def make_step(
    model: PreTrainedModel,
    attention_layers: list[LayerSpec],
    vocab_size: int,
    max_model_len: int,
    recurrent_layers: Sequence[RecurrentSpec] = (),
    pooling: Pooling | None = None,
) -> DecoderStep:
    """The engine's forward of a text decoder, of a model that pools (it has no language-model head), or of an image-text model."""
    text_step = DecoderStep if model.get_output_embeddings() is not None else PoolingStep
    step_class = text_step if decoder_of(model) is model else ImageDecoderStep
    step = step_class(model, attention_layers, vocab_size, max_model_len, recurrent_layers)
    step.pooling = pooling
    return step


def _hook_deepstack(model: PreTrainedModel) -> int:
    """Let the decoder add features to all tokens, zeros for text, instead of to those of a mask; returns how many layers do."""
    decoder: Any = decoder_of(model)
    if not hasattr(decoder, "_deepstack_process"):
        return 0
    decoder._deepstack_process = types.MethodType(_add_features, decoder)
    return len(model.config.vision_config.deepstack_visual_indexes)


def _add_features(
    _: nn.Module, hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor | None
) -> Tensor:
    """hidden_states `[1, T, hidden]`, visual_embeds `[T, hidden]`; None after a layer of another pipeline stage."""
    return hidden_states if visual_embeds is None else hidden_states + visual_embeds
