"""Triton kernels for `x @ w.T` with few tokens: the weight is read once, and its bandwidth is the limit.

Each may normalize x at its input (RMSNorm) and multiply it, multiply its output by a number or by one for each column, add a
residual to its output, or gate half of it by the other half. They round where the separate operations round.

Each supports programmatic dependent launch (`dependent_launch.py`): it then starts while the previous kernel runs, the row
kernel with loads of its first weights.
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.activation import activate
from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_prefetch, pdl_trigger, pdl_wait, supports_pdl
from torchweave.ops.kernels.norm import scale_rows
from torchweave.ops.kernels.sizes import cdiv
from torchweave.ops.kernels.words import halves, load_words
from torchweave.ops.linear_config import LinearConfig, LinearFusion


@triton.jit
def _weight_rows(num_outputs, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Rows of w of this program, `[BLOCK_N]`, and whether each exists.

    GATED: the first half are gates, the second half the rows that they gate, `num_outputs` further down.
    """
    index = tl.arange(0, BLOCK_N)
    if GATED:
        half: tl.constexpr = BLOCK_N // 2
        output = tl.program_id(0) * half + index % half
        return output + index // half * num_outputs, output < num_outputs
    else:  # noqa: RET505 (Triton compiles only the branch that is taken when there are two)
        output = tl.program_id(0) * BLOCK_N + index
        return output, output < num_outputs


@triton.jit
def _inverse_rms(x, eps, real, WIDTH: tl.constexpr):
    """`rsqrt(mean(x ** 2) + eps)` of one token, if it is real: a float32 scalar."""
    word = tl.arange(0, 512)
    squares = tl.zeros([512], tl.float32)
    for start in range(0, WIDTH // 2, 512):
        words = load_words(x, start + word, real & (start + word < WIDTH // 2), "")
        even, odd = halves(words, x.dtype.element_ty)
        squares += even * even + odd * odd
    return tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)


@triton.jit
def _inverse_rms_of_all(x, num_tokens, x_stride, eps, WIDTH: tl.constexpr, TOKENS: tl.constexpr):
    """`_inverse_rms` of each token, `[TOKENS]`."""
    block: tl.constexpr = 512 if TOKENS <= 8 else 256
    token, k = tl.arange(0, TOKENS), tl.arange(0, block)
    squares = tl.zeros([TOKENS, block], tl.float32)
    for start in range(0, WIDTH, block):
        real = (token < num_tokens)[:, None] & (start + k < WIDTH)[None, :]
        value = tl.load(x + token[:, None] * x_stride + start + k[None, :], mask=real, other=0.0).to(tl.float32)
        squares += value * value
    return tl.rsqrt(tl.sum(squares, 1) / WIDTH + eps)


@triton.jit
def _multipliers(factors, factor, factor_begin, factor_end, rows, inside, SCALE: tl.constexpr):
    """What the products of this program's rows are multiplied by, `[BLOCK_N]`; unread without SCALE. Loaded ahead of the weights,
    so that the epilogue does not wait for memory."""
    if SCALE == "columns":
        return tl.load(factors + rows, mask=inside, other=0.0).to(tl.float32)
    else:  # noqa: RET505 (Triton compiles only the branch that is taken when there are two)
        return tl.where((rows >= factor_begin) & (rows < factor_end), factor, 1.0)


@triton.jit
def _epilogue(
    total, multipliers, bias, addend, residual, out, rows, inside, num_tokens, num_outputs, residual_stride, out_stride,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr,
    ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Store float32 products `total [BLOCK_N, TOKENS]` after bias, multipliers, gate, and ADD residuals, rounding as the separate
    operations do."""
    pdl_trigger(DEPENDENT)
    dtype = out.dtype.element_ty
    token = tl.arange(0, TOKENS)
    if BIAS:
        total += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    value = total.to(dtype).to(tl.float32)
    if SCALE is not None:
        value = (value * multipliers[:, None]).to(dtype).to(tl.float32)
    output = rows
    if ACTIVATION is not None:
        half: tl.constexpr = BLOCK_N // 2
        gate, up = tl.split(tl.permute(tl.reshape(value, [2, half, TOKENS]), [1, 2, 0]))
        value = (activate(gate, ACTIVATION).to(dtype).to(tl.float32) * up).to(dtype).to(tl.float32)
        output = tl.program_id(0) * half + tl.arange(0, half)
        inside = output < num_outputs
    mask = inside[:, None] & (token < num_tokens)[None, :]
    place = token[None, :] * residual_stride + output[:, None]
    if ADD == 2:
        value += tl.load(addend + place, mask=mask, other=0.0).to(tl.float32)
        value = value.to(dtype).to(tl.float32)
    if ADD:
        value += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token[None, :].to(tl.int64) * out_stride + output[:, None], value.to(dtype), mask=mask)


@triton.jit
def _norm_weights(norm, here, inside):
    """The float32 weights of the norm in the even and the odd columns of the words at `here`."""
    if norm.dtype.element_ty.primitive_bitwidth == 16:
        return halves(load_words(norm, here, inside, ""), norm.dtype.element_ty)
    else:  # noqa: RET505 (Triton compiles only the branch that is taken when there are two)
        even = tl.load(norm + 2 * here, mask=inside, other=0.0)
        return even, tl.load(norm + 2 * here + 1, mask=inside, other=0.0)


@triton.jit
def _row_total(
    total, even, odd, x, norm, scale, offset, input_factor, here, real,
    WIDTH: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, SCALE_INPUT: tl.constexpr,
):  # fmt: skip
    """`total [BLOCK_N, words]` plus the even and odd columns of a tile of the weight times those of one token, words `here`."""
    inside = here < WIDTH // 2
    dtype: tl.constexpr = x.dtype.element_ty
    left, right = halves(load_words(x, here, real & inside, ""), dtype)
    if NORM:
        left_weight, right_weight = _norm_weights(norm, here, inside)
        left = scale_rows(left, scale, left_weight, offset, True, WIDE, dtype)
        right = scale_rows(right, scale, right_weight, offset, True, WIDE, dtype)
    if SCALE_INPUT:
        left = (left * input_factor).to(dtype).to(tl.float32)
        right = (right * input_factor).to(dtype).to(tl.float32)
    return total + even * left[None, :] + odd * right[None, :]


@triton.jit(do_not_specialize=["num_tokens", "factor_begin", "factor_end"])
def row_kernel(
    x, w, bias, norm, factors, addend, residual, out, num_tokens, num_outputs, eps, offset, input_factor, factor, factor_begin,
    factor_end, x_stride, w_stride, residual_stride, out_stride,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr,
    ACTIVATION: tl.constexpr, SCALE_INPUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Up to four tokens: a program multiplies BLOCK_N whole rows of w by x, element by element in float32.

    Tiles stay words of two elements until they are multiplied (`words.py`).
    """
    rows, inside = _weight_rows(num_outputs, BLOCK_N, ACTIVATION is not None)
    WORDS: tl.constexpr = WIDTH // 2
    BLOCK_W: tl.constexpr = BLOCK_K // 2
    word = tl.arange(0, BLOCK_W)
    weights = w + rows.to(tl.int64) * w_stride
    tile = load_words(weights[:, None], word[None, :], inside[:, None] & (word < WORDS)[None, :], "evict_first")
    if NORM:
        LINES: tl.constexpr = (BLOCK_K + 63) // 64
        if tl.program_id(0) == 0:
            for start in tl.static_range(0, WIDTH, BLOCK_K):
                pdl_prefetch(norm + tl.minimum(start + tl.arange(0, LINES) * 64, WIDTH - 1), DEPENDENT)
    pdl_wait(DEPENDENT)
    multipliers = _multipliers(factors, factor, factor_begin, factor_end, rows, inside, SCALE)
    scale0 = _inverse_rms(x, eps, num_tokens > 0, WIDTH) if NORM else 0.0
    scale1 = _inverse_rms(x + x_stride, eps, num_tokens > 1, WIDTH) if NORM and TOKENS > 1 else 0.0
    scale2 = _inverse_rms(x + 2 * x_stride, eps, num_tokens > 2, WIDTH) if NORM and TOKENS > 2 else 0.0
    scale3 = _inverse_rms(x + 3 * x_stride, eps, num_tokens > 3, WIDTH) if NORM and TOKENS > 2 else 0.0
    sum0 = tl.zeros([BLOCK_N, BLOCK_W], tl.float32)
    sum1 = tl.zeros([BLOCK_N, BLOCK_W] if TOKENS > 1 else [1, 1], tl.float32)
    sum2 = tl.zeros([BLOCK_N, BLOCK_W] if TOKENS > 2 else [1, 1], tl.float32)
    sum3 = tl.zeros([BLOCK_N, BLOCK_W] if TOKENS > 2 else [1, 1], tl.float32)
    for start in tl.range(0, WORDS, BLOCK_W, loop_unroll_factor=UNROLL):
        here = start + word
        next_word = here + BLOCK_W
        in_next_tile = inside[:, None] & (next_word < WORDS)[None, :]
        following = load_words(weights[:, None], next_word[None, :], in_next_tile, "evict_first")
        even, odd = halves(tile, w.dtype.element_ty)
        sum0 = _row_total(
            sum0, even, odd, x, norm, scale0, offset, input_factor, here, True, WIDTH, NORM, WIDE, SCALE_INPUT
        )
        if TOKENS > 1:
            sum1 = _row_total(
                sum1, even, odd, x + x_stride, norm, scale1, offset, input_factor, here, num_tokens > 1,
                WIDTH, NORM, WIDE, SCALE_INPUT,
            )  # fmt: skip
        if TOKENS > 2:
            sum2 = _row_total(
                sum2, even, odd, x + 2 * x_stride, norm, scale2, offset, input_factor, here, num_tokens > 2,
                WIDTH, NORM, WIDE, SCALE_INPUT,
            )  # fmt: skip
            sum3 = _row_total(
                sum3, even, odd, x + 3 * x_stride, norm, scale3, offset, input_factor, here, num_tokens > 3,
                WIDTH, NORM, WIDE, SCALE_INPUT,
            )  # fmt: skip
        tile = following
    total = tl.sum(sum0, 1)[:, None]
    if TOKENS == 2:
        total = tl.join(tl.sum(sum0, 1), tl.sum(sum1, 1))
    if TOKENS == 4:
        even, odd = tl.join(tl.sum(sum0, 1), tl.sum(sum2, 1)), tl.join(tl.sum(sum1, 1), tl.sum(sum3, 1))
        total = tl.reshape(tl.join(even, odd), [BLOCK_N, TOKENS])
    _epilogue(
        total, multipliers, bias, addend, residual, out, rows, inside, num_tokens, num_outputs, residual_stride, out_stride,
        TOKENS, BLOCK_N, BIAS, SCALE, ADD, ACTIVATION, DEPENDENT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "factor_begin", "factor_end"])
def dot_kernel(
    x, w, bias, norm, factors, addend, residual, out, num_tokens, num_outputs, eps, offset, input_factor, factor, factor_begin,
    factor_end, x_stride, w_stride, residual_stride, out_stride,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr,
    ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """On tensor cores, with the rows of w as the long side: w [BLOCK_N, K] times x.T [K, TOKENS]."""
    rows, inside = _weight_rows(num_outputs, BLOCK_N, ACTIVATION is not None)
    token, k = tl.arange(0, TOKENS), tl.arange(0, BLOCK_K)
    real = (token < num_tokens)[None, :]
    first = w + rows.to(tl.int64) * w_stride
    weights = first[:, None] + k[None, :]
    inputs = x + token[None, :] * x_stride + k[:, None]
    pdl_wait(DEPENDENT)
    multipliers = _multipliers(factors, factor, factor_begin, factor_end, rows, inside, SCALE)
    if NORM:
        scale = _inverse_rms_of_all(x, num_tokens, x_stride, eps, WIDTH, TOKENS)[None, :]
    total = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        left = k < WIDTH - start
        a = tl.load(weights + start, mask=inside[:, None] & left[None, :], other=0.0, eviction_policy="evict_first")
        b = tl.load(inputs + start, mask=left[:, None] & real, other=0.0)
        if NORM:
            weight = tl.load(norm + start + k, mask=left, other=0.0)[:, None]
            b = scale_rows(b.to(tl.float32), scale, weight, offset, True, WIDE, b.dtype).to(b.dtype)
        total = tl.dot(a, b, total, input_precision="ieee")
    _epilogue(
        total, multipliers, bias, addend, residual, out, rows, inside, num_tokens, num_outputs, residual_stride, out_stride,
        TOKENS, BLOCK_N, BIAS, SCALE, ADD, ACTIVATION, DEPENDENT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "factor_begin", "factor_end"])
def split_kernel(
    x, w, bias, norm, factors, addend, residual, out, num_tokens, num_outputs, eps, offset, input_factor, factor, factor_begin,
    factor_end, x_stride, w_stride, residual_stride, out_stride,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr,
    ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`dot_kernel` for few rows: the SPLIT warps of a program share its rows, divide K, and sum at the end.

    Warp i takes columns `[i * BLOCK_K, (i + 1) * BLOCK_K)` of every SPLIT * BLOCK_K: Triton gives each batch of a batched
    product its own warp.
    """
    rows, inside = _weight_rows(num_outputs, BLOCK_N, ACTIVATION is not None)
    token = tl.arange(0, TOKENS)
    column = tl.arange(0, SPLIT * BLOCK_K)
    real = (token < num_tokens)[None, :]
    first = w + rows.to(tl.int64) * w_stride
    weights, inputs = first[:, None] + column[None, :], x + token[None, :] * x_stride + column[:, None]
    pdl_wait(DEPENDENT)
    multipliers = _multipliers(factors, factor, factor_begin, factor_end, rows, inside, SCALE)
    if NORM:
        scale = _inverse_rms_of_all(x, num_tokens, x_stride, eps, WIDTH, TOKENS)[None, :]
    total = tl.zeros([SPLIT, BLOCK_N, TOKENS], tl.float32)
    for start in range(0, WIDTH, SPLIT * BLOCK_K):
        left = column < WIDTH - start
        a = tl.load(weights + start, mask=inside[:, None] & left[None, :], other=0.0, eviction_policy="evict_first")
        b = tl.load(inputs + start, mask=left[:, None] & real, other=0.0)
        if NORM:
            weight = tl.load(norm + start + column, mask=left, other=0.0)[:, None]
            b = scale_rows(b.to(tl.float32), scale, weight, offset, True, WIDE, b.dtype).to(b.dtype)
        # As tiles of two dimensions: Triton 3.8 orders those of three so that eight rows lie in the same banks of shared memory.
        a = tl.permute(tl.reshape(a, [BLOCK_N, SPLIT, BLOCK_K]), (1, 0, 2))
        b = tl.reshape(b, [SPLIT, BLOCK_K, TOKENS])
        total = tl.dot(a, b, total, input_precision="ieee")
    _epilogue(
        tl.sum(total, 0), multipliers, bias, addend, residual, out, rows, inside, num_tokens, num_outputs, residual_stride,
        out_stride, TOKENS, BLOCK_N, BIAS, SCALE, ADD, ACTIVATION, DEPENDENT,
    )  # fmt: skip


def launch(config: LinearConfig, x: Tensor, w: Tensor, out: Tensor, fusion: LinearFusion) -> None:
    """x [T, K], w [N, K], out [T, N], or [T, N // 2] when gated; rows contiguous. T is padded to a power of two inside. Only the
    row kernel multiplies its input."""
    tokens, width = x.shape
    gated, rows = fusion.activation is not None, w.shape[0]
    outputs = rows // 2 if gated else rows
    addend, residual, factors = fusion.addend, fusion.residual, fusion.factors
    dependent = 0 if x.is_cuda and not supports_pdl(x.device) else config.dependent
    constants: dict[str, Any] = {
        "WIDTH": width, "TOKENS": config.padded_tokens(tokens), "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "BIAS": fusion.bias is not None, "NORM": fusion.norm is not None, "WIDE": fusion.wide,
        "SCALE": None if not fusion.scaled else "columns" if factors is not None else "number",
        "ADD": (residual is not None) + (addend is not None), "ACTIVATION": fusion.activation, "DEPENDENT": dependent,
        "num_warps": config.num_warps,
        # A rounded product must not become part of a multiply-add in low precision.
        "enable_fp_fusion": residual is None or not (gated or fusion.scaled),
        **pdl_options(dependent),
    }  # fmt: skip
    if config.kernel == "row":
        kernel, more = row_kernel, {"UNROLL": config.depth, "SCALE_INPUT": fusion.input_factor != 1.0}
    elif config.kernel == "dot":
        kernel, more = dot_kernel, {"num_stages": config.depth}
    else:
        kernel, more = split_kernel, {"SPLIT": config.num_warps, "num_stages": config.depth}
    kernel[(cdiv(outputs, config.block_n // 2 if gated else config.block_n),)](
        x, w, w if fusion.bias is None else fusion.bias, x if fusion.norm is None else fusion.norm,
        x if factors is None else factors, x if addend is None else addend, x if residual is None else residual, out,
        tokens, outputs, fusion.eps, fusion.offset, float(fusion.input_factor), float(fusion.factor), fusion.begin,
        fusion.end or rows, x.stride(0), w.stride(0), 0 if residual is None else residual.stride(0), out.stride(0),
        **constants, **more,
    )  # fmt: skip
