"""Make one rank's part of a model: its parameters, the numbers that forwards read, and the collectives between ranks.

All ranks get the same graph. What differs between them is in tensors: slices of weights, zeros for the biases that another rank
adds, and a buffer with the first row of the vocabulary, or the first expert, that is this rank's.
"""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import torchweave.ops.collectives.op  # noqa: F401  (defines torchweave::all_reduce)
from torchweave.models.parallel.fused_qkv import WIDTHS
from torchweave.models.parallel.linear_roles import is_linear, is_transposed
from torchweave.models.parallel.tp_plan import TensorParallelPlan
from torchweave.models.weights.read import set_tensor
from torchweave.models.weights.shards import HeadSharding

_QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_q_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads")
_FIRST_ROW, _FIRST_EXPERT = "torchweave_first_row", "torchweave_first_expert"


def apply(model: PreTrainedModel, plan: TensorParallelPlan) -> None:
    """Cut the parameters of a whole model, with or without memory, and let its forward be one rank's."""
    for name, shard in plan.shards.items():
        whole = model.get_parameter(name)
        set_tensor(
            model,
            name,
            torch.empty(shard.shape, dtype=whole.dtype, device="meta") if whole.is_meta else shard.extract(whole),
        )
    update_linear_sizes(model)
    configs: dict[tuple[int, HeadSharding], Any] = {}
    for name, heads in plan.heads.items():
        _set_local_heads(model.get_submodule(name), heads, configs)
    for name in plan.all_reduced:
        model.get_submodule(name).register_forward_hook(_AllReduceOutput(plan.group))
    for name in plan.norms:
        norm: Any = model.get_submodule(name)
        norm.torchweave_group, norm.torchweave_ranks = plan.group, plan.size
        norm.forward = types.MethodType(_sharded_norm, norm)
    for name in plan.experts:
        model.get_submodule(name).register_forward_pre_hook(_localize_expert_ids)
    _shard_vocabulary(model, plan)
    register_rank_offsets(model, plan, torch.device("meta"))


def register_rank_offsets(model: nn.Module, plan: TensorParallelPlan, device: torch.device) -> None:
    """Make the buffers that say which part is this rank's."""
    rows = plan.shards[f"{plan.embedding}.weight"].shape[0]
    firsts = {f"{plan.embedding}.{_FIRST_ROW}": plan.rank * rows}
    firsts |= {f"{name}.{_FIRST_EXPERT}": first for name, first in plan.experts.items()}
    for name, first in firsts.items():
        owner, _, leaf = name.rpartition(".")
        value = torch.tensor(first, dtype=torch.int64, device=device)
        model.get_submodule(owner).register_buffer(leaf, value, persistent=False)


# -- what forwards read ------------------------------------------------------------------------------------------------


def update_linear_sizes(model: nn.Module) -> None:
    """Let linears and embeddings know how wide they are now."""
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if is_linear(module):
            outputs, inputs = weight.shape[::-1] if is_transposed(module) else weight.shape
            for name, width in (("out_features", outputs), ("in_features", inputs), ("nf", outputs), ("nx", inputs)):
                if hasattr(module, name):
                    setattr(module, name, int(width))
        elif isinstance(module, nn.Embedding):
            module.num_embeddings = int(weight.shape[0])
            module.padding_idx = None  # of use in training only, and maybe another rank's


def _set_local_heads(module: Any, heads: HeadSharding, configs: dict[tuple[int, HeadSharding], Any]) -> None:
    """The attention's own numbers, and those that it reads from its config."""
    for name in (*_QUERY_HEADS, *_KV_HEADS):
        number = getattr(module, name, None)
        if isinstance(number, int):
            setattr(module, name, _local_count(name, number, heads))
    if hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = heads.num_local_query // heads.num_local_kv
    for name in WIDTHS.get(type(module).__name__, ()):
        setattr(module, name, getattr(module, name) // heads.size)
    config = getattr(module, "config", None)
    if config is not None:
        key = (id(config), heads)
        if key not in configs:
            configs[key] = copy.copy(config)
            for name in (*_QUERY_HEADS, *_KV_HEADS):
                number = getattr(config, name, None)
                if isinstance(number, int):
                    setattr(configs[key], name, _local_count(name, number, heads))
        module.config = configs[key]


def _local_count(name: str, number: int, heads: HeadSharding) -> int:
    if name in _KV_HEADS and number == heads.kv:
        return heads.num_local_kv
    return heads.num_local_query if number == heads.query else number


# -- between ranks -----------------------------------------------------------------------------------------------------


class _AllReduceOutput:
    """Forward hook: the sum of the module's results over ranks."""

    def __init__(self, group: str) -> None:
        self.group = group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return torch.ops.torchweave.all_reduce(out, self.group)


class _AllGatherOutput:
    """Forward hook: the columns of all ranks, without the padding behind the last one."""

    def __init__(self, group: str, columns: int) -> None:
        self.group, self.columns = group, columns

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        found = torch.ops.torchweave.all_gather(out, -1, self.group)
        return found if found.shape[-1] == self.columns else found[..., : self.columns]


def _shard_vocabulary(model: nn.Module, plan: TensorParallelPlan) -> None:
    embedding: Any = model.get_submodule(plan.embedding)
    embedding.torchweave_group = plan.group
    embedding.forward = types.MethodType(_vocab_parallel_embedding, embedding)
    model.get_submodule(plan.head).register_forward_hook(_AllGatherOutput(plan.group, plan.vocab_size))


def _vocab_parallel_embedding(self: Any, ids: Tensor) -> Tensor:
    """ids `[..., T]` -> `[..., T, D]`: each rank gives the rows that it has, and zeros for the others."""
    local = ids - self.torchweave_first_row
    inside = (local >= 0) & (local < self.weight.shape[0])
    found = type(self).forward(self, torch.where(inside, local, 0))
    found = torch.where(inside[..., None], found, 0.0)
    return torch.ops.torchweave.all_reduce(found, self.torchweave_group)


def _sharded_norm(self: Any, x: Tensor) -> Tensor:
    """RMSNorm over all ranks' parts of the last dimension; ranks that repeat heads repeat them equally often."""
    wide = x.float()
    squares = wide.square().sum(-1, keepdim=True)
    mean = torch.ops.torchweave.all_reduce(squares, self.torchweave_group) / (x.shape[-1] * self.torchweave_ranks)
    return (self.weight * (wide * torch.rsqrt(mean + self.variance_epsilon))).to(x.dtype)


def _localize_expert_ids(block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook: experts by their number on this rank; another rank's get a number that there is not."""
    x, index, *rest = args
    local = index - block.torchweave_first_expert
    return (x, torch.where(local < 0, block.down_proj.shape[0], local), *rest)
