"""Memory of low-rank adapters: made before the model is compiled, whose pass fills it."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweave.config import Plan
from torchweave.models.load import LoadedModel
from torchweave.models.parallel.linear_roles import is_transposed
from torchweave.models.weights.peft_adapter import LowRankPair
from torchweave.models.weights.shards import TensorShard
from torchweave.ops.low_rank import AdapterSlots
from torchweave.report import Report

_MIN_ROWS = 64  # at least the least number of rows of a step


def make_adapter_slots(plan: Plan, loaded: LoadedModel) -> AdapterSlots | None:
    """Slots for adapters of the linears of this rank; None without `enable_lora`.

    Raises:
        ValueError: the model pools.
    """
    config, model, tensor_plan = plan.config, loaded.module.model, loaded.tensor_plan
    if not config.enable_lora:
        return None
    if loaded.module.pooling is not None:
        raise ValueError("enable_lora=True is not supported for a model that pools; remove the option")
    max_tokens = max(plan.max_num_tokens, plan.max_batch_size, _MIN_ROWS) + _MIN_ROWS * plan.query_len
    slots = AdapterSlots.of(model, config.max_loras, config.max_lora_rank, max_tokens, torch.device(plan.device))
    transposed = {name for name, module in model.named_modules() if is_transposed(module)}

    tensors = dict(model.named_parameters(remove_duplicate=False))

    def shard_of(name: str) -> TensorShard | None:
        if tensor_plan is None:
            return None
        if name == f"{tensor_plan.head}.weight" and name not in tensor_plan.shards:  # tied to the embedding
            name = f"{tensor_plan.embedding}.weight"
        return tensor_plan.shards.get(name)

    def part_of(name: str, pair: LowRankPair) -> LowRankPair:
        return pair.part(shard_of(f"{name}.weight"), name in transposed)

    def has_tensor(name: str, tensor: Tensor) -> bool:
        own, shard = tensors.get(name), shard_of(name)
        if own is None or own.is_meta:  # of another stage
            return True
        part = tensor if shard is None else shard.extract(tensor)
        return own.shape == part.shape and torch.equal(own, part.to(own))

    slots.part_of, slots.has_tensor = part_of, has_tensor
    return slots


def report_adapter_slots(slots: AdapterSlots | None, report: Report) -> None:
    """Report the places and their memory, once the model is compiled."""
    if slots is not None:
        facts = {
            "slots": slots.num_slots,
            "max_rank": slots.max_rank,
            "linears": len(slots.places),
            "bytes": slots.num_bytes,
        }
        report.event("adapters", **facts, refused=dict(sorted(slots.refusals.items())))
