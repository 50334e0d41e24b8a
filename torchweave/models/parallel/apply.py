"""Apply a tensor-parallel plan to a model: local parameters and sizes, and collectives between ranks.

All ranks run the same graph and differ in tensors only: slices of weights, zeros for biases added by another rank, and a
buffer with this rank's first vocabulary row or first expert.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

import torchweave.ops.collectives.op  # noqa: F401  (defines torchweave::all_reduce)
from torchweave.distributed.process_groups import TENSOR
from torchweave.models.parallel.fused_qkv import WIDTHS
from torchweave.models.parallel.linear_roles import is_linear, is_transposed
from torchweave.models.parallel.tp_plan import TensorParallelPlan
from torchweave.models.weights.read import set_tensor
from torchweave.models.weights.shards import HeadSharding

_QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_q_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads")
_FIRST_ROW, _FIRST_EXPERT = "torchweave_first_row", "torchweave_first_expert"


def apply(model: PreTrainedModel, plan: TensorParallelPlan) -> None:
    """Shard the parameters of a whole model, on meta or not, and adapt its forward to this rank."""
    whole_tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, shard in plan.shards.items():
        whole = whole_tensors[name]
        set_tensor(
            model,
            name,
            torch.empty(shard.shape, dtype=whole.dtype, device="meta") if whole.is_meta else shard.extract(whole),
        )
    update_linear_sizes(model)
    configs: dict[tuple[int, HeadSharding], Any] = {}
    for name, heads in plan.heads.items():
        _set_local_heads(model.get_submodule(name), heads, configs)
    for name, width in plan.sizes.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, width)
    for name in plan.all_reduced:
        model.get_submodule(name).register_forward_hook(_all_reduce_output)
    for name in plan.norms:
        norm: Any = model.get_submodule(name)
        norm.torchweave_ranks = plan.size
        norm.forward = types.MethodType(_sharded_norm, norm)
    for name in plan.experts:
        model.get_submodule(name).register_forward_pre_hook(_localize_expert_ids)
    _shard_vocabulary(model, plan)
    register_rank_offsets(model, plan, torch.device("meta"))


def register_rank_offsets(model: nn.Module, plan: TensorParallelPlan, device: torch.device) -> None:
    """Register buffers with this rank's first vocabulary row and first expert."""
    rows = plan.shards[f"{plan.embedding}.weight"].shape[0]
    firsts = {f"{plan.embedding}.{_FIRST_ROW}": plan.rank * rows}
    firsts |= {f"{name}.{_FIRST_EXPERT}": first for name, first in plan.experts.items()}
    for name, first in firsts.items():
        owner, _, leaf = name.rpartition(".")
        value = torch.tensor(first, dtype=torch.int64, device=device)
        model.get_submodule(owner).register_buffer(leaf, value, persistent=False)


def restore_whole_buffers(model: nn.Module, plan: TensorParallelPlan) -> list[str]:
    """Give sharded buffers without memory the shape of the whole, in which transformers computes them; returns their names."""
    found = [name for name, buffer in model.named_buffers() if buffer.is_meta and name in plan.buffers]
    for name in found:
        shard, like = plan.shards[name], model.get_buffer(name)
        set_tensor(model, name, torch.empty(shard.full, dtype=like.dtype, device="meta"))
    return found


def shard_buffers(model: nn.Module, plan: TensorParallelPlan, names: Sequence[str]) -> None:
    """Replace whole buffers by this rank's part."""
    for name in names:
        set_tensor(model, name, plan.shards[name].extract(model.get_buffer(name)))


# -- sizes read by forwards --------------------------------------------------------------------------------------------


def update_linear_sizes(model: nn.Module) -> None:
    """Set the size attributes of linears and embeddings from their weights."""
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if is_linear(module):
            outputs, inputs = weight.shape[::-1] if is_transposed(module) else weight.shape
            for name, width in (("out_features", outputs), ("in_features", inputs), ("nf", outputs), ("nx", inputs)):
                if hasattr(module, name):
                    setattr(module, name, int(width))
        elif isinstance(module, nn.Embedding):
            module.num_embeddings = int(weight.shape[0])
            module.padding_idx = None  # used in training only; may belong to another rank


def _set_local_heads(module: Any, heads: HeadSharding, configs: dict[tuple[int, HeadSharding], Any]) -> None:
    """Set the local head counts of an attention module and of its copy of the config."""
    _localize_counts(module, heads)
    if hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = heads.num_local_query // heads.num_local_kv
    for name in WIDTHS.get(type(module).__name__, ()):
        setattr(module, name, getattr(module, name) // heads.size)
    config = getattr(module, "config", None)
    if config is not None:
        key = (id(config), heads)
        if key not in configs:
            configs[key] = copy.copy(config)
            _localize_counts(configs[key], heads)
        module.config = configs[key]


def _localize_counts(owner: Any, heads: HeadSharding) -> None:
    """Set the head counts of a module or config that are those of the whole model to this rank's."""
    for name in (*_QUERY_HEADS, *_KV_HEADS):
        number = getattr(owner, name, None)
        if name in _KV_HEADS and number == heads.kv:
            setattr(owner, name, heads.num_local_kv)
        elif isinstance(number, int) and number == heads.query:
            setattr(owner, name, heads.num_local_query)


# -- between ranks -----------------------------------------------------------------------------------------------------


def _all_reduce_output(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
    """Forward hook: all-reduce the module's output."""
    return torch.ops.torchweave.all_reduce(out, TENSOR)


class _AllGatherOutput:
    """Forward hook: all-gather the columns of all ranks and drop the padding."""

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        gathered = torch.ops.torchweave.all_gather(out, -1, TENSOR)
        return gathered if gathered.shape[-1] == self.columns else gathered[..., : self.columns]


def _shard_vocabulary(model: nn.Module, plan: TensorParallelPlan) -> None:
    embedding: Any = model.get_submodule(plan.embedding)
    embedding.forward = types.MethodType(_vocab_parallel_embedding, embedding)
    model.get_submodule(plan.head).register_forward_hook(_AllGatherOutput(plan.vocab_size))


def _vocab_parallel_embedding(self: Any, ids: Tensor) -> Tensor:
    """ids `[..., T]` -> `[..., T, D]`: each rank contributes its rows, and zeros for others; then all-reduce."""
    local = ids - self.torchweave_first_row
    inside = (local >= 0) & (local < self.weight.shape[0])
    rows = type(self).forward(self, torch.where(inside, local, 0))
    rows = torch.where(inside[..., None], rows, 0.0)
    return torch.ops.torchweave.all_reduce(rows, TENSOR)


def plain_embedding(embedding: nn.Embedding) -> nn.Embedding:
    """A lookup in a model's embedding, by rows of the vocabulary as there, without what its class does besides (a scale)."""
    rows, channels = embedding.weight.shape
    lookup: Any = nn.Embedding(rows, channels, _weight=embedding.weight)
    first_row = getattr(embedding, _FIRST_ROW, None)
    if first_row is not None:
        lookup.register_buffer(_FIRST_ROW, first_row, persistent=False)
        lookup.forward = types.MethodType(_vocab_parallel_embedding, lookup)
    return lookup


def _sharded_norm(self: Any, x: Tensor, gate: Tensor | None = None) -> Tensor:
    """RMSNorm over the sharded last dimension; replicated heads are replicated equally often, so the mean is exact.

    Args:
        gate: of the shape of x: a Mamba2 layer's, whose SiLU multiplies the input, or with `norm_before_gate` the output.
    """
    wide, gates_output = x.float(), getattr(self, "norm_before_gate", False)
    if gate is not None and not gates_output:
        wide = wide * F.silu(gate.float())
    squares = wide.square().sum(-1, keepdim=True)
    mean = torch.ops.torchweave.all_reduce(squares, TENSOR) / (x.shape[-1] * self.torchweave_ranks)
    out = self.weight * (wide * torch.rsqrt(mean + self.variance_epsilon))
    if gate is not None and gates_output:
        out = out * F.silu(gate.float())
    return out.to(x.dtype)


def _localize_expert_ids(block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook: expert indices local to this rank; other ranks' experts get an index out of range."""
    x, index, *rest = args
    local = index - block.torchweave_first_expert
    return (x, torch.where(local < 0, block.down_proj.shape[0], local), *rest)
