"""Marker ops of pipeline parallelism in a model's graph: start and end of a stage, and results of other stages.

Models insert them, and the compile stack cuts the captured graph at them (`torchweave.compiler.partition.pipeline_stages`);
none is left in the compiled graph. Run eagerly, they return zeros for results of other stages and copies for the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchweave.ops.registry import define


def _fake_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@define("torchweave::stage_input", fake=_fake_like)
def stage_input(x: Tensor) -> Tensor:
    """Result of the previous stage, of the shape and dtype of x; contiguous."""
    return x.clone(memory_format=torch.contiguous_format)


@define("torchweave::stage_output", fake=_fake_like)
def stage_output(x: Tensor) -> Tensor:
    """x, sent to the next stage; the ops after it belong to other stages."""
    return x.clone(memory_format=torch.contiguous_format)


def _fake_elsewhere(ids: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty((*ids.shape, width), dtype=dtype, device=ids.device)


@define("torchweave::elsewhere", fake=_fake_elsewhere)
def elsewhere(ids: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Result of another stage for token ids `[...]`: `[..., width]`. No output of this stage may depend on it."""
    return torch.zeros((*ids.shape, width), dtype=dtype, device=ids.device)
