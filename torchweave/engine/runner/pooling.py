"""Rows of a step that pools, in the place of sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweave.ops.kernels.sampling.layout import INVALID_TOKEN
from torchweave.ops.slot_state import SlotState


def check_rows(rows: Tensor, slots: Tensor, state: SlotState, tokens: Tensor) -> None:
    """Write 0 for each row of rows `[N, size]`, or `INVALID_TOKEN` where it is not finite, in the place of `sample`."""
    tokens.copy_(torch.where(rows.isfinite().all(dim=-1), 0, INVALID_TOKEN))


def sum_rows(hidden: Tensor, query_start: Tensor) -> Tensor:
    """The sum of each row's tokens: hidden `[T, size]`, query_start int32 `[R + 1]` -> float32 `[R, size]`."""
    num_rows = len(query_start) - 1
    tokens = torch.arange(len(hidden), dtype=query_start.dtype, device=hidden.device)
    row_of_token = torch.searchsorted(query_start[1:], tokens, right=True)
    sums = hidden.new_zeros(num_rows + 1, hidden.shape[1], dtype=torch.float32)  # the last row: padding
    return sums.index_add_(0, row_of_token, hidden.float())[:num_rows]
