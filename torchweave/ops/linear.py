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

        shape = {
            "block_n": self.block_n,
            "block_k": self.block_k,
            "num_warps": self.num_warps,
            "dependent": self.dependent,
        }
        if self.kernel == "row":
            launch_row(x, w, bias, out, unroll=self.depth, **shape)
        else:
            launch_dot(x, w, bias, out, stages=self.depth, **shape)


MAX_TOKENS = 32
"""Above this many tokens cuBLAS always runs."""

_MIN_WEIGHT = 1 << 20  # elements: below this the launch, not the bandwidth, decides
_ROW_TOKENS = 2
_DOT_TOKENS = 16
_ONE_TOKEN = LinearConfig("row", 2, 2048, num_warps=4, depth=4)
_TWO_TOKENS = LinearConfig("row", 4, 1024, num_warps=4, depth=4)
_NARROW = LinearConfig("row", 8, 512, num_warps=4, depth=4)
_DOT = LinearConfig("dot", 64, 128, num_warps=4, depth=5)


def choose(num_tokens: int, num_outputs: int, width: int, dtype: torch.dtype) -> LinearConfig | None:
    """How to run x [num_tokens, width] @ w [num_outputs, width].T on a GPU; None = cuBLAS.

    From bench/results/linear_h100_202611.json (H100, cold weights, one CUDA graph, ten shapes of Llama 1B and 8B): the row
    kernel takes 0.86 of cuBLAS's time for one token and 0.90 for two; the dot kernel 0.97 for 3 to 16 where there are
    rows enough for every multiprocessor, and more tokens only for a head. Dependent launch is measured there too, at
    0.82 and 0.84, but only between two kernels that both take part.
    """
    if num_tokens < 1 or dtype not in (torch.bfloat16, torch.float16):
        return None
    if width % 8 or num_outputs * width < _MIN_WEIGHT:
        return None
    if num_tokens <= _ROW_TOKENS:
        if width < 2048:
            return _NARROW
        return _ONE_TOKEN if num_tokens == 1 else _TWO_TOKENS
    limit = MAX_TOKENS if num_outputs >= 16 * width else _DOT_TOKENS
    if num_tokens <= limit and num_outputs >= 4096 and width <= num_outputs:
        return _DOT
    return None


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
