"""Logits processors within steps, on the host: the number of each request, which the device keeps by slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchweave.engine.kv_cache.prefix_index import PrefixHit
from torchweave.engine.request import InferenceRequest
from torchweave.engine.sampling.logits_processors import DeviceLogitsProcessor, of_form
from torchweave.engine.scheduler.parts.base import Host, StepPart, StepRows
from torchweave.engine.scheduler.request_state import RequestState
from torchweave.engine.scheduler.step import Payload


@dataclass(frozen=True)
class ProcessorValues(Payload):
    """Numbers of slots that change before a step.

    Attributes:
        slots: int32 `[n]`.
        values: float32 `[processors, n]`.
    """

    slots: np.ndarray
    values: np.ndarray


class DeviceProcessorsPart(StepPart):
    """Uploads the number of a request where the slot had another one before."""

    name = "device_processors"

    @classmethod
    def needed(cls, host: Host) -> bool:
        return super().needed(host) and bool(of_form(host.resources.logits_processors, DeviceLogitsProcessor))

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._classes = of_form(host.resources.logits_processors, DeviceLogitsProcessor)
        self._values = np.zeros(
            (len(self._classes), host.limits.max_batch_size), np.float32
        )  # as the device will have them
        self._changed: set[int] = set()

    def rejection_reason(self, request: InferenceRequest) -> str:
        try:
            values = self._values_of(request)
        except ValueError as error:
            return str(error)
        if values.any() and request.sampling.beam_width > 1:
            return "A beam search does not support logits processors; leave beam_width or their arguments out."
        return ""

    def start(self, slot: int, state: RequestState, hit: PrefixHit) -> bool:
        values = self._values_of(state.request)
        if (values != self._values[:, slot]).any():
            self._values[:, slot] = values
            self._changed.add(slot)
        return slot in self._changed or bool(values.any())

    def payload(self, rows: StepRows) -> ProcessorValues | None:
        if not self._changed:
            return None
        slots = np.array(sorted(self._changed), np.int32)
        self._changed.clear()
        return ProcessorValues(slots, self._values[:, slots])

    def _values_of(self, request: InferenceRequest) -> np.ndarray:
        return np.array([each.value(request.sampling) for each in self._classes], np.float32)


PART = DeviceProcessorsPart
