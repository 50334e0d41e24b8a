"""Scales of FP8 weights and activations in a checkpoint: found, checked, and divided over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from torchweave.models.attention import UnsupportedModel
from torchweave.models.weights.read import CheckpointTensor, read_tensors
from torchweave.models.weights.shards import TensorShard
from torchweave.ops.quant.fp8 import GROUP

WEIGHT_SCALES = (".weight_scale", ".weight_scale_inv")
INPUT_SCALES = (".input_scale", ".activation_scale", ".input_scale_ub")


def pop_scales(
    stored: dict[str, CheckpointTensor], renamed: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Remove the scales from `stored`; returns (weight scales, input scales) by name of the model's linear.

    Args:
        renamed: checkpoint name -> model name of weights.
    """
    weights: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    entries: dict[tuple[str, bool], CheckpointTensor] = {}  # by linear, and whether it is an input scale
    for name in list(stored):
        ending = next((end for end in (*WEIGHT_SCALES, *INPUT_SCALES) if name.endswith(end)), None)
        if ending is None:
            continue
        entry = stored.pop(name)
        target = renamed.get(name.removesuffix(ending) + ".weight")
        if target is not None:
            entries[target.removesuffix(".weight"), ending in INPUT_SCALES] = entry
    for (linear, is_input), scale in read_tensors(entries):
        # Model Optimizer keeps the dimensions of a block: [N / 128, 1, K / 128, 1].
        (inputs if is_input else weights)[linear] = scale.flatten(2).flatten(0, 1) if scale.ndim == 4 else scale
    return weights, inputs


def shard_scales(scales: Mapping[str, Tensor], shards: Mapping[str, TensorShard]) -> dict[str, Tensor]:
    """Scales of this rank's parts of weights.

    Raises:
        UnsupportedModel: a part ends within a block of weights with one scale.
        ValueError: a weight has another number of scales than rows or blocks.
    """
    return {name: _shard_scale(name, scale, shards.get(f"{name}.weight")) for name, scale in scales.items()}


def _shard_scale(name: str, scale: Tensor, shard: TensorShard | None) -> Tensor:
    if shard is None or scale.numel() == 1:
        return scale
    if scale.numel() == shard.full[0]:  # one for each row
        return scale if shard.dim else TensorShard((scale.numel(),), 0, shard.ranges).extract(scale.flatten())
    if tuple(scale.shape) != (whole := tuple(-(-length // GROUP) for length in shard.full)):
        raise ValueError(
            f"{name} has scales of shape {list(scale.shape)}, expected one, {[shard.full[0]]}, or {list(whole)}; check that "
            "config.json belongs to these weights."
        )
    blocks = shard.for_block_scales(GROUP, scale.shape)
    if blocks is None:
        raise UnsupportedModel(
            f"{name} has one scale per {GROUP} x {GROUP} weights, and the parts of ranks would split such a block; "
            "use fewer ranks, or a checkpoint with scales per row."
        )
    return blocks.extract(scale)


def check_scales(weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
    """Validate scales.

    Raises:
        ValueError: a weight scale is an integer, negative or not finite, or an input scale is not a finite number above 0.
    """
    for name, scale in weights.items():
        if not scale.is_floating_point():
            dtype = str(scale.dtype).removeprefix("torch.")
            raise ValueError(
                f"This checkpoint has scales of {name}.weight in {dtype}, expected floating-point numbers; check that config.json "
                "belongs to these weights."
            )
        if not bool((torch.isfinite(scale.float()) & (scale.float() >= 0)).all()):
            raise ValueError(
                f"This checkpoint has scales of {name}.weight that are not all finite and at least 0; copy or download it again."
            )
    for name, scale in inputs.items():
        value = float(scale) if scale.numel() == 1 else f"a tensor of shape {list(scale.shape)}"
        if isinstance(value, str) or not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"This checkpoint has {value} as input scale of {name}: expected one finite number above 0; copy or "
                "download it again."
            )
