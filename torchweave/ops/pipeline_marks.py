"""Marks in the graph of a model whose layers are divided: where a stage begins, where it ends, and what it has not got.

Models put them in, and the compile stack cuts the captured graph at them (`torchweave.compiler.partition.pipeline_stages`):
none is left in what runs.
By themselves they stand for what they cannot know: zeros for what another stage has, copies for the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchweave.ops.registry import define


def _fake_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@define("torchweave::stage_input", fake=_fake_like)
def stage_input(x: Tensor) -> Tensor:
    """What the stage before hands over, in the place of x, whose geometry it has; contiguous."""
    return x.clone(memory_format=torch.contiguous_format)


@define("torchweave::stage_output", fake=_fake_like)
def stage_output(x: Tensor) -> Tensor:
    """x, which is handed to the next stage; what follows is another stage's."""
    return x.clone(memory_format=torch.contiguous_format)


def _fake_elsewhere(ids: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty((*ids.shape, width), dtype=dtype, device=ids.device)


@define("torchweave::elsewhere", fake=_fake_elsewhere)
def elsewhere(ids: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """What another stage makes of token ids `[...]`: `[..., width]`. A stage whose result depends on it cannot be."""
    return torch.zeros((*ids.shape, width), dtype=dtype, device=ids.device)
