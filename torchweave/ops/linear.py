"""`torchweave::linear`: F.linear that reads its weight at full speed when there are few tokens.

The number of tokens is symbolic in the captured graph but known when the op runs, which is when a CUDA graph is recorded: so the
op, not the compiler, chooses between cuBLAS and the project's kernels, bucket by bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops.registry import define


@dataclass(frozen=True)
class LinearConfig:
    """One way to run the product.

    Attributes:
        kernel: "row" multiplies element by element (1 or 2 tokens), "dot" uses tensor cores (any small number).
        block_n, block_k: rows of the weight that a program owns, and how much of them it reads at a time.
        num_warps: warps of a program.
        depth: iterations in flight: the loop's unrolling for "row", its pipeline stages for "dot".
        dependent: start while the kernel before drains (programmatic dependent launch, sm_90).
    """

    kernel: Literal["row", "dot"]
    block_n: int
    block_k: int
    num_warps: int
    depth: int
    dependent: bool = False

    def run(self, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out [T, N] = x [T, K] @ w [N, K].T + bias [N], all on one GPU, rows contiguous."""
        from torchweave.ops.kernels.linear import launch_dot, launch_row

        shape = {"block_n": self.block_n, "block_k": self.block_k, "num_warps": self.num_warps, "dependent": self.dependent}
        if self.kernel == "row":
            launch_row(x, w, bias, out, unroll=self.depth, **shape)
        else:
            launch_dot(x, w, bias, out, stages=self.depth, **shape)


MAX_TOKENS = 2
"""Above this many tokens cuBLAS runs. For one token, on an H100 with cold weights in one CUDA graph, us of cuBLAS / a row kernel:
3072x2048 7.7/6.4, 2048x2048 6.6/4.9, 16384x2048 27.9/25.2, 2048x8192 17.1/14.1, 28672x4096 86.6/83.4, 128256x2048 190/178. Two
tokens are included because they read the same bytes, not from a measurement; bench/linear.py measures both, and more tokens."""

_MIN_WEIGHT = 1 << 20  # elements: below this the launch, not the bandwidth, decides


def choose(num_tokens: int, num_outputs: int, width: int, dtype: torch.dtype) -> LinearConfig | None:
    """How to run x [num_tokens, width] @ w [num_outputs, width].T on a GPU; None = cuBLAS."""
    if num_tokens > MAX_TOKENS or num_tokens < 1 or dtype not in (torch.bfloat16, torch.float16):
        return None
    if width % 8 or num_outputs * width < _MIN_WEIGHT:
        return None
    # Enough programs that each of 132 SMs holds several, and 16 bytes a thread: small weights want fewer rows a program.
    block_n = 4 if num_outputs <= 8192 else 8
    return LinearConfig("row", block_n, 1024 if width >= 1024 else 512, num_warps=4, depth=4)


def _fake(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


@define("torchweave::linear", fake=_fake)
def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], w [N, K], bias [N] or none -> [..., N], accumulated in float32 and rounded once."""
    width = w.shape[1]
    if x.device.type == "cuda" and _readable(x, w):
        config = choose(x.numel() // width, w.shape[0], width, x.dtype)
        if config is not None:
            out = x.new_empty((*x.shape[:-1], w.shape[0]))
            config.run(x.view(-1, width), w, bias, out.view(-1, w.shape[0]))
            return out
    return F.linear(x, w, bias)


def _readable(x: Tensor, w: Tensor) -> bool:
    """May the kernels read these with 16-byte loads?"""
    rows_aligned = w.stride(1) == 1 and w.stride(0) % 8 == 0 and w.data_ptr() % 16 == 0
    return x.dtype == w.dtype and x.is_contiguous() and x.data_ptr() % 16 == 0 and rows_aligned
