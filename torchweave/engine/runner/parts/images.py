"""Images on the device: offsets of positions for models with several a token (mRoPE), and tokens that see later ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchweave.engine.runner.parts.base import Device, InStepPart
from torchweave.engine.scheduler.parts.images import ImageInputs
from torchweave.ops.speculation import fill_rope_offsets


class ImagesPart(InStepPart):
    """Owns the further inputs of the model: int64 [axes, T] offsets of positions, and int32 [T] lookahead."""

    name = "images"
    needs_logits = False

    @classmethod
    def needed(cls, device: Device) -> bool:
        return device.state.rope_axes > 0 or device.both_ways

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._axes, self._both_ways = device.state.rope_axes, device.both_ways
        self.num_inputs = self._axes + self._both_ways
        max_tokens, place = device.buffers.ids.numel(), device.state.device
        self._offsets = torch.zeros(self._axes * max_tokens, dtype=torch.int64, device=place)
        self._lookahead = torch.zeros(self._both_ways * max_tokens, dtype=torch.int32, device=place)

    def _rope_offsets(self, tokens: int) -> tuple[Tensor, ...]:
        """[axes, tokens], contiguous, or none."""
        return (self._offsets[: self._axes * tokens].view(self._axes, tokens),) if self._axes else ()

    def lookahead(self, tokens: int) -> Tensor | None:
        return self._lookahead[:tokens] if self._both_ways else None

    def pack(self, payload: ImageInputs, out: np.ndarray) -> None:
        if self._axes and payload.rope_offsets is not None:
            out[: self._axes] = payload.rope_offsets
        if self._both_ways and payload.lookahead is not None:
            out[self._axes] = payload.lookahead

    def mixed_inputs(self, packed: Tensor) -> tuple[Tensor, ...]:
        tokens = packed.shape[1]
        if self._both_ways:
            self._lookahead[:tokens].copy_(packed[self._axes])
        rope_offsets = self._rope_offsets(tokens)
        for offsets in rope_offsets:
            offsets.copy_(packed[: self._axes])
        return rope_offsets

    def decode_inputs(self, slots: Tensor) -> tuple[Tensor, ...]:
        rope_offsets = self._rope_offsets(slots.numel())
        for offsets in rope_offsets:
            offsets.copy_(self.device.state.rope_delta[slots.clamp(min=0).long()])
        return rope_offsets

    def draft_inputs(self, slots: Tensor, query_start: Tensor, tokens: int) -> tuple[Tensor, ...]:
        rope_offsets = self._rope_offsets(tokens)
        for offsets in rope_offsets:
            fill_rope_offsets(self.device.state, slots, query_start, offsets)
        return rope_offsets


PART = ImagesPart
