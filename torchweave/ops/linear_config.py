"""How a product of few tokens is run: one configuration, the choice among several by the number of tokens, and a rule for
shapes that nobody measured.

A choice is written as text, `2=row,4,1024,4,4,1,0;16=split,16,64,4,4,1,1`: up to 2 tokens the first configuration, up to 16
the second, beyond that the BLAS. The text is an argument of the op: a graph says how it runs; nothing is looked up then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

BLAS = "blas"
"""In a choice: the product by the BLAS, and what is around it by kernels of their own."""

KERNELS = ("row", "dot", "split")
ROW_KERNEL_MAX_TOKENS = 4  # tokens that the row kernel can do


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
            start: 1: once this one has waited; 2: when its programs are about to store.
        norm_apart: an RMSNorm of x is a launch of its own, before this one; else every program computes it.
    """

    kernel: Literal["row", "dot", "split"]
    block_n: int
    block_k: int
    num_warps: int
    depth: int
    dependent: int = 0
    norm_apart: bool = False

    def padded_tokens(self, tokens: int) -> int:
        """The number of tokens that a kernel is built for."""
        return max(1 if self.kernel == "row" else 8, 1 << max(tokens - 1, 0).bit_length())

    def __str__(self) -> str:
        return ",".join(str(int(field) if isinstance(field, bool) else field) for field in astuple(self))

    @staticmethod
    def parse(text: str) -> LinearConfig:
        """The configuration that `str` wrote; ValueError when it is none."""
        kernel, *numbers = text.split(",")
        if kernel not in KERNELS or len(numbers) != 6 or not all(number.isdigit() for number in numbers):
            raise ValueError(
                f"{text!r} is no configuration of a linear; expected kernel,n,k,warps,depth,dependent,apart"
            )
        return LinearConfig(kernel, *map(int, numbers[:-1]), norm_apart=bool(int(numbers[-1])))  # type: ignore[arg-type]


@dataclass(frozen=True)
class LinearFusion:
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


Choices = tuple[tuple[int, LinearConfig | None], ...]
"""Largest number of tokens, and how they are run (None: the BLAS), in increasing order."""


def format_choices(choices: Iterable[tuple[int, LinearConfig | None]]) -> str:
    """The text of choices; neighbours that agree become one, and the BLAS at the end is left out."""
    kept: list[tuple[int, LinearConfig | None]] = []
    for tokens, config in sorted(choices, key=lambda choice: choice[0]):
        if kept and kept[-1][1] == config:
            kept.pop()
        kept.append((tokens, config))
    while kept and kept[-1][1] is None:
        kept.pop()
    return ";".join(f"{tokens}={BLAS if config is None else config}" for tokens, config in kept)


@lru_cache(maxsize=4096)
def parse_choices(text: str) -> Choices:
    """What `format_choices` wrote; ValueError when it is not."""
    found = []
    for part in filter(None, text.split(";")):
        tokens, _, how = part.partition("=")
        if not tokens.isdigit():
            raise ValueError(f"{part!r} is no choice for a linear; expected tokens=configuration")
        found.append((int(tokens), None if how == BLAS else LinearConfig.parse(how)))
    if found != sorted(found, key=lambda choice: choice[0]):
        raise ValueError(f"choices {text!r} are not in the order of their tokens")
    if any(
        config is not None and config.kernel == "row" and max_tokens > ROW_KERNEL_MAX_TOKENS
        for max_tokens, config in found
    ):
        raise ValueError(f"choices {text!r} give more than {ROW_KERNEL_MAX_TOKENS} tokens to a row kernel")
    return tuple(found)


def select_config(text: str, num_tokens: int) -> LinearConfig | None:
    """How a number of tokens is run by choices; None for the BLAS."""
    if num_tokens < 1:
        return None
    return next((config for max_tokens, config in parse_choices(text) if num_tokens <= max_tokens), None)


MAX_TOKENS = 32
"""Above this many tokens the rule takes the BLAS."""

_MIN_WEIGHT = 1 << 20  # elements: below this the launch, not the bandwidth, decides
_WIDE = 4096  # columns from which a program reads more of a row at a time
_ONE_TOKEN = LinearConfig("row", 4, 1024, num_warps=4, depth=4, dependent=1)
_TWO_TOKENS = LinearConfig("row", 4, 1024, num_warps=4, depth=2, dependent=2, norm_apart=True)
_NARROW = LinearConfig("row", 8, 512, num_warps=4, depth=4, dependent=1)
_FEW = LinearConfig("split", 16, 64, num_warps=4, depth=4, dependent=2, norm_apart=True)
_ONE_WIDE = LinearConfig("row", 2, 2048, num_warps=4, depth=4, dependent=1)
_FEW_WIDE = LinearConfig("split", 16, 128, num_warps=4, depth=3, dependent=1, norm_apart=True)
_MANY = LinearConfig("dot", 64, 128, num_warps=4, depth=4, dependent=2, norm_apart=True)


def choose(num_tokens: int, num_outputs: int, width: int, dtype: torch.dtype) -> LinearConfig | None:
    """The rule: how to run x [num_tokens, width] @ w [num_outputs, width].T on a GPU that has no table; None = BLAS.

    From bench/results/linear_h100_202611.json (H100, cold weights, one CUDA graph, ten shapes of Llama 1B and 8B): one token by
    rows takes 0.55 to 0.9 of the time of cuBLAS and kernels around it, up to 16 on tensor cores with K split among warps 0.65 to
    0.95, up to 32 with rows split among warps 0.85 to 1, where there are rows enough for every multiprocessor. At 48 and 64, where
    products stand alone, cuBLAS takes 0.76 to 1.05 of what these kernels take (linear-48-64_h100_202611.json).
    """
    if num_tokens < 1 or not supported(num_outputs, width, dtype):
        return None
    wide = width >= _WIDE
    if num_tokens <= 2 and not wide:
        if width < 2048:
            return _NARROW
        return _ONE_TOKEN if num_tokens == 1 else _TWO_TOKENS
    if num_tokens <= 16:
        return _ONE_WIDE if num_tokens == 1 else _FEW_WIDE if wide else _FEW
    return _MANY if num_tokens <= MAX_TOKENS and width <= num_outputs else None


def supported(num_outputs: int, width: int, dtype: torch.dtype) -> bool:
    """Whether there are kernels for a weight [num_outputs, width], large enough to be worth one."""
    return dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and num_outputs * width >= _MIN_WEIGHT


def default_choices(num_outputs: int, width: int, dtype: torch.dtype) -> str:
    """`choose` as choices."""
    return format_choices((tokens, choose(tokens, num_outputs, width, dtype)) for tokens in (1, 2, 16, MAX_TOKENS))
