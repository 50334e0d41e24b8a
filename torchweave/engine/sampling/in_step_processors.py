"""Users' logits processors within steps: the objects of a rank, and the numbers of its slots."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweave.config.options import EngineConfig
from torchweave.engine.sampling.logits_processors import DeviceLogitsProcessor, load_processors, of_form


class InStepProcessors:
    """The processors in the order of the option; they are made with the first logits.

    Attributes:
        values: float32 `[slots, 1]` each, what `DeviceLogitsProcessor.value` gave for the request in the slot.
    """

    def __init__(self, config: EngineConfig, num_slots: int, device: torch.device) -> None:
        self._classes = of_form(load_processors(config), DeviceLogitsProcessor)
        self._device = device
        self._processors: list[DeviceLogitsProcessor] = []
        self.values = [torch.zeros(num_slots, 1, device=device) for _ in self._classes]

    def __call__(self, logits: Tensor, slots: Tensor) -> Tensor:
        """Processed logits float32 `[N, V]` of rows whose slots are int32 `[N]`, -1 for padding."""
        if not self._processors:
            self._processors = [each(logits.shape[1], self._device) for each in self._classes]
        logits, index = logits.float(), slots.clamp(min=0).long()
        for processor, values in zip(self._processors, self.values, strict=True):
            logits = processor.apply(logits, values[index])
        return logits
