"""Constants and buffers of the quantized formats: e4m3 with scales by token or group, and NVFP4."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite number of e4m3fn."""
MIN_AMAX = 1e-10
"""Least amax: a token of zeros (a padded one) has a scale too."""
GROUP = 128
"""Channels of an activation that share a scale, and side of a weight's block, in the block-wise scheme."""
PER_TOKEN = 0
"""`group` of one scale a token."""
BLOCK = 16
"""Channels that share a scale."""


def num_groups(width: int) -> int:
    """Scales of a token in the block-wise scheme."""
    return -(-width // GROUP)


def empty_quantized(x: Tensor, width: int, group: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Room for the q and s of tokens `[..., width]`, as many as x `[..., .]` has.

    Raises:
        ValueError: a scheme that there is not.
    """
    if group not in (PER_TOKEN, GROUP) or (scale is not None and (group != PER_TOKEN or scale.shape != (1,))):
        given = "" if scale is None else f" beside a given scale of shape {list(scale.shape)}"
        raise ValueError(
            f"group {group}{given}: expected 0 (a scale for each token), {GROUP}, or 0 and a scale of shape [1]."
        )
    tokens = math.prod(x.shape[:-1])
    shape = (1,) if scale is not None else (tokens, 1) if group == PER_TOKEN else (num_groups(width), tokens)
    q = torch.empty((*x.shape[:-1], width), dtype=FP8, device=x.device)
    return q, torch.empty(shape, dtype=torch.float32, device=x.device)


def empty_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the q and s of x.

    Raises:
        ValueError: the width is not a multiple of 16.
    """
    width = x.shape[-1]
    if width % BLOCK:
        raise ValueError(
            f"{width} channels cannot be quantised to FP4: a scale is shared by {BLOCK}, expected a multiple."
        )
    q = torch.empty((*x.shape[:-1], width // 2), dtype=torch.uint8, device=x.device)
    return q, torch.empty((*x.shape[:-1], width // BLOCK), dtype=FP8, device=x.device)
