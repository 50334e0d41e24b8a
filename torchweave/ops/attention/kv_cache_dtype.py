"""Number format of keys and values in the paged cache: the model's dtype, or FP8 with one scale a layer.

    cached = fp8(clamp(x / scale, -max, max))    divided in float32, rounded once to nearest even; saturates, NaN stays NaN

Every backend attends to `cached * scale`, for keys of this step as for earlier ones: so a token does not depend on the chunking
of its prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""FP8 dtypes by their names in the option `kv_cache_dtype`."""


def kv_fp8_max(dtype: torch.dtype) -> float:
    """Largest number of an FP8 cache; 0 for a cache in the model's dtype."""
    return torch.finfo(dtype).max if dtype in FP8_DTYPES.values() else 0.0


def quantize_kv(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Keys or values in the cache's `dtype`."""
    largest = kv_fp8_max(dtype)
    return (x.float() / scale).clamp(-largest, largest).to(dtype) if largest else x


def dequantize_kv(cached: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Cached keys or values in the model's `dtype`."""
    return (cached.float() * scale).to(dtype) if kv_fp8_max(cached.dtype) else cached


def as_indexable(cached: Tensor) -> Tensor:
    """A view that torch can index: few of its operations support FP8."""
    return cached.view(torch.uint8) if kv_fp8_max(cached.dtype) else cached
