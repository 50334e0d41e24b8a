"""Pooling on the device: the rows of a step instead of sampled tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchweave.engine.runner.parts.base import Device, InStepPart, StepOutput
from torchweave.engine.scheduler.parts.pooled import PooledRows
from torchweave.ops.kernels.sampling.layout import INVALID_TOKEN
from torchweave.ops.slot_state import SlotState


class PooledPart(InStepPart):
    """Checks rows instead of sampling from them, and returns them."""

    name = "pooled"

    @classmethod
    def needed(cls, device: Device) -> bool:
        return device.plan.pooling is not None

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.sample = check_rows
        self.reduce = sum_rows if device.plan.pooling == "mean" else None

    def after(self, payload: PooledRows, output: StepOutput) -> Tensor:
        return self.device.on_host((output.logits[: output.step.num_rows].float(),))[0]

    def collect(self, pending: Tensor) -> np.ndarray:
        return pending.numpy()


def check_rows(rows: Tensor, slots: Tensor, state: SlotState, tokens: Tensor) -> None:
    """Write 0 for each row of rows `[N, size]`, or `INVALID_TOKEN` where it is not finite, instead of `sample`."""
    tokens.copy_(torch.where(rows.isfinite().all(dim=-1), 0, INVALID_TOKEN))


def sum_rows(hidden: Tensor, query_start: Tensor) -> Tensor:
    """The sum of each row's tokens: hidden `[T, size]`, query_start int32 `[R + 1]` -> float32 `[R, size]`."""
    num_rows = len(query_start) - 1
    tokens = torch.arange(len(hidden), dtype=query_start.dtype, device=hidden.device)
    row_of_token = torch.searchsorted(query_start[1:], tokens, right=True)
    sums = hidden.new_zeros(num_rows + 1, hidden.shape[1], dtype=torch.float32)  # the last row: padding
    return sums.index_add_(0, row_of_token, hidden.float())[:num_rows]


PART = PooledPart
