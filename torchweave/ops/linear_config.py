"""Configurations of products with few tokens: the choice by the number of tokens, and a rule for untuned shapes.

Choices are a string, `2=row,4,1024,4,4,1,0;16=split,16,64,4,4,1,1`: up to 2 tokens the first configuration, up to 16 the
second, above that the BLAS. The string is an argument of the op, so a graph is explicit about its kernels and looks nothing up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

BLAS = "blas"
"""In a choice: the product by the BLAS, with unfused kernels around it."""

KERNELS = ("row", "dot", "split")
ROW_KERNEL_MAX_TOKENS = 4  # largest number of tokens of the row kernel


@dataclass(frozen=True)
class LinearConfig:
    """Launch configuration of the product.

    Attributes:
        kernel: "row" multiplies element by element (up to 4 tokens); on tensor cores, "dot" divides a program's rows among its
            warps, "split" divides K.
        block_n, block_k: rows of the weight per program, and columns per iteration (with "split": per warp).
        num_warps: warps of a program.
        depth: iterations in flight: loop unrolling for "row", pipeline stages otherwise.
        dependent: programmatic dependent launch (sm_90): start while the previous kernel runs, and let the next kernel start:
            1: after this kernel's wait; 2: when its programs are about to store.
        norm_apart: launch the RMSNorm of x separately, before this kernel; else every program computes it.
    """

    kernel: Literal["row", "dot", "split"]
    block_n: int
    block_k: int
    num_warps: int
    depth: int
    dependent: int = 0
    norm_apart: bool = False

    def padded_tokens(self, tokens: int) -> int:
        """Number of tokens that a kernel is compiled for."""
        return max(1 if self.kernel == "row" else 8, 1 << max(tokens - 1, 0).bit_length())

    def __str__(self) -> str:
        return ",".join(str(int(field) if isinstance(field, bool) else field) for field in astuple(self))

    @staticmethod
    def parse(text: str) -> LinearConfig:
        """Parse the string that `str` wrote; ValueError if it is malformed."""
        kernel, *numbers = text.split(",")
        if kernel not in KERNELS or len(numbers) != 6 or not all(number.isdigit() for number in numbers):
            raise ValueError(
                f"{text!r} is not a configuration of a linear; expected kernel,n,k,warps,depth,dependent,apart"
            )
        return LinearConfig(kernel, *map(int, numbers[:-1]), norm_apart=bool(int(numbers[-1])))  # type: ignore[arg-type]


@dataclass(frozen=True)
class LinearFusion:
    """Operations fused with a product; none by default.

    Attributes:
        bias: `[N]`, added to the product before it is rounded.
        norm: weight `[K]` of the RMSNorm of x; `eps`, `offset` and `wide` as in `torchweave::rms_norm`.
        residual: `[T, N]`, added to the rounded product.
        activation: gates the first half of the product's columns by the second: `[T, N // 2]`; see `torchweave.ops.activation`.
        input_factor: multiplies x, after its norm.
        factors: `[N]`, multiply the columns of the rounded product, before gate and residual.
        factor: multiplies the columns from `begin` to before `end` of the rounded product instead; an `end` of 0 is N.
        addend: `[T, N]`, added before the residual, which it needs.
    """

    bias: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    wide: bool = False
    residual: Tensor | None = None
    activation: str | None = None
    input_factor: float = 1.0
    factors: Tensor | None = None
    factor: float = 1.0
    begin: int = 0
    end: int = 0
    addend: Tensor | None = None

    @property
    def scaled(self) -> bool:
        """Whether the product is multiplied."""
        return self.factors is not None or self.factor != 1.0


Choices = tuple[tuple[int, LinearConfig | None], ...]
"""Largest number of tokens and its configuration (None: the BLAS), in increasing order."""


def format_choices(choices: Iterable[tuple[int, LinearConfig | None]]) -> str:
    """Format choices as a string; equal neighbors are merged, and the BLAS at the end is omitted."""
    merged: list[tuple[int, LinearConfig | None]] = []
    for tokens, config in sorted(choices, key=lambda choice: choice[0]):
        if merged and merged[-1][1] == config:
            merged.pop()
        merged.append((tokens, config))
    while merged and merged[-1][1] is None:
        merged.pop()
    return ";".join(f"{tokens}={BLAS if config is None else config}" for tokens, config in merged)


@lru_cache(maxsize=4096)
def parse_choices(text: str) -> Choices:
    """Parse the string that `format_choices` wrote; ValueError if it is malformed."""
    choices = []
    for part in filter(None, text.split(";")):
        tokens, _, how = part.partition("=")
        if not tokens.isdigit():
            raise ValueError(f"{part!r} is not a choice for a linear; expected tokens=configuration")
        choices.append((int(tokens), None if how == BLAS else LinearConfig.parse(how)))
    if choices != sorted(choices, key=lambda choice: choice[0]):
        raise ValueError(f"choices {text!r} must have increasing numbers of tokens")
    if any(
        config is not None and config.kernel == "row" and max_tokens > ROW_KERNEL_MAX_TOKENS
        for max_tokens, config in choices
    ):
        raise ValueError(f"choices {text!r} give more than {ROW_KERNEL_MAX_TOKENS} tokens to a row kernel")
    return tuple(choices)


def select_config(text: str, num_tokens: int) -> LinearConfig | None:
    """The configuration for a number of tokens; None for the BLAS."""
    if num_tokens < 1:
        return None
    return next((config for max_tokens, config in parse_choices(text) if num_tokens <= max_tokens), None)


MAX_TOKENS = 32
"""Above this many tokens the rule takes the BLAS."""

_MIN_WEIGHT = 1 << 15  # elements: those of a router of 8 experts and 4096 inputs; below this nothing was measured
_SMALL_WEIGHT = 1 << 20  # elements: below this, programs of one wave load it whole before x exists
_WIDE = 4096  # columns from which a program reads longer parts of a row
_ONE_TOKEN = LinearConfig("row", 2, 2048, num_warps=4, depth=1, dependent=1)
_SMALL, _SMALL_MAX_TOKENS = _ONE_TOKEN, 2
_TWO_TOKENS = LinearConfig("row", 4, 1024, num_warps=4, depth=2, dependent=2, norm_apart=True)
_NARROW = LinearConfig("row", 8, 512, num_warps=4, depth=4, dependent=1)
_FEW = LinearConfig("split", 16, 64, num_warps=4, depth=4, dependent=2, norm_apart=True)
_FEW_WIDE = LinearConfig("split", 16, 128, num_warps=4, depth=3, dependent=1, norm_apart=True)
_MANY = LinearConfig("dot", 64, 128, num_warps=4, depth=4, dependent=2, norm_apart=True)


def choose(num_tokens: int, num_outputs: int, width: int, dtype: torch.dtype) -> LinearConfig | None:
    """Rule for a GPU without a tuning table: configuration of x [num_tokens, width] @ w [num_outputs, width].T; None = BLAS.

    From bench/results/linear_h100_202611.json (H100, cold weights, one CUDA graph, ten shapes of Llama 1B and 8B): one token by
    rows takes 0.55 to 0.9 of the time of cuBLAS and kernels around it, up to 16 on tensor cores with K split among warps 0.65
    to 0.95, up to 32 with rows split among warps 0.85 to 1, where there are rows enough for every multiprocessor. At 48 and 64,
    unfused, cuBLAS takes 0.76 to 1.05 of the time of these kernels (linear-48-64_h100_202611.json).
    """
    if num_tokens < 1 or not supported(num_outputs, width, dtype):
        return None
    if num_outputs * width < _SMALL_WEIGHT:
        return _SMALL if num_tokens <= _SMALL_MAX_TOKENS else None
    narrow, wide = width < 2048, width >= _WIDE
    if num_tokens == 1 or (num_tokens == 2 and not wide):
        return _NARROW if narrow else _ONE_TOKEN if num_tokens == 1 else _TWO_TOKENS
    if num_tokens <= 16:
        return _FEW_WIDE if wide else _FEW
    return _MANY if num_tokens <= MAX_TOKENS and width <= num_outputs else None


def supported(num_outputs: int, width: int, dtype: torch.dtype, *, fused: bool = False) -> bool:
    """Whether the kernels support a weight [num_outputs, width] and it is large enough to profit; `fused`: with ops around it,
    which pays where the kernels serve more than two tokens."""
    minimum = _SMALL_WEIGHT if fused else _MIN_WEIGHT
    return dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and num_outputs * width >= minimum


def default_choices(num_outputs: int, width: int, dtype: torch.dtype) -> str:
    """`choose` for 1, 2, 16 and `MAX_TOKENS` tokens, as a string of choices."""
    return format_choices((tokens, choose(tokens, num_outputs, width, dtype)) for tokens in (1, 2, 16, MAX_TOKENS))
