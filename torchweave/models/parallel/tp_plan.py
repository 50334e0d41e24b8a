"""The tensor-parallel plan of a rank: its part of each parameter, and the modules followed by an all-reduce.

Attention is sharded by heads, pairs of linears by columns and rows (arXiv 1909.08053), experts by inner width or by index, the
vocabulary by rows. A plan holds names and shapes only, so it is computed on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from torchweave.models.attention import UnsupportedModel, layer_number
from torchweave.models.experts import is_experts_module, runs_as_op
from torchweave.models.hooks.recurrent import is_recurrent
from torchweave.models.parallel.fused_qkv import FUSED, layout_of
from torchweave.models.parallel.linear_roles import (
    KV,
    PACKED,
    Role,
    attention_modules,
    is_transposed,
    leaf_of,
    name_pattern,
    owner_of,
    roles,
)
from torchweave.models.parallel.recurrent_layers import shard_recurrent_layer
from torchweave.models.weights.shards import HeadSharding, Range, Ranges, TensorShard, even_shard, padded_shard
from torchweave.ops.attention.op import LayerSpec

_NORMS = frozenset({"q_norm", "k_norm", "attn_sub_norm", "ffn_sub_norm"})
_KEY_NORMS = frozenset({"k_norm"})


@dataclass(frozen=True)
class TensorParallelPlan:
    """The part of a model on one rank.

    Attributes:
        rank, size: rank and size of the tensor-parallel group.
        vocab_size: rows of the whole vocabulary.
        embedding, head: names of the modules with vocabulary weights.
        shards: this rank's part by parameter; other parameters are replicated.
        all_reduced: modules whose outputs are summed over ranks.
        norms: norms over a sharded dimension.
        heads: head sharding by attention module.
        experts: first local expert by experts block, for blocks sharded by index.
        buffers: names in `shards` that are buffers.
        sizes: attributes of recurrent layers that their forwards read, by name.
        divided: recurrent layers of which each rank has a part.
        replicated: why recurrent layers are whole on each rank, as a clause, by class.
    """

    rank: int
    size: int
    vocab_size: int
    embedding: str
    head: str
    shards: dict[str, TensorShard] = field(default_factory=dict)
    all_reduced: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    heads: dict[str, HeadSharding] = field(default_factory=dict)
    experts: dict[str, int] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    divided: list[str] = field(default_factory=list)
    replicated: dict[str, str] = field(default_factory=dict)

    def restricted_to(self, owns: Callable[[str], bool]) -> TensorParallelPlan:
        """The plan restricted to modules for which `owns` is true."""
        return replace(self, experts={name: first for name, first in self.experts.items() if owns(name)})

    def local_head_counts(self, whole: Sequence[LayerSpec]) -> list[tuple[int, int, int]]:
        """(query heads, KV heads, head width) of each layer on this rank."""
        return [(*self._local_heads(spec), spec.head_dim) for spec in whole]

    def _local_heads(self, spec: LayerSpec) -> tuple[int, int]:
        if spec.index_keys:  # each rank selects the keys that its heads read
            return spec.num_heads, spec.num_kv_heads
        heads = HeadSharding(spec.num_heads, spec.num_kv_heads, self.rank, self.size)
        return heads.num_local_query, heads.num_local_kv


class TensorParallelPlanner:
    """Makes the plan of rank `rank` of `size` for a whole model, on meta or not."""

    def __init__(self, model: PreTrainedModel, rank: int, size: int) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self.model, self.rank, self.size = model, rank, size
        rows: Any = head.weight.shape[0]  # type: ignore[union-attr]
        self.result = TensorParallelPlan(rank, size, int(rows), names[id(embedding)], names[id(head)])

    def refusal(self, why: str) -> UnsupportedModel:
        name = type(self.model).__name__
        return UnsupportedModel(f"{name} cannot be sharded over {self.size} ranks: {why}.")

    def plan(self, specs: Sequence[LayerSpec], expert_parallel: bool) -> TensorParallelPlan:
        """The plan.

        Args:
            specs: the model's attention layers.
            expert_parallel: distribute whole experts over the ranks instead of sharding each.

        Raises:
            UnsupportedModel: the model cannot be sharded over `size` ranks; the message gives the reason.
        """
        if any(hasattr(module, "torchweave_quantile") for module in self.model.modules()):
            raise self.refusal("its activation sparsity depends on all columns of an MLP; use one rank")
        role_by_name = roles(self.model)
        attentions = attention_modules(self.model, role_by_name)
        if sorted(map(layer_number, attentions.values())) != list(range(sum(not spec.index_keys for spec in specs))):
            raise self.refusal(
                "neither transformers (base_model_tp_plan of its config) nor Torchweave has a tensor-parallel plan for its "
                "attention; use one rank"
            )
        for name, module in attentions.items():
            self._attention(name, module, specs[layer_number(module)], role_by_name)
        for name, role in role_by_name.items():
            if owner_of(name) not in attentions:
                self._shard_linear(name, role)
        for name, block in self.model.named_modules():
            if (form := _experts_layout(block)) is not None:
                (self._distribute_experts if expert_parallel else self._shard_each_expert)(name, block, form)
            if is_recurrent(block):
                self._recurrent_layer(name, block)
        self._vocabulary()
        return self.result

    # -- attention -----------------------------------------------------------------------------------------------------

    def _attention(self, name: str, module: nn.Module, spec: LayerSpec, role_by_name: Mapping[str, Role]) -> None:
        if spec.alibi or type(module).__name__ == "DogeAttention":
            raise self.refusal("the bias of its scores is computed for all heads; use one rank")
        heads = HeadSharding(spec.num_heads, spec.num_kv_heads, self.rank, self.size)
        if heads.indivisible_reason:
            raise self.refusal(f"{heads.indivisible_reason} are not divisible; choose among {_choices(heads)}")
        self.result.heads[name] = heads
        for leaf, child in module.named_children():
            whole = f"{name}.{leaf}"
            if role_by_name.get(whole) == "rows":
                if _width(child, "rows") % heads.query:
                    raise self.refusal(
                        f"{name_pattern(whole)} has {_width(child, 'rows')} columns for {heads.query} heads"
                    )
                self._rows(whole, child, heads.query_range(_width(child, "rows") // heads.query))
            elif whole in role_by_name:
                self._columns(whole, child, self._head_ranges(module, whole, child, heads))
            else:
                self._shard_attention_norm(whole, child, heads, spec)
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.shape[:1] == (heads.query,):  # sinks: one value per head
                self._add_shard(f"{name}.{leaf}", parameter, 0, (heads.query_range(1),))

    def _head_ranges(self, module: nn.Module, name: str, linear: nn.Module, heads: HeadSharding) -> Ranges:
        """Rows of a projection for this rank's heads."""
        leaf, rows = leaf_of(name), _width(linear, "columns")
        if leaf in FUSED:
            layout = layout_of(module, leaf)
            ranges = None if layout is None else layout(module, heads, rows)
            if ranges is None:
                what = (
                    "has an unknown layout"
                    if layout is None
                    else f"cannot be split into {heads.num_local_query} heads per rank"
                )
                raise self.refusal(f"{name_pattern(name)} of {type(module).__name__} {what}; use fewer ranks")
            return ranges
        count, of = (heads.kv, heads.kv_range) if leaf in KV else (heads.query, heads.query_range)
        if rows % count:
            raise self.refusal(f"{name_pattern(name)} has {rows} rows for {count} heads; use one rank")
        return (of(rows // count),)

    def _shard_attention_norm(self, name: str, module: nn.Module, heads: HeadSharding, spec: LayerSpec) -> None:
        """A norm of queries, keys or the attention's output: over one head, per head, or over all heads."""
        if any(isinstance(part, nn.ModuleList) for part in module.children()):
            raise self.refusal(f"{name_pattern(name)} has a module for each head; use one rank")
        leaf, weight = leaf_of(name), getattr(module, "weight", None)
        if weight is None or leaf not in _NORMS:
            return
        count, of = (heads.kv, heads.kv_range) if leaf in _KEY_NORMS else (heads.query, heads.query_range)
        if weight.ndim == 2 and weight.shape[0] == count:
            for part, parameter in module.named_parameters(recurse=False):
                self._add_shard(f"{name}.{part}", parameter, 0, (of(1),))
        elif weight.ndim == 1 and weight.shape[0] != spec.head_dim and weight.shape[0] % count == 0:
            self._sharded_norm(name, module, (of(weight.shape[0] // count),))

    def _sharded_norm(self, name: str, module: Any, ranges: Ranges) -> None:
        """A norm over a sharded dimension: ranks all-reduce the sums of squares."""
        if not hasattr(module, "variance_epsilon") or getattr(module, "bias", None) is not None:
            raise self.refusal(
                f"{name_pattern(name)} is a {type(module).__name__} over a sharded dimension, not a plain RMSNorm; use one rank"
            )
        self._add_shard(f"{name}.weight", module.weight, 0, ranges)
        self.result.norms.append(name)

    # -- linears -------------------------------------------------------------------------------------------------------

    def _shard_linear(self, name: str, role: Role) -> None:
        """Shard a linear outside attention."""
        module = self.model.get_submodule(name)
        parts = 2 if role == "columns" and leaf_of(name) in PACKED else 1
        width = _width(module, role)
        shard = even_shard((width,), 0, self.rank, self.size, parts)
        if shard is None:
            raise self.refusal(
                f"{width} {'outputs' if role == 'columns' else 'inputs'} of {name_pattern(name)} are not divisible; choose a "
                f"divisor of {width // parts}"
            )
        if role == "columns":
            self._columns(name, module, shard.ranges)
            return
        self._rows(name, module, shard.ranges[0])
        for leaf, norm in self.model.get_submodule(owner_of(name)).named_children():
            if leaf in _NORMS and tuple(norm.weight.shape) == (width,):  # type: ignore[union-attr, operator]
                self._sharded_norm(f"{owner_of(name)}.{leaf}", norm, shard.ranges)

    def _columns(self, name: str, module: Any, ranges: Ranges) -> None:
        self._add_shard(f"{name}.weight", module.weight, 1 if is_transposed(module) else 0, ranges)
        if module.bias is not None:
            self._add_shard(f"{name}.bias", module.bias, 0, ranges)

    def _rows(self, name: str, module: Any, rows: Range) -> None:
        self._add_shard(f"{name}.weight", module.weight, 0 if is_transposed(module) else 1, (rows,))
        self._add_on_rank_0(f"{name}.bias", module.bias)
        self.result.all_reduced.append(name)

    def _add_shard(self, name: str, parameter: Tensor, dim: int, ranges: Ranges) -> None:
        self.result.shards[name] = TensorShard(tuple(parameter.shape), dim, ranges)

    def _add_on_rank_0(self, name: str, bias: Tensor | None) -> None:
        """Zero a bias on all ranks but 0, which adds it to the all-reduced sum."""
        if bias is not None and self.rank:
            self.result.shards[name] = TensorShard(tuple(bias.shape), zero=True)

    # -- experts -------------------------------------------------------------------------------------------------------

    def _shard_each_expert(self, name: str, block: Any, form: _ExpertsLayout) -> None:
        """Shard the inner width of every expert."""
        if form.normed:
            raise self.refusal(f"{name_pattern(name)} has a norm after each expert; use one rank")
        down, up = block.down_proj, getattr(block, form.up)
        inner = 1 if form.transposed else 2
        width = down.shape[inner]
        of_down = even_shard(down.shape, inner, self.rank, self.size)
        if of_down is None:
            raise self.refusal(
                f"the width {width} of the experts {name_pattern(name)} is not divisible; choose a divisor of it, or "
                "enable_expert_parallel"
            )
        of_up = even_shard(up.shape, 2 if form.transposed else 1, self.rank, self.size, form.halves)
        assert of_up is not None, "the up projection is as wide as down, or twice"
        self.result.shards.update({f"{name}.down_proj": of_down, f"{name}.{form.up}": of_up})
        bias = getattr(block, f"{form.up}_bias", None)
        if bias is not None:
            self._add_shard(f"{name}.{form.up}_bias", bias, 1, of_up.ranges)
        self._add_on_rank_0(f"{name}.down_proj_bias", getattr(block, "down_proj_bias", None))
        self.result.all_reduced.append(name)

    def _distribute_experts(self, name: str, block: Any, form: _ExpertsLayout) -> None:
        """Distribute whole experts."""
        if not form.by_index:
            raise self.refusal(
                f"the experts {name_pattern(name)} are not selected by index; turn enable_expert_parallel off"
            )
        count = block.down_proj.shape[0]
        if count % self.size:
            raise self.refusal(
                f"{count} experts of {name_pattern(name)} are not divisible; turn enable_expert_parallel off"
            )
        own = count // self.size
        for leaf, parameter in block.named_parameters(recurse=False):
            if parameter.shape[0] == count:
                self._add_shard(f"{name}.{leaf}", parameter, 0, ((self.rank * own, (self.rank + 1) * own),))
        self.result.experts[name] = self.rank * own
        self.result.all_reduced.append(name)

    # -- recurrent layers ----------------------------------------------------------------------------------------------

    def _recurrent_layer(self, name: str, module: nn.Module) -> None:
        own = shard_recurrent_layer(module, self.rank, self.size)
        if isinstance(own, str):
            self.result.replicated[type(module).__name__] = own
            return
        buffers = dict(module.named_buffers())
        tensors = dict(module.named_parameters()) | buffers
        for each, ranges in own.columns.items():
            for leaf in (each, f"{each}.weight", f"{each}.bias"):
                if leaf in tensors:
                    self._add_shard(f"{name}.{leaf}", tensors[leaf], own.dims.get(leaf, 0), ranges)
                    self.result.buffers.extend([f"{name}.{leaf}"] if leaf in buffers else [])
        for leaf, rows in own.rows.items():
            self._rows(f"{name}.{leaf}", module.get_submodule(leaf), rows)
        for leaf, width in own.sizes.items():
            self.result.sizes[f"{name}.{leaf}"] = width
        self.result.norms.extend(f"{name}.{leaf}" for leaf in own.norms)
        self.result.divided.append(name)

    # -- vocabulary ----------------------------------------------------------------------------------------------------

    def _vocabulary(self) -> None:
        for name in (self.result.embedding, self.result.head):
            for leaf, parameter in self.model.get_submodule(name).named_parameters(recurse=False):
                self.result.shards[f"{name}.{leaf}"] = padded_shard(parameter.shape, 0, self.rank, self.size)


@dataclass(frozen=True)
class _ExpertsLayout:
    """Weight layout of an experts block.

    Attributes:
        up: name of the first weight.
        halves: 2 if that weight is gate, then up.
        transposed: weights have layout `[experts, in, out]`.
        normed: each expert ends with a norm.
        by_index: the block receives expert indices per token and runs as the engine's op.
    """

    up: str
    halves: int
    transposed: bool
    normed: bool = False
    by_index: bool = True


def _experts_layout(block: Any) -> _ExpertsLayout | None:
    """Layout of an experts block; None for other modules."""
    if type(block).__name__ == "Llama4TextExperts":
        return _ExpertsLayout("gate_up_proj", 2, transposed=True, by_index=False)
    if not is_experts_module(block):
        return None
    return _ExpertsLayout(
        "gate_up_proj" if block.has_gate else "up_proj",
        2 if block.has_gate and block.is_concatenated else 1,
        block.is_transposed,
        getattr(block, "has_post_expert_norm", False),
        runs_as_op(block),
    )


def _width(linear: Any, role: Role) -> int:
    """Number of columns (outputs) or rows (inputs) of a linear."""
    outputs, inputs = linear.weight.shape[::-1] if is_transposed(linear) else linear.weight.shape
    return int(outputs if role == "columns" else inputs)


def _choices(heads: HeadSharding) -> str:
    """Valid numbers of ranks."""
    return ", ".join(
        str(n) for n in range(1, heads.query + 1) if not HeadSharding(heads.query, heads.kv, 0, n).indivisible_reason
    )
