"""Scales of quantized experts, and what packed ones have beside them, as arguments of the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Packing(NamedTuple):
    """What packed weights `[E, N, .]` have beside scales, as `torchweave::int_linear` takes it for one weight.

    Attributes:
        zero: `[E, N, groups]` or None.
        row_scale: `[E, N]` or None.
        group: inputs that share a scale; 0: all.
    """

    zero: Tensor | None = None
    row_scale: Tensor | None = None
    group: int = 0

    def of(self, e: int) -> tuple[Tensor | None, Tensor | None]:
        """Zero points and scales of rows of expert e."""
        return None if self.zero is None else self.zero[e], None if self.row_scale is None else self.row_scale[e]


PLAIN = Packing()


def fp8_scales(weight: Tensor, scales: Tensor | None) -> dict[str, Any]:
    """Arguments of kernels for the scales of an FP8 weight `[E, rows, .]`; GROUPS 0: it has none."""
    if scales is None:
        return {"scales": weight, "scale_rows": 0, "SCALE_BLOCK": 1, "GROUPS": 0}
    by_row = scales.shape[1] == weight.shape[1]
    return {
        "scales": scales, "scale_rows": scales.shape[1], "SCALE_BLOCK": 1 if by_row else 128, "GROUPS": scales.shape[2],
    }  # fmt: skip


def packed_arguments(weight: Tensor, scales: Tensor, packing: Packing, width: int) -> dict[str, Any]:
    """Arguments of kernels for packed weights `[E, rows, .]` of `width` inputs."""
    from torchweave.ops.kernels.dependent_launch import supports_pdl
    from torchweave.ops.kernels.quant.int_linear import format_of, parts_of

    group = packing.group or width
    return {
        "scales": scales, "zeros": scales if packing.zero is None else packing.zero,
        "row_scales": scales if packing.row_scale is None else packing.row_scale,
        "FORMAT": format_of(scales), "GROUP": group, "GROUPS": scales.shape[2], "PARTS": parts_of(scales[0], group),
        "ZERO": packing.zero is not None, "BY_ROW": packing.row_scale is not None,
        "ASSEMBLY": weight.is_cuda and supports_pdl(weight.device),
    }  # fmt: skip
