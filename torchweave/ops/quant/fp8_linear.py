"""`torchweave::fp8_linear`: the product of an FP8 activation and an FP8 weight, by the kernel that suits the number of tokens.

The number of tokens is symbolic in the captured graph but known when the op runs, which is when a CUDA graph is recorded: up to
`MAX_TOKENS` tokens the project's kernels read the weight at the memory's speed; above, cuBLAS multiplies (`torch._scaled_mm` with a
scale for each row, `F.scaled_mm` with 1 x 128 by 128 x 128 blocks, which it has on Hopper; elsewhere the dot kernel).

Numerics: products of e4m3 numbers are exact in float32. Sums are float32 in the project's kernels, with partial sums of 128
channels from tensor cores; cuBLAS by rows adds in the tensor cores' own registers (fast accumulation, about 14 bits), as the peers
do. Scales are applied in float32 and the result is rounded once, then the bias added by cuBLAS or before that rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops.quant.fp8 import FP8, GROUP
from torchweave.ops.registry import define

MAX_TOKENS = 32
"""Above this many tokens cuBLAS runs where it can."""
_ALIGNED = 16  # columns and rows of a weight that cuBLAS and 16-byte loads ask for


@dataclass(frozen=True)
class Fp8Config:
    """One way to run the product.

    Attributes:
        kernel: "row" multiplies element by element (1 or 2 tokens), "dot" uses tensor cores (any number).
        block_n, block_k: rows of the weight that a program owns, and how much of them it reads at a time; by blocks, "dot"
            reads 128.
        num_warps: warps of a program.
        depth: iterations in flight: the loop's unrolling for "row", its pipeline stages for "dot".
        block_t: tokens of a program of "dot".
        dependent: start while the kernel before drains (programmatic dependent launch, sm_90).
    """

    kernel: Literal["row", "dot"]
    block_n: int
    block_k: int
    num_warps: int
    depth: int
    block_t: int = 16
    dependent: bool = False

    def run(self, q: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out [T, N] from q [T, K], w [N, K] and scales as `fp8_linear`, all on one GPU, rows contiguous."""
        from torchweave.ops.kernels.quant.fp8_linear import launch_dot, launch_row

        shape: dict[str, Any] = {
            "block_n": self.block_n,
            "block_k": self.block_k,
            "num_warps": self.num_warps,
            "dependent": self.dependent,
        }
        if self.kernel == "row":
            launch_row(q, x_scale, w, w_scale, bias, out, unroll=self.depth, **shape)
        else:
            launch_dot(q, x_scale, w, w_scale, bias, out, stages=self.depth, block_t=self.block_t, **shape)


_ROW = Fp8Config("row", 4, 2048, num_warps=4, depth=2, dependent=True)
_DOT = Fp8Config("dot", 64, 128, num_warps=4, depth=6)
_DOT_FEW_ROWS = Fp8Config("dot", 16, 256, num_warps=4, depth=5)
_GEMM = Fp8Config("dot", 128, 128, num_warps=8, depth=4, block_t=128)


def choose(num_tokens: int, num_outputs: int, width: int, *, blocks: bool, hopper: bool = True) -> Fp8Config | None:
    """How to multiply q [num_tokens, width] by w [num_outputs, width].T on a GPU; None = cuBLAS.

    Args:
        blocks: scales are by 128 x 128 blocks.
        hopper: sm_90, which has dependent launch, and whose cuBLAS has the block-wise product.
    """
    if num_tokens <= 2:
        return replace(_ROW, dependent=hopper)
    if num_tokens <= MAX_TOKENS:
        config = _DOT if num_outputs >= 8192 else _DOT_FEW_ROWS
        return replace(config, block_t=16 if num_tokens <= 16 else 32)
    return _GEMM if blocks and (width % GROUP or not hopper) else None


def _fake(
    q: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    return q.new_empty((*q.shape[:-1], w.shape[0]), dtype=out_dtype)


def _launch(
    q: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    num_outputs, width = w.shape
    rows = q.reshape(-1, width)
    shape = (*q.shape[:-1], num_outputs)
    config = _config(rows, w, w_scale)
    if len(rows) and config is None:
        product = scaled_mm_blocks if w_scale.ndim == 2 else scaled_mm_rows
        return product(rows, x_scale, w, w_scale, bias, out_dtype).view(shape)
    out = q.new_empty(shape, dtype=out_dtype)
    if config is not None:
        config.run(rows, x_scale, w, w_scale, bias, out.view(-1, num_outputs))
    return out


def fp8_linear_into(q: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out `[..., N]`, contiguous, = `torchweave::fp8_linear(q, x_scale, w, w_scale, bias, out.dtype)`."""
    rows, result = q.reshape(-1, w.shape[1]), out.view(-1, w.shape[0])
    config = _config(rows, w, w_scale) if q.is_cuda else None
    if config is not None:
        config.run(rows, x_scale, w, w_scale, bias, result)
    elif q.is_cuda and len(rows) and w_scale.ndim == 1 and bias is None:
        by_token = x_scale.expand(len(rows), 1).contiguous()
        torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            rows, w.t(), by_token, w_scale[None], out_dtype=out.dtype, use_fast_accum=True, out=result
        )
    else:
        out.copy_(torch.ops.torchweave.fp8_linear(q, x_scale, w, w_scale, bias, out.dtype))


def _config(rows: Tensor, w: Tensor, w_scale: Tensor) -> Fp8Config | None:
    """The kernel for rows on a GPU; None: cuBLAS, or there are none."""
    if not len(rows):
        return None
    hopper = torch.cuda.get_device_capability(rows.device)[0] == 9
    return choose(len(rows), *w.shape, blocks=w_scale.ndim == 2, hopper=hopper)


@define("torchweave::fp8_linear", fake=_fake, cuda=_launch)
def fp8_linear(
    q: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """(q * x_scale) @ (w * w_scale).T + bias, in float32 throughout and rounded once.

    Args:
        q: e4m3 `[..., K]`.
        x_scale: float32, `[1]`, `[T, 1]` or `[ceil(K / 128), T]`, as `fp8_quant` gives them.
        w: e4m3 `[N, K]`.
        w_scale: float32, `[N]` (one a row), or `[ceil(N / 128), at least ceil(K / 128)]` (one a block), with which x_scale is
            by group. `block_scales` makes one that cuBLAS can read.
        bias: `[N]` or none.
        out_dtype: of the result `[..., N]`.
    """
    num_outputs, width = w.shape
    x, weight = q.reshape(-1, width).float(), w.float()
    if w_scale.ndim == 2:
        by_row = w_scale.repeat_interleave(GROUP, 0)[:num_outputs]
        groups = zip(x.split(GROUP, 1), weight.split(GROUP, 1), x_scale, by_row.unbind(1), strict=False)
        out = torch.stack([(part @ rows.t()) * (s[:, None] * scale) for part, rows, s, scale in groups]).sum(0)
    else:
        out = (x @ weight.t()) * x_scale * w_scale
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype).view(*q.shape[:-1], num_outputs)


def scaled_mm_rows(
    q: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """cuBLAS with one scale for each row of both operands."""
    by_token = x_scale.expand(q.shape[0], 1).contiguous()
    fused = bias if bias is not None and bias.dtype == out_dtype != torch.float32 else None
    out = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        q, w.t(), by_token, w_scale[None], bias=fused, out_dtype=out_dtype, use_fast_accum=True
    )
    return out if bias is None or bias is fused else out.add_(bias)


def scaled_mm_blocks(
    q: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """cuBLAS with scales by 1 x 128 and 128 x 128 (sm_90): it reads groups of whole 16 bytes, so tokens come in fours."""
    tokens, missing = q.shape[0], -q.shape[0] % 4
    if missing:
        q = F.pad(q.view(torch.uint8), (0, 0, 0, missing)).view(FP8)
        x_scale = F.pad(x_scale, (0, missing))
    out = F.scaled_mm(
        q, w.t(),
        scale_a=x_scale.t(), scale_recipe_a=F.ScalingType.BlockWise1x128,
        scale_b=w_scale.t(), scale_recipe_b=F.ScalingType.BlockWise128x128,
        output_dtype=out_dtype,
    )[:tokens]  # fmt: skip
    return out if bias is None else out + bias


def block_scales(scales: Tensor) -> Tensor:
    """Scales `[N / 128, K / 128]` of a weight with columns of zeros behind them up to a multiple of four, as cuBLAS reads them."""
    return F.pad(scales, (0, -scales.shape[1] % 4)).contiguous()


def supports_weight_shape(num_outputs: int, width: int) -> bool:
    """Whether a weight of that shape can be multiplied: both sizes are multiples of 16."""
    return num_outputs % _ALIGNED == 0 and width % _ALIGNED == 0
