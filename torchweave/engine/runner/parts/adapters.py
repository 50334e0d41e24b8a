"""Low-rank adapters on the device: copies of their matrices into adapter slots, and the index of each token."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from torchweave.engine.runner.parts.base import Device, InStepPart
from torchweave.engine.scheduler.parts.adapters import AdapterRows
from torchweave.engine.scheduler.step import Step

Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""The matrices a `[r, K]` and b `[N, r]` of an adapter on this rank, by the name of the linear."""


class AdaptersPart(InStepPart):
    """Owns the adapters in host memory, by number."""

    name = "adapters"
    num_inputs = 1
    needs_logits = False

    @classmethod
    def needed(cls, device: Device) -> bool:
        return device.adapter_slots is not None

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        assert device.adapter_slots is not None
        self.slots = device.adapter_slots
        self.stored: dict[int, Pairs] = {}

    def store(self, number: int, pairs: Pairs) -> list[str]:
        """Keep an adapter in host memory; returns the linears without a place on this rank, whose pairs are left out.

        Raises:
            ValueError: a matrix has another shape than its place.
        """
        kept: dict[str, tuple[Tensor, Tensor]] = {}
        for name, (a, b) in pairs.items():
            place = self.slots.places.get(name)
            if place is None:
                continue
            if a.shape[1] != place.a.shape[2] or b.shape[0] != place.b.shape[1]:
                raise ValueError(
                    f"it is of another model: for {name} it has {a.shape[1]} inputs and {b.shape[0]} outputs, and this model has "
                    f"{place.a.shape[2]} and {place.b.shape[1]}"
                )
            kept[name] = tuple(self._on_host(each, place.a.dtype) for each in (a, b))  # type: ignore[assignment]
        self.stored[number] = kept
        return [name for name in pairs if name not in kept]

    def _on_host(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        held = torch.empty(tensor.shape, dtype=dtype, pin_memory=self.device.stream is not None)
        return held.copy_(tensor)

    def drop(self, numbers: list[int]) -> None:
        """Forget adapters."""
        for number in numbers:
            self.stored.pop(number, None)

    def before(self, payload: AdapterRows, step: Step) -> None:
        for slot, number in payload.loads:
            pairs = self.stored[number]
            for name, place in self.slots.places.items():
                place.a[slot].zero_()
                if name in pairs:
                    a, b = pairs[name]
                    place.a[slot, : len(a)].copy_(a, non_blocking=True)
                    place.b[slot, :, : len(a)].copy_(b, non_blocking=True)

    def pack(self, payload: AdapterRows, out: np.ndarray) -> None:
        if payload.tokens is not None:
            out[0] = payload.tokens

    def mixed_inputs(self, packed: Tensor) -> tuple[Tensor, ...]:
        self.slots.index[: packed.shape[1]].copy_(packed[0])
        return ()

    def decode_inputs(self, slots: Tensor) -> tuple[Tensor, ...]:
        self.slots.index[: slots.numel()].copy_(self._of(slots))
        return ()

    def draft_inputs(self, slots: Tensor, query_start: Tensor, tokens: int) -> tuple[Tensor, ...]:
        at = torch.arange(tokens, dtype=query_start.dtype, device=query_start.device)
        rows = torch.searchsorted(query_start[1:], at, right=True)
        last = slots.numel() - 1
        self.slots.index[:tokens].copy_(torch.where(rows > last, 0, self._of(slots)[rows.clamp(max=last)]))
        return ()

    def _of(self, slots: Tensor) -> Tensor:
        """The index of each slot's adapter, 0 for padding."""
        return torch.where(slots < 0, 0, self.device.state.adapter[slots.clamp(min=0).long()])


PART = AdaptersPart
