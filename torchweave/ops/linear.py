"""Linears that read their weight at full speed when there are few tokens, alone and with what stands around them.

`torchweave::linear` is F.linear. `torchweave::fused_linear` also normalises its input, gates one half of its output by the other,
or adds a residual: what a decoder layer has between two of its products. The number of tokens is symbolic in the captured graph
but known when an op runs, which is when a CUDA graph is recorded: so the op, not the compiler, chooses between the BLAS and the
project's kernels, bucket by bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops import activation as _activation  # noqa: F401 (registers the ops that stand around a product)
from torchweave.ops import norm as _norm  # noqa: F401
from torchweave.ops.registry import define


@dataclass(frozen=True)
class Around:
    """What a product is fused with; the default is nothing.

    Attributes:
        bias: `[N]`, added to the product before it is rounded.
        norm: weight `[K]` of the RMSNorm of x; `eps`, `offset` and `wide` as in `torchweave::rms_norm`.
        residual: `[T, N]`, added to the rounded product.
        activation: gates the first half of the product's columns by the second: `[T, N // 2]`; see `torchweave.ops.activation`.
    """

    bias: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    wide: bool = False
    residual: Tensor | None = None
    activation: str | None = None


NOTHING = Around()


@dataclass(frozen=True)
class LinearConfig:
    """One way to run the product.

    Attributes:
        kernel: "row" multiplies element by element (up to 4 tokens); on tensor cores, "dot" gives a program's warps its
            rows, "split" gives each of them a part of K.
        block_n, block_k: rows of the weight that a program owns, and how much of them it (with "split": each of its warps)
            reads at a time.
        num_warps: warps of a program.
        depth: iterations in flight: the loop's unrolling for "row", its pipeline stages otherwise.
        dependent: start while the kernel before runs (programmatic dependent launch, sm_90), and let the kernel behind
            start: 1: once this one has waited; 2: at once.
        ahead: how many numbers of each row are asked for before anything is computed; 0 for none.
        norm_apart: an RMSNorm of x is a launch of its own, before this one; else every program computes it.
    """

    kernel: Literal["row", "dot", "split"]
    block_n: int
    block_k: int
    num_warps: int
    depth: int
    dependent: int = 0
    ahead: int = 0
    norm_apart: bool = False

    def run(self, x: Tensor, w: Tensor, out: Tensor, around: Around = NOTHING) -> None:
        """out [T, N] = x [T, K] @ w [N, K].T, and what is around it; all on one GPU, rows contiguous."""
        from torchweave.ops.kernels.linear import launch

        if self.norm_apart and around.norm is not None:
            x, around = _normalized(x, around), replace(around, norm=None)
        launch(self, x, w, out, around)


def _normalized(x: Tensor, around: Around) -> Tensor:
    return torch.ops.torchweave.rms_norm(x, around.norm, around.eps, around.offset, around.wide)


def run_apart(x: Tensor, w: Tensor, around: Around) -> Tensor:
    """The product by the BLAS, and what is around it by kernels of their own."""
    if around.norm is not None:
        x = _normalized(x, around)
    y = F.linear(x, w, around.bias)
    if around.activation is not None:
        y = torch.ops.torchweave.gated_activation(y, around.activation)
    return y if around.residual is None else around.residual + y


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
            config.run(x.view(-1, width), w, out.view(-1, w.shape[0]), Around(bias))
            return out
    return F.linear(x, w, bias)


def _readable(x: Tensor, w: Tensor) -> bool:
    """May the kernels read these with 16-byte loads?"""
    rows_aligned = w.stride(1) == 1 and w.stride(0) % 8 == 0 and w.data_ptr() % 16 == 0
    return x.dtype == w.dtype and x.is_contiguous() and x.data_ptr() % 16 == 0 and rows_aligned
