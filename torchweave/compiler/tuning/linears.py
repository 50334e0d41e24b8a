"""Tuning of linears with few tokens: shapes, candidate configurations, and the choices that follow from a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchweave.compiler.tuning.measure import Call, TuningTask, copies_for
from torchweave.compiler.tuning.table import Table
from torchweave.ops.linear import LinearFusion, run, run_unfused
from torchweave.ops.linear_config import LinearConfig, default_choices, format_choices, parse_choices, supported

TOKENS = (1, 2, 4, 8, 16, 32, 48, 64)
"""Measured token counts; one in between uses the choice of the next larger."""

FUSED_TOKENS = 32
"""Largest token count at which linears are fused with their surroundings (the pass `fused_linears`)."""


@dataclass(frozen=True)
class LinearShape:
    """A weight, and the operations fused around its product.

    Attributes:
        outputs, width: shape of the weight, [outputs, width].
        around: letters of fused operations. n: RMSNorm before; g: gated activation after; r: residual add after.
    """

    outputs: int
    width: int
    around: str = ""

    @property
    def subject(self) -> str:
        """Name of the pass that reads the choices."""
        return "fused_linears" if self.around else "small_linears"

    @property
    def key(self) -> str:
        """The shape as a table spells it."""
        return f"{self.outputs}x{self.width}" + (f"/{self.around}" if self.around else "")

    @property
    def columns(self) -> int:
        """Width of the result."""
        return self.outputs // 2 if "g" in self.around else self.outputs

    def fused(self, tokens: int, dtype: torch.dtype, device: torch.device | str) -> LinearFusion:
        """Random operands of the fused operations."""
        residual = torch.randn(tokens, self.columns, device=device, dtype=dtype) if "r" in self.around else None
        norm = torch.rand(self.width, device=device, dtype=dtype) if "n" in self.around else None
        return LinearFusion(norm=norm, eps=1e-5, residual=residual, activation="silu" if "g" in self.around else None)

    def choices(self, table: Table, dtype: torch.dtype) -> str:
        """The op's `choices` argument: measured configurations, default rules below the smallest measured token count or without
        measurements; "" (BLAS) if no kernel supports the shape."""
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


def letters(norm: object, activation: object, residual: object) -> str:
    """The letters of `LinearShape.around` for the parts of a fusion that are not None."""
    fused = [("n", norm), ("g", activation), ("r", residual)]
    return "".join(letter for letter, part in fused if part is not None)


def called_shape(args: Sequence[Any], weight: Tensor) -> LinearShape:
    """Shape of a call of `torchweave::linear`, or of `torchweave::fused_linear`, whose choices are its tenth argument."""
    norm, residual, activation = (args[3], args[7], args[8]) if len(args) > 9 else (None, None, None)
    return LinearShape(weight.shape[0], weight.shape[1], letters(norm, activation, residual))


def candidates(tokens: int, around: str) -> list[LinearConfig]:
    """The configurations to measure at a token count."""
    plain: list[LinearConfig] = []
    if tokens == 1:
        shapes = [(2, 2048, 4, 1), (2, 2048, 4, 4), (4, 1024, 4, 4), (4, 2048, 4, 2), (8, 1024, 4, 2), (8, 1024, 8, 2)]
        plain += [LinearConfig("row", *shape) for shape in shapes]
    elif tokens <= 4:
        shapes = [(2, 2048, 4, 1), (4, 1024, 4, 2), (2, 1024, 4, 2), (8, 512, 4, 2)]
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
    configs = [replace(each, dependent=dependent) for each, dependent in product(plain, (0, 1, 2))]
    if "n" not in around or tokens == 1:
        return configs
    separate = [replace(each, norm_apart=True) for each in configs]
    return separate if tokens > 4 else configs + separate


def tuning_task(shape: LinearShape, tokens: int, weights: ColdWeights) -> TuningTask:
    """The task of one shape at a token count; calls rotate over the weights, so that each is read from memory."""
    dtype, device = weights.dtype, weights.device
    x = torch.randn(tokens, shape.width, device=device, dtype=dtype)
    around, out = shape.fused(tokens, dtype, device), torch.empty(tokens, shape.columns, device=device, dtype=dtype)

    def call(config: LinearConfig) -> Call:
        return lambda i: run(config, x, weights[i], out, around)

    calls = {str(config): call(config) for config in candidates(tokens, shape.around)}
    copies = copies_for(shape.outputs * shape.width * dtype.itemsize)
    return TuningTask(shape.subject, shape.key, tokens, lambda i: run_unfused(x, weights[i], around), calls, copies)


class ColdWeights:
    """`cold_weights`, allocated at first use and freed with the object."""

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device

    @cached_property
    def _all(self) -> list[Tensor]:
        return cold_weights(self.shape, self.dtype, self.device)

    def __getitem__(self, index: int) -> Tensor:
        return self._all[index % len(self._all)]


def cold_weights(shape: LinearShape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Distinct weights, together larger than any cache."""
    size = (shape.outputs, shape.width)
    copies = copies_for(shape.outputs * shape.width * dtype.itemsize, 1)
    return [torch.empty(size, device=device, dtype=dtype).normal_(std=shape.width**-0.5) for _ in range(copies)]


class LinearRecorder(TorchDispatchMode):
    """Records the linears of a step: `shapes` holds the distinct shapes with their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[tuple[LinearShape, torch.dtype], None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.torchweave.linear.default, torch.ops.torchweave.fused_linear.default):
            self.shapes[called_shape(args, args[1]), args[1].dtype] = None
        return func(*args, **(kwargs or {}))


TokenCounts = Mapping[tuple[LinearShape, torch.dtype], Sequence[int]]
"""The token counts at which each shape runs."""


def tuning_tasks(token_counts: TokenCounts, device: torch.device) -> Iterator[TuningTask]:
    """One task for each shape and token count, with the weights of one shape in memory at a time."""
    for (shape, dtype), tokens in token_counts.items():
        weights = ColdWeights(shape, dtype, device)
        yield from (tuning_task(shape, count, weights) for count in tokens)
