"""Triton kernels for routed experts with one or two tokens: chosen rows of the weights times a token, element by element.

Each weight is read once and used once or twice, so memory bandwidth is the limit. Both kernels support programmatic dependent
launch (`dependent_launch.py`).
"""

# Triton's decorators and constexpr arguments are untyped.
# pyright: reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchweave.ops.kernels.dependent_launch import pdl_options, pdl_wait
from torchweave.ops.kernels.sizes import cdiv, next_power_of_2


@triton.jit
def gated_activation(
    gate, up_value, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr
):
    """`act(gate) * up_value` in float32 of values of DTYPE, rounded as in the model: after the activation."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up_value = tl.maximum(tl.minimum(up_value, LIMIT), -LIMIT)
    if ALPHA > 0:
        gate = gate * tl.sigmoid(gate * ALPHA)
        up_value += 1
    else:
        gate = activation(gate, ACTIVATION)
    return gate.to(DTYPE).to(tl.float32) * up_value


@triton.jit
def activation(x, ACTIVATION: tl.constexpr):
    """One of `torchweave.ops.moe.experts.ACTIVATIONS`, in float32."""
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
        x = tl.maximum(x, 0.0)
        if ACTIVATION == "relu2":
            x = x * x
    return x


@triton.jit
def rows_up_kernel(
    x, index, up, bias, h, num_experts, inner, x_stride, expert_stride, row_stride,
    WIDTH: tl.constexpr, TOP: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """h[pair, I]: a program computes BLOCK_N activated columns of one pair of token and expert."""
    pair = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < inner
    k = tl.arange(0, BLOCK_K)
    pdl_wait(DEPENDENT)
    expert = tl.load(index + pair)
    if expert < num_experts:
        gate_row = column * 2 if INTERLEAVED else column
        up_row = column * 2 + 1 if INTERLEAVED else column + inner
        weights = up + expert.to(tl.int64) * expert_stride
        gate_weights = weights + gate_row[:, None] * row_stride + k[None, :]
        up_weights = weights + up_row[:, None] * row_stride + k[None, :]
        inputs = x + (pair // TOP) * x_stride + k
        gate_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        up_sum = tl.zeros([BLOCK_N, BLOCK_K] if GATED else [1, 1], tl.float32)
        for start in tl.range(0, WIDTH, BLOCK_K, loop_unroll_factor=UNROLL):
            left = k < WIDTH - start
            mask = inside[:, None] & left[None, :]
            gate_tile = tl.load(gate_weights + start, mask=mask, other=0.0, eviction_policy="evict_first")
            if GATED:
                up_tile = tl.load(up_weights + start, mask=mask, other=0.0, eviction_policy="evict_first")
            value = tl.load(inputs + start, mask=left, other=0.0).to(tl.float32)[None, :]
            gate_sum += gate_tile.to(tl.float32) * value
            if GATED:
                up_sum += up_tile.to(tl.float32) * value
        dtype = h.dtype.element_ty
        gate = tl.sum(gate_sum, axis=1)
        biases = bias + expert.to(tl.int64) * (inner * 2 if GATED else inner)
        if HAS_BIAS:
            gate += tl.load(biases + (gate_row if GATED else column), mask=inside, other=0.0).to(tl.float32)
        gate = gate.to(dtype).to(tl.float32)
        if GATED:
            up_value = tl.sum(up_sum, axis=1)
            if HAS_BIAS:
                up_value += tl.load(biases + up_row, mask=inside, other=0.0).to(tl.float32)
            gate = gated_activation(gate, up_value.to(dtype).to(tl.float32), ACTIVATION, ALPHA, LIMIT, dtype)
        else:
            gate = activation(gate, ACTIVATION)
        tl.store(h + pair.to(tl.int64) * inner + column, gate.to(dtype), mask=inside)


@triton.jit
def rows_down_kernel(
    h, index, weight, down, bias, out, num_experts, num_outputs, expert_stride, row_stride, out_stride,
    INNER: tl.constexpr, TOP: tl.constexpr, TOP_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[token, N], the weighted sum: a program reads BLOCK_N rows of each of the token's experts, all at once.

    The previous kernel only read the routing, so its writer has ended when this kernel starts: the routing is read, bypassing
    L1, and the first weights are loaded before the wait.
    """
    token = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, TOP_BLOCK)
    k = tl.arange(0, BLOCK_K)
    inside = n < num_outputs
    expert = tl.load(index + token * TOP + j, mask=j < TOP, other=num_experts, cache_modifier=".cg")
    chosen = expert < num_experts
    share = tl.load(weight + token * TOP + j, mask=chosen, other=0.0, cache_modifier=".cg").to(tl.float32)
    rows = expert.to(tl.int64)[:, None] * expert_stride + n[None, :] * row_stride
    weights = down + rows[:, :, None] + k[None, None, :]
    readable = (chosen[:, None] & inside[None, :])[:, :, None]
    first = readable & (k < INNER)[None, None, :]
    tile = tl.load(weights, mask=first, other=0.0, eviction_policy="evict_first")
    pdl_wait(DEPENDENT)
    inputs = h + (token * TOP + j).to(tl.int64)[:, None] * INNER + k[None, :]
    total = tl.zeros([TOP_BLOCK, BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, INNER, BLOCK_K, loop_unroll_factor=UNROLL):
        in_next_tile = readable & (k < INNER - BLOCK_K - start)[None, None, :]
        following = tl.load(weights + start + BLOCK_K, mask=in_next_tile, other=0.0, eviction_policy="evict_first")
        here = chosen[:, None] & (k < INNER - start)[None, :]
        value = tl.load(inputs + start, mask=here, other=0.0).to(tl.float32) * share[:, None]
        total += tile.to(tl.float32) * value[:, None, :]
        tile = following
    result = tl.sum(tl.sum(total, axis=2), axis=0)
    if HAS_BIAS:
        biases = bias + expert.to(tl.int64)[:, None] * num_outputs + n[None, :]
        added = tl.load(biases, mask=chosen[:, None] & inside[None, :], other=0.0).to(tl.float32)
        result += tl.sum(added * share[:, None], axis=0)
    tl.store(out + token * out_stride + n, result.to(out.dtype.element_ty), mask=inside)


def launch_rows_up(
    x: Tensor, index: Tensor, up: Tensor, bias: Tensor | None, h: Tensor,
    *, gated: bool, interleaved: bool, activation: str, alpha: float, limit: float,
    block_n: int, block_k: int, num_warps: int, depth: int, dependent: bool,
) -> None:  # fmt: skip
    """x [T, K], index [T, k], up [E, 2 I or I, K], h [T k, I]; rows contiguous."""
    inner, pairs = h.shape[1], index.numel()
    rows_up_kernel[(cdiv(inner, block_n), pairs)](
        x, index, up, up if bias is None else bias, h, up.shape[0], inner, x.stride(0), up.stride(0), up.stride(1),
        WIDTH=up.shape[2], TOP=index.shape[1], GATED=gated, INTERLEAVED=interleaved, HAS_BIAS=bias is not None,
        ACTIVATION=activation, ALPHA=alpha, LIMIT=limit, BLOCK_N=block_n, BLOCK_K=block_k, UNROLL=depth,
        DEPENDENT=dependent, num_warps=num_warps, **pdl_options(dependent),
    )  # fmt: skip


def launch_rows_down(
    h: Tensor, index: Tensor, weight: Tensor, down: Tensor, bias: Tensor | None, out: Tensor,
    *, block_n: int, block_k: int, num_warps: int, depth: int, dependent: bool,
) -> None:  # fmt: skip
    """h [T k, I], index and weight [T, k], down [E, K, I], out [T, K]; rows contiguous."""
    tokens, top = index.shape
    rows_down_kernel[(cdiv(down.shape[1], block_n), tokens)](
        h, index, weight, down, down if bias is None else bias, out, down.shape[0], down.shape[1],
        down.stride(0), down.stride(1), out.stride(0),
        INNER=down.shape[2], TOP=top, TOP_BLOCK=next_power_of_2(top), HAS_BIAS=bias is not None,
        BLOCK_N=block_n, BLOCK_K=block_k, UNROLL=depth, DEPENDENT=dependent, num_warps=num_warps,
        **pdl_options(dependent),
    )  # fmt: skip
