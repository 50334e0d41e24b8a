"""Interfaces of quantization formats: how checkpoints store quantized weights, and how weights are rounded at load time.

An entry of `torchweave.plug_points.QUANTIZATION_FORMATS` is a `QuantizationFormat`. Most formats are a `PackedFormat`
(`torchweave.models.weights.packed_checkpoint`), which names the tensors of a weight and their dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from torchweave.models.attention import UnsupportedModel
from torchweave.models.weights.read import CheckpointTensor, TensorAssembler, TensorSetter
from torchweave.models.weights.shards import TensorShard
from torchweave.report import Report


class WeightQuantizer(TensorSetter, Protocol):
    """Sets tensors of a model as they arrive, and replaces the modules whose weights are quantized."""

    def apply(self, model: nn.Module, device: torch.device) -> None:
        """Quantize a loaded model, moving one weight at a time to the device."""
        ...

    def report_summary(self, model: nn.Module, report: Report) -> None:
        """Report what is quantized."""
        ...


class Scheme(Protocol):
    """How weights are quantized in memory.

    Attributes:
        name: value of the option `quantization`, or as reports name a checkpoint's.
    """

    @property
    def name(self) -> str: ...

    def quantizer(self, model: PreTrainedModel) -> WeightQuantizer:
        """Rounds the weights of an unquantized checkpoint as they arrive."""
        ...


class WeightReader(TensorAssembler, Protocol):
    """Joins the parts of quantized weights.

    Attributes:
        parts: the checkpoint's tensors that are keys of `pieces`.
    """

    @property
    def parts(self) -> Mapping[str, CheckpointTensor]: ...

    def quantizer(self, model: PreTrainedModel, experts: Any = None) -> WeightQuantizer:
        """Takes the weights that this reader completes; `experts`: a reader of packed experts, or None."""
        ...


class StoredWeights(Protocol):
    """Quantized weights of a checkpoint.

    Attributes:
        weights: anything by the name that the whole weight would have (`X.weight`).
    """

    weights: dict[str, Any]

    def reader(
        self,
        model: PreTrainedModel,
        stored: dict[str, CheckpointTensor],
        renamed: Mapping[str, str],
        shards: Mapping[str, TensorShard],
    ) -> WeightReader:
        """A reader of this rank's parts.

        Args:
            renamed: checkpoint name -> model name of whole weights.
        """
        ...


class StoredFormat(Protocol):
    """How a checkpoint stores quantized weights."""

    @property
    def scheme(self) -> Scheme: ...

    def collect(self, folder: Path, stored: dict[str, CheckpointTensor]) -> StoredWeights | None:
        """Replace the parts of weights in `stored` by whole weights, so that names and shapes are checked like any others.

        None: the weights are whole, with scales in FP8 (`QuantScheme`).
        """
        ...


@dataclass(frozen=True)
class QuantizationFormat:
    """A quantization format; at least one of both.

    Attributes:
        read: how a checkpoint with this `quant_method` stores its weights, from the `quantization_config` of its config.json; None
            from it: unquantized. It raises `unsupported(...)` for settings that are not supported. None: no checkpoint has it.
        scheme: what the option `quantization` of this name rounds weights to; None: the format of checkpoints only.
    """

    read: Callable[[Mapping[str, Any]], StoredFormat | None] | None = None
    scheme: Scheme | None = None


def unsupported(what: str) -> UnsupportedModel:
    """The error for a checkpoint that is quantized in an unsupported way: `what` continues "is quantized"."""
    return UnsupportedModel(
        f"This checkpoint is quantized {what}, which is not supported; use an unquantized one (quantization=fp8 or int4 quantizes "
        "it at load time), or a format of docs/how-to/quantize.md."
    )
