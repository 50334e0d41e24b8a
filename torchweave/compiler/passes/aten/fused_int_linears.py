"""Fuse the RMSNorm before a product with weights in 4 bits, and the gate or the residual add behind it, into the product.

Before                                                       After
    y = torchweave.rms_norm(h, norm, eps, ...)                   a = torchweave.fused_int_linear(h, W, S, Z, ..., norm, eps, ...,
    gate_up = torchweave.int_linear(y, W, S, Z, ...)                 None, "silu")
    a = torchweave.gated_activation(gate_up, "silu")             h = torchweave.fused_int_linear(a, V, ..., residual, None)
    h = aten.add(residual, torchweave.int_linear(a, V, ...))

Runs beside `fused_linears`, which does the same for weights in 16 bits.

When      the kernel for rows multiplies by W (integers in 4 bits with or without zero points), which is a parameter; nothing else
          reads the intermediate results; the add has no alpha and does not broadcast or widen; tokens lie in one dimension. The
          norm of a sum that no product computes (Gemma 2's) stays: `add_rms_norm` makes one launch of both. A product takes a gate
          or a residual, not both.
Numerics  exact: same roundings; only the summation order differs.
Pays      not on an H100: a layer of Llama 8B in int4 takes 57.1 us at one token and 87.6 at two, 54.5 and 79.5 with separate ops
          (bench/kernels/linear.py --weights int4 --fused), so the pass is off unless a measurement or the config enables it. Above
          two tokens products run on tensor cores, and a residual add apart from the norm behind it would cost a launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from torchweave.compiler.ir.symbols import value
from torchweave.compiler.passes.aten.fused_linears import FusableLinear, LinearFusionPass, aten
from torchweave.compiler.passes.base import Mismatch
from torchweave.ops.quant.int_linear import ROW_KERNEL_MAX_TOKENS, bits_of, fuses

_LINEAR, _FUSED = torch.ops.torchweave.int_linear.default, torch.ops.torchweave.fused_int_linear.default


class FusedIntLinears(LinearFusionPass):
    """See the module's text."""

    name = "fused_int_linears"
    gated = True
    token_range: tuple[int | None, int | None] = (1, ROW_KERNEL_MAX_TOKENS)

    def operands(self, node: fx.Node) -> tuple[Any, ...]:
        if node.target is not _LINEAR:
            return ()
        found = self.bind(node, "x", "w", "scale", "zero", "order", "bias", "group", row_scale=None)
        x, *weight, group, row_scale = found
        if any(each is not None and each.op != "placeholder" for each in (*weight, row_scale)):
            raise Mismatch("its weight, scale or bias is computed, not a parameter")
        w, scale = value(weight[0]), value(weight[1])
        assert isinstance(w, Tensor), "a parameter is a tensor"
        if not fuses(w.shape[0], value(x).shape[-1], group, w, scale, value(x).dtype):
            what = f"{bits_of(w)} bits with scales in {scale.dtype} and groups of {group} inputs of {value(x).dtype}"
            raise Mismatch(f"for a weight of {what} the op has no kernel that fuses")
        return found

    def fused_call(self, operands: tuple[Any, ...], around: FusableLinear) -> tuple[Any, tuple[Any, ...]]:
        return _FUSED, (around.x, *operands[1:], *around.arguments)

    def prologue_norm(self, x: fx.Node) -> tuple[tuple[Any, ...] | None, str | None]:
        norm, why = super().prologue_norm(x)
        if norm is not None and norm[0].target is aten.add.Tensor:
            return None, "its norm is that of a sum, which `add_rms_norm` fuses"
        return norm, why
