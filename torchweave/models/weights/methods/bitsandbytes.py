"""bitsandbytes: `load_in_4bit` (NF4 or FP4, a scale per block, often quantized again) and `load_in_8bit` (LLM.int8()).

4 bits: `X.weight` uint8 `[N K / 2, 1]`, the first of two numbers in the upper bits, codes of `X.weight.quant_map`;
`X.weight.absmax`, a scale per block of the flattened weight; with double quantization its codes of `X.weight.nested_quant_map`,
times `X.weight.nested_absmax`, plus an offset; `X.weight.quant_state.bitsandbytes__nf4` (or fp4), a JSON text with shape, block
sizes and offset. 8 bits: `X.weight` int8 `[N, K]`, and `X.SCB` `[N]`, the largest magnitude of a row. Activations keep 16 bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchweave.models.weights.formats import QuantizationFormat, StoredFormat, unsupported
from torchweave.models.weights.methods.dequantized import DequantizedFormat, DequantizedScheme, Parts

_STATE = "weight.quant_state.bitsandbytes__"
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


def _read_state(state: Tensor) -> dict[str, Any]:
    try:
        content = json.loads(bytes(state.cpu().tolist()).decode())
        shape, size = content["shape"], content["blocksize"]
        if len(shape) == 2 and all(isinstance(each, int) and each > 0 for each in (*shape, size)):
            return content
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(
        "This checkpoint has a quant_state of bitsandbytes that is no such state; copy or download it again."
    )


def _state_of(parts: Mapping[str, Any]) -> Any:
    return next((part for ending, part in parts.items() if ending.startswith(_STATE)), None)


def _shape_4bit(parts: Parts) -> tuple[int, ...] | None:
    state = _state_of(parts)
    return None if state is None else tuple(_read_state(state.read())["shape"])


def _dequantize_4bit(parts: Mapping[str, Tensor]) -> Tensor:
    """The weight `[N, K]` in float32."""
    state = _read_state(_state_of(parts))
    absmax = parts["weight.absmax"]
    if absmax.dtype == torch.uint8:
        codes, size = parts["weight.nested_quant_map"].float(), state["nested_blocksize"]
        scales = parts["weight.nested_absmax"].float().repeat_interleave(size)[: absmax.numel()]
        absmax = codes[absmax.int()] * scales + state["nested_offset"]
    packed = parts["weight"].flatten()
    numbers = torch.stack((packed >> 4, packed & 15), 1).flatten().int()
    rows, width = state["shape"]
    values = parts["weight.quant_map"].float()[numbers[: rows * width]]
    return (values * absmax.float().repeat_interleave(state["blocksize"])[: rows * width]).view(rows, width)


def _shape_8bit(parts: Parts) -> tuple[int, ...] | None:
    return parts["weight"].shape if parts["weight"].dtype == "I8" and "SCB" in parts else None


def _dequantize_8bit(parts: Mapping[str, Tensor]) -> Tensor:
    return parts["weight"].float() * (parts["SCB"].float() / 127)[:, None]


_INT8 = DequantizedFormat(
    DequantizedScheme("bitsandbytes_int8"), ("weight", "SCB", "weight_format"), _shape_8bit, _dequantize_8bit
)


def _read(config: Mapping[str, Any]) -> StoredFormat:
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return _INT8
    kind = config.get("bnb_4bit_quant_type", "fp4")
    if not (config.get("load_in_4bit") or config.get("_load_in_4bit")) or kind not in ("nf4", "fp4"):
        raise unsupported(f"by bitsandbytes neither to nf4, fp4 nor int8 ({kind})")
    endings = ("weight", "weight.absmax", "weight.quant_map", *_NESTED, f"{_STATE}{kind}")
    return DequantizedFormat(DequantizedScheme(f"bitsandbytes_{kind}"), endings, _shape_4bit, _dequantize_4bit)


BITSANDBYTES = QuantizationFormat(_read)
