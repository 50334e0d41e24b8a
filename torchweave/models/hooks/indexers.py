"""Instance hooks of sparse attention by an indexer: index and attend become boundary ops, the projections stay in the graph.

transformers' attention of these models passes what its indexer returns to the attention function, as `indices` or `block_indices`.
The hooked indexer returns positions that an index op selects; `attention_forward` passes them to `torchweave::sparse_attention`.
Layers without an indexer of their own get the selection of an earlier layer from the model.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch import Tensor, nn

from torchweave.models.attention import UnsupportedModel, layer_number

_ROTARY_BY_CLASS = {
    "DeepseekV32Indexer": "apply_rotary_pos_emb",
    "AXK2Indexer": "apply_rotary_pos_emb",
    "HYV4Indexer": "apply_rotary_pos_emb",
    "GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave",
    "Dots3NoteTextIndexer": "apply_rotary_pos_emb_interleave",
}
"""Indexer classes, and the function of their module that rotates the first channels; those of HunYuan V4 are the last."""


def hook_indexers(model: nn.Module) -> list[str]:
    """Replace indexers and give each a KV cache after those of the attention layers; returns the hooked classes."""
    names = (*_ROTARY_BY_CLASS, "MiniMaxM3VLIndexer")
    owners: list[Any] = [each for each in model.modules() if type(getattr(each, "indexer", None)).__name__ in names]
    num_layers: Any = model.config.num_hidden_layers if owners else 0  # type: ignore[union-attr]
    for number, owner in enumerate(owners):
        owner.indexer.torchweave_layer = num_layers + number
        if type(owner.indexer).__name__ in _ROTARY_BY_CLASS:
            owner.forward = types.MethodType(_attention_with_mask, owner)
            owner.indexer.forward = types.MethodType(_indexer_forward, owner.indexer)
        else:
            if owner.indexer.num_heads not in (1, owner.config.num_key_value_heads):
                raise UnsupportedModel(
                    f"{type(model).__name__} has {owner.indexer.num_heads} heads of its indexer for "
                    f"{owner.config.num_key_value_heads} KV heads; as many are expected, or one."
                )
            owner.indexer.forward = types.MethodType(_block_indexer_forward, owner.indexer)
    return sorted({type(owner.indexer).__name__ for owner in owners})


def _attention_with_mask(
    self: nn.Module, hidden_states: Tensor, attention_mask: Tensor | None = None, **given: Any
) -> Any:
    """The original attention, which takes a slice of its mask for the indexer; the hooked indexer ignores it."""
    assert attention_mask is None, "the engine builds no masks"
    return type(self).forward(self, hidden_states, attention_mask=hidden_states.new_zeros(1, 1, 1, 1), **given)


def _indexer_forward(
    module: Any,
    hidden_states: Tensor,
    compressed_query: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> Tensor:
    """Selected positions, int32 `[1, T, index_topk]`, of `[1, T, hidden]` and the compressed queries `[1, T, q_lora_rank]`."""
    rotate = getattr(inspect.getmodule(type(module)), _ROTARY_BY_CLASS[type(module).__name__])
    order = -1 if type(module).__name__ == "HYV4Indexer" else 1
    widths = [module.qk_rope_head_dim, module.head_dim - module.qk_rope_head_dim][::order]
    key = module.k_norm(module.wk(hidden_states).to(module.k_norm.weight.dtype)).to(hidden_states.dtype)
    rotated_q, q_pass = (
        module.wq_b(compressed_query).unflatten(-1, (module.n_heads, module.head_dim)).split(widths, dim=-1)[::order]
    )
    rotated_k, k_pass = key.unsqueeze(2).split(widths, dim=-1)[::order]
    rotated_q, rotated_k = rotate(rotated_q, rotated_k, *position_embeddings, unsqueeze_dim=2)
    q, k = (
        torch.cat([rotated, rest][::order], dim=-1)[0] for rotated, rest in ((rotated_q, q_pass), (rotated_k, k_pass))
    )
    weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype)).float() * module.n_heads**-0.5
    indices = torch.empty(q.shape[0], module.index_topk, dtype=torch.int32, device=q.device)
    torch.ops.torchweave.sparse_index(q, k[:, 0], weights[0], indices, layer_number(module), module.softmax_scale)
    return indices[None]


def _block_indexer_forward(
    module: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any
) -> Tensor:
    """Positions in the selected blocks of keys, int32 `[1, T, H, index_topk_blocks * index_block_size]`, of `[1, T, hidden]`."""
    q = module.q_norm(module.q_proj(hidden_states).unflatten(-1, (-1, module.head_dim))).transpose(1, 2)
    k = module.k_norm(module.k_proj(hidden_states)[:, :, None]).transpose(1, 2)
    rotate: Any = inspect.getmodule(type(module)).apply_rotary_pos_emb  # type: ignore[union-attr]
    q, k = rotate(q, k, *(table[..., : module.head_dim] for table in position_embeddings))
    size = (q.shape[2], module.num_heads, module.topk_blocks * module.block_size)
    indices = torch.empty(size, dtype=torch.int32, device=q.device)
    torch.ops.torchweave.sparse_block_index(
        q[0].transpose(0, 1), k[0, 0], indices, layer_number(module), module.block_size, module.local_blocks
    )
    return indices[None]
