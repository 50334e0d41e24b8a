"""Row layouts of fused query/key/value projections, by attention class; shapes do not reveal them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchweave.models.weights.shards import HeadSharding, Range

Layout = Callable[[Any, HeadSharding, int], tuple[Range, ...] | None]
"""(attention, heads, rows of the projection) -> this rank's rows; None: these heads cannot be sharded."""


def _side_by_side(_: Any, heads: HeadSharding, rows: int) -> tuple[Range, ...]:
    """`[all queries | all keys | all values]`."""
    unit = rows // (heads.query + 2 * heads.kv)
    keys = heads.query * unit
    return heads.query_range(unit), heads.kv_range(unit, keys), heads.kv_range(unit, keys + heads.kv * unit)


def _head_by_head(_: Any, heads: HeadSharding, rows: int) -> tuple[Range, ...] | None:
    """`[query, key, value]` per head; as many KV heads as query heads."""
    return (heads.query_range(rows // heads.query),)


def _gpt_bigcode(module: Any, heads: HeadSharding, rows: int) -> tuple[Range, ...] | None:
    return _side_by_side(module, heads, rows) if module.multi_query else _head_by_head(module, heads, rows)


def _falcon(module: Any, heads: HeadSharding, rows: int) -> tuple[Range, ...] | None:
    if not module.new_decoder_architecture:
        return _gpt_bigcode(module, heads, rows)
    group = rows // heads.kv  # queries of a KV head, then its key and value
    if heads.kv % heads.size == 0:
        return (heads.kv_range(group),)
    unit = group // (heads.query // heads.kv + 2)
    start = heads.first_local_kv * group
    first = heads.rank * heads.num_local_query - heads.first_local_kv * (heads.query // heads.kv)
    keys = start + group - 2 * unit
    return (start + first * unit, start + (first + heads.num_local_query) * unit), (keys, keys + 2 * unit)


def _codegen(_: Any, heads: HeadSharding, rows: int) -> tuple[Range, ...] | None:
    """Four blocks `[queries | values | keys]`; a rank's heads form four blocks again."""
    blocks, unit = 4, rows // (3 * heads.query)
    if heads.num_local_query % blocks:
        return None
    in_block, own = heads.query // blocks, heads.num_local_query // blocks
    ranges = []
    for block in range(blocks):
        head = heads.rank * heads.num_local_query + block * own
        for part in range(3):
            for h in range(head, head + own):
                place = ((h // in_block) * 3 + part) * in_block + h % in_block
                ranges.append((place * unit, (place + 1) * unit))
    return tuple(ranges)


_LAYOUTS: dict[tuple[str, str], Layout] = {
    ("Phi3Attention", "qkv_proj"): _side_by_side,
    ("GPT2Attention", "c_attn"): _side_by_side,
    ("GPTBigCodeAttention", "c_attn"): _gpt_bigcode,
    ("GPTNeoXAttention", "query_key_value"): _head_by_head,
    ("GPTNeoXJapaneseAttention", "query_key_value"): _head_by_head,
    ("PersimmonAttention", "query_key_value"): _head_by_head,
    ("FalconAttention", "query_key_value"): _falcon,
    ("CodeGenAttention", "qkv_proj"): _codegen,
}
FUSED = frozenset(leaf for _, leaf in _LAYOUTS)
"""Names of fused projections."""


def layout_of(module: Any, leaf: str) -> Layout | None:
    """Layout of a fused projection; None: unknown."""
    return _LAYOUTS.get((type(module).__name__, leaf))


WIDTHS = {
    "GPT2Attention": ("split_size",),
    "GPTBigCodeAttention": ("embed_dim", "split_size"),
    "CodeGenAttention": ("embed_dim",),
}
"""Attributes with the total width of the query heads, read by forwards, by class."""
