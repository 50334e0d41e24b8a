"""The interface of draft heads: layers that draft from a model's own hidden states."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from torchweave.models.decoder import DecoderStep


class DraftHead(DecoderStep):
    """A draft head over the flattened tokens of a step.

    Its first attention layer is that of the KV cache, the second keeps the model's hidden states.
    """

    @abstractmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, positions: Tensor, logits_index: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits `[N, V]` and hidden states `[N, H]` at logits_index.

        Args:
            input_ids: int64 `[T]`, the token after each position.
            positions: int64 `[T]`.
            logits_index: int64 `[N]`.
            hidden: `[T, H]`, hidden states of the model at these positions, or the head's own.
        """
