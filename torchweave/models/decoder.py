"""The engine's interface to a model: flat token ids and positions in, logits or hidden states of selected rows out."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torchweave.ops.attention.op import LayerSpec
    from torchweave.ops.recurrent.op import RecurrentSpec
    from torchweave.pooling import Pooling


def supports_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether the forward has `logits_to_keep` (the rows of logits to compute); many forwards ignore unknown arguments."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


class DecoderStep(nn.Module):
    """One forward of an unmodified `ForCausalLM` over the flattened tokens of a step.

    Attributes:
        attention_layers: KV-cache layout by the attention op's `layer` argument.
        vocab_size: columns of the logits.
        max_model_len: longest sequence in tokens with valid positions.
        recurrent_layers: calls of recurrent ops by their `state` argument.
        rope_axes: rows of `rope_offsets`, a further input of models that take images; 0: no such input.
        pooling: how a `PoolingStep` pools; None for a model that generates.
    """

    rope_axes = 0
    pooling: Pooling | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        attention_layers: list[LayerSpec],
        vocab_size: int,
        max_model_len: int,
        recurrent_layers: Sequence[RecurrentSpec] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.attention_layers = attention_layers
        self.recurrent_layers = tuple(recurrent_layers)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._supports_logits_to_keep = supports_logits_to_keep(model)

    @property
    def num_outputs(self) -> int:
        """Columns of what `forward` returns."""
        return self.vocab_size if self.pooling is None else self.pooling.size

    def forward(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor) -> Tensor:
        """input_ids `[T]` int64, positions `[T]` int64, logits_index `[N]` int64 (rows of T) -> logits `[N, vocab_size]`."""
        given = {"input_ids": input_ids[None], "position_ids": positions[None], "use_cache": False}
        if self._supports_logits_to_keep:
            return self.model(**given, logits_to_keep=logits_index).logits[0]
        return self.model(**given).logits[0][logits_index]


class PoolingStep(DecoderStep):
    """One forward of an unmodified base model, or of a sequence classification model, over the flattened tokens of a step."""

    def forward(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor) -> Tensor:
        """As `DecoderStep.forward` -> hidden states `[N, hidden_size]`, or the head's logits `[N, num_labels]`."""
        base = self.model.base_model
        given = {"input_ids": input_ids[None], "position_ids": positions[None], "use_cache": False}
        hidden = base(**given).last_hidden_state[0][logits_index]
        return hidden if base is self.model else self.model.score(hidden)  # type: ignore[operator]
