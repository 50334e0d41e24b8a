"""Linears of few tokens as the tuner sees them: which configurations to try, and what a table says to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchweave.compiler.tuning.measure import Call, copies_for
from torchweave.compiler.tuning.table import Table
from torchweave.compiler.tuning.tuner import TuningTask
from torchweave.ops.linear import LinearFusion, run, run_unfused
from torchweave.ops.linear_config import LinearConfig, default_choices, format_choices, parse_choices, supported

TOKENS = (1, 2, 4, 8, 16, 32, 48, 64)
"""Numbers of tokens that are measured; one between two takes the choice of the larger."""

FUSED_TOKENS = 32
"""Up to so many, products take in what is around them (the pass `fused_linears`)."""


@dataclass(frozen=True)
class LinearShape:
    """A weight, and what stands around its product.

    Attributes:
        outputs, width: of the weight, [outputs, width].
        around: letters: n: RMSNorm before it; g: a gate behind it; r: a residual added behind it.
    """

    outputs: int
    width: int
    around: str = ""

    @property
    def subject(self) -> str:
        """The pass whose choices these are."""
        return "fused_linears" if self.around else "small_linears"

    @property
    def key(self) -> str:
        """The shape in a table's words."""
        return f"{self.outputs}x{self.width}" + (f"/{self.around}" if self.around else "")

    @property
    def columns(self) -> int:
        """Of the result."""
        return self.outputs // 2 if "g" in self.around else self.outputs

    def fused(self, tokens: int, dtype: torch.dtype, device: torch.device | str) -> LinearFusion:
        """Operands around a product, of random numbers."""
        residual = torch.randn(tokens, self.columns, device=device, dtype=dtype) if "r" in self.around else None
        norm = torch.rand(self.width, device=device, dtype=dtype) if "n" in self.around else None
        return LinearFusion(norm=norm, eps=1e-5, residual=residual, activation="silu" if "g" in self.around else None)

    def choices(self, table: Table, dtype: torch.dtype) -> str:
        """How the op is to run at every number of tokens: as measured; by the rule below what was measured, or where nothing was;
        by the BLAS where there is no kernel."""
        if not supported(self.outputs, self.width, dtype):
            return ""
        rule_choices = parse_choices(default_choices(self.outputs, self.width, dtype))
        matching_entries = table.matching_entries(self.subject, self.key)
        if not matching_entries:
            return format_choices(rule_choices)
        below = (each for each in rule_choices if each[0] < matching_entries[0].tokens)
        measured = (
            (each.tokens, LinearConfig.parse(each.choice) if each.choice else None) for each in matching_entries
        )
        return format_choices((*below, *measured))


def letters(around: LinearFusion) -> str:
    """What is around a product as a `LinearShape` says it."""
    found = [("n", around.norm), ("g", around.activation), ("r", around.residual)]
    return "".join(letter for letter, thing in found if thing is not None)


def candidates(tokens: int, around: str) -> list[LinearConfig]:
    """The configurations that are tried at a number of tokens."""
    plain: list[LinearConfig] = []
    if tokens == 1:
        shapes = [(2, 2048, 4, 4), (4, 1024, 4, 4), (4, 2048, 4, 2), (8, 1024, 4, 2), (8, 1024, 8, 2)]
        plain += [LinearConfig("row", *shape) for shape in shapes]
    elif tokens <= 4:
        shapes = [(4, 1024, 4, 2), (2, 1024, 4, 2), (8, 512, 4, 2)]
        plain += [LinearConfig("row", *shape) for shape in shapes]
    if 1 < tokens <= 16:
        shapes = [(16, 64, 4, 4), (16, 128, 4, 3), (32, 64, 4, 4)]
        plain += [LinearConfig("split", *shape) for shape in shapes]
        plain += [LinearConfig("dot", 64, 128, 4, 4)]
    elif tokens > 16:
        shapes = [(16, 64, 4, 3), (32, 64, 4, 3)]
        plain += [LinearConfig("split", *shape) for shape in shapes]
        plain += [
            LinearConfig("dot", 64, 128, 4, 4),
            LinearConfig("dot", 64, 64, 4, 6),
            LinearConfig("dot", 128, 64, 8, 4),
        ]
    found = [replace(each, dependent=dependent) for each, dependent in product(plain, (0, 1, 2))]
    if "n" not in around or tokens == 1:
        return found
    apart = [replace(each, norm_apart=True) for each in found]
    return apart if tokens > 4 else found + apart


def tuning_task(shape: LinearShape, tokens: int, weights: ColdWeights) -> TuningTask:
    """What runs the product best; the weights take turns, so that each comes from memory."""
    dtype, device = weights.dtype, weights.device
    x = torch.randn(tokens, shape.width, device=device, dtype=dtype)
    around, out = shape.fused(tokens, dtype, device), torch.empty(tokens, shape.columns, device=device, dtype=dtype)

    def call(config: LinearConfig) -> Call:
        return lambda i: run(config, x, weights[i], out, around)

    tried = {str(config): call(config) for config in candidates(tokens, shape.around)}
    copies = copies_for(shape.outputs * shape.width * dtype.itemsize)
    return TuningTask(shape.subject, shape.key, tokens, lambda i: run_unfused(x, weights[i], around), tried, copies)


class ColdWeights:
    """`cold_weights`, made when the first of them is asked for and gone with the object."""

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device

    @cached_property
    def _all(self) -> list[Tensor]:
        return cold_weights(self.shape, self.dtype, self.device)

    def __getitem__(self, index: int) -> Tensor:
        return self._all[index % len(self._all)]


def cold_weights(shape: LinearShape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Distinct weights that are together larger than any cache."""
    size = (shape.outputs, shape.width)
    copies = copies_for(shape.outputs * shape.width * dtype.itemsize, 1)
    return [torch.empty(size, device=device, dtype=dtype).normal_(std=shape.width**-0.5) for _ in range(copies)]


class LinearRecorder(TorchDispatchMode):
    """Sees which products of few tokens run, and what is around each; `shapes` are the distinct ones, with their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[tuple[LinearShape, torch.dtype], None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.torchweave.linear.default, torch.ops.torchweave.fused_linear.default):
            _, w, _, *rest = (*args, None)
            fused = (
                LinearFusion(norm=rest[0], residual=rest[4], activation=rest[5]) if len(rest) > 5 else LinearFusion()
            )
            self.shapes[LinearShape(w.shape[0], w.shape[1], letters(fused)), w.dtype] = None
        return func(*args, **(kwargs or {}))


TokenCounts = Mapping[tuple[LinearShape, torch.dtype], Sequence[int]]
"""The numbers of tokens at which a product runs."""


def tuning_tasks(token_counts: TokenCounts, device: torch.device) -> Iterator[TuningTask]:
    """One question for every shape and number of tokens; the weights of one shape are there at a time."""
    for (shape, dtype), tokens in token_counts.items():
        weights = ColdWeights(shape, dtype, device)
        yield from (tuning_task(shape, count, weights) for count in tokens)
