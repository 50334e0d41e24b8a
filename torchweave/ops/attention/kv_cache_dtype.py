"""The numbers in which the paged cache keeps keys and values: those of the model, or FP8 with one scale a layer.

    kept = fp8(clamp(x / scale, -max, max))      divided in float32, rounded once to nearest even; saturates, NaN stays NaN

Attention is that over `cached * scale`, whoever carries it out and whether a key came with this step or an earlier one: so a
token does not depend on how its prompt was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""By the names that `kv_cache_dtype` has for them."""


def kv_fp8_max(dtype: torch.dtype) -> float:
    """Largest number of an FP8 cache; 0 for a cache that keeps the model's own numbers."""
    return torch.finfo(dtype).max if dtype in FP8_DTYPES.values() else 0.0


def quantize_kv(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Keys or values as a cache of `dtype` keeps them."""
    largest = kv_fp8_max(dtype)
    return (x.float() / scale).clamp(-largest, largest).to(dtype) if largest else x


def dequantize_kv(cached: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """What kept keys or values stand for, in the model's `dtype`."""
    return (cached.float() * scale).to(dtype) if kv_fp8_max(cached.dtype) else cached


def as_indexable(cached: Tensor) -> Tensor:
    """The same memory as numbers that torch can index: it knows few operations on FP8."""
    return cached.view(torch.uint8) if kv_fp8_max(cached.dtype) else cached
