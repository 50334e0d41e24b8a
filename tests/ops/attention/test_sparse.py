"""Sparse attention, and attention with a bias by distance, over a paged cache against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchweave.ops.attention import sparse
from torchweave.ops.attention.op import AttentionMetadata, LayerKVCache
from torchweave.ops.attention.sparse import run_sparse_op

OPS = torch.ops.torchweave
BLOCK, TOPK = 4, 5
HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 6, 3
INDEX_HEADS, INDEX_DIM = 8, 7
# Tokens before the step and in the step, of each slot.
STEPS = {
    "decode": ((9, 1), (0, 1), (30, 1)),
    "prefill": ((0, 11), (0, 3)),
    "mixed": ((14, 1), (6, 9), (0, 13)),
}


def random_sequences(generator: torch.Generator, lengths: list[int]) -> list[dict[str, Tensor]]:
    sizes = {
        "q": (HEADS, DIM), "k": (KV_HEADS, DIM), "v": (KV_HEADS, VALUE_DIM),
        "index_q": (INDEX_HEADS, INDEX_DIM), "index_k": (INDEX_DIM,), "weights": (INDEX_HEADS,),
    }  # fmt: skip
    return [
        {name: torch.randn(length, *size, generator=generator) for name, size in sizes.items()} for length in lengths
    ]


def expected(sequence: dict[str, Tensor], sinks: Tensor | None) -> tuple[list[set[int]], Tensor]:
    """Selected positions and attention of each token, in float64."""
    wide = {name: tensor.double() for name, tensor in sequence.items()}
    scores = (torch.einsum("thd,sd->hts", wide["index_q"], wide["index_k"]) * 0.5).relu()
    scores = torch.einsum("th,hts->ts", wide["weights"], scores)
    chosen = [set(scores[t, : t + 1].topk(min(TOPK, t + 1)).indices.tolist()) for t in range(len(scores))]
    mask = torch.full_like(scores, float("-inf"))
    for t, positions in enumerate(chosen):
        mask[t, sorted(positions)] = 0.0
    k, v = (wide[name].repeat_interleave(HEADS // KV_HEADS, dim=1) for name in ("k", "v"))
    logits = torch.einsum("thd,shd->hts", wide["q"], k) * 0.3 + mask
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, len(scores), 1)], -1)
    weights = logits.softmax(-1)[..., : len(scores)]
    return chosen, torch.einsum("hts,shd->thd", weights, v)


class _Engine:
    """Caches, a block table and the two calls of a step."""

    def __init__(self, slots: int, longest: int, generator: torch.Generator) -> None:
        blocks = -(-longest // BLOCK)
        self.table = torch.randperm(blocks * slots, generator=generator).view(slots, blocks).int()

        def cache(heads: int, dim: int, value_dim: int) -> LayerKVCache:
            shape = (self.table.numel(), BLOCK, heads)
            return LayerKVCache(torch.full((*shape, dim), torch.nan), torch.full((*shape, value_dim), torch.nan))

        half = INDEX_DIM // 2
        self.caches = [cache(KV_HEADS, DIM, VALUE_DIM), cache(1, half, INDEX_DIM - half)]

    def run(
        self, sequences: list[dict[str, Tensor]], rows: list[tuple[int, int, int]], padded: int, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rows are `(slot, begin, end)`; returns indices and attention of all tokens."""
        decode_only = not padded and all(end - begin == 1 for _, begin, end in rows)
        places = [(slot, position) for slot, begin, end in rows for position in range(begin, end)]
        mapping = [int(self.table[slot, p // BLOCK]) * BLOCK + p % BLOCK for slot, p in places] + [-1] * padded
        start = torch.tensor([0, *(end - begin for _, begin, end in rows)]).cumsum(0).int()
        meta = AttentionMetadata(
            torch.tensor([slot for slot, _, _ in rows], dtype=torch.int32), start,
            torch.tensor([end for _, _, end in rows], dtype=torch.int32), self.table, torch.tensor(mapping),
            len(rows), len(mapping), decode_only, self.table.shape[1] * BLOCK,
        )  # fmt: skip

        def flat(name: str) -> Tensor:
            parts = [sequences[slot][name][begin:end] for slot, begin, end in rows]
            return torch.cat([*parts, torch.full((padded, *parts[0].shape[1:]), torch.nan)])

        indices = torch.full((len(mapping), TOPK), 99, dtype=torch.int32)
        out = torch.full((len(mapping), HEADS, VALUE_DIM), torch.nan)
        index = (flat("index_q"), flat("index_k"), flat("weights"), indices, 1, 0.5)
        run_sparse_op([meta], self.caches, OPS.sparse_index.default, index, {})
        call = (flat("q"), flat("k"), flat("v"), indices, out, 0, 0.3, sinks)
        run_sparse_op([meta], self.caches, OPS.sparse_attention.default, call, {})
        return indices, out

    def step_of_one(self, slot: int, begin: int, end: int) -> AttentionMetadata:
        """A step with tokens `begin` to `end` of the sequence of one slot."""
        places = torch.arange(begin, end)
        mapping = self.table[slot, places // BLOCK].long() * BLOCK + places % BLOCK
        starts = torch.tensor([0, end - begin])
        return AttentionMetadata(
            torch.tensor([slot]), starts, torch.tensor([end]), self.table, mapping, 1, end - begin, end - begin == 1, 40
        )


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("padded", [0, 2])
@pytest.mark.parametrize("step", STEPS)
def test_step_equals_float64(step: str, padded: int, with_sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "PART_BYTES", 4 * 100 * INDEX_DIM)  # parts of a few tokens
    generator = torch.Generator().manual_seed(0)
    sinks = torch.randn(HEADS, generator=generator) if with_sinks else None
    sequences = random_sequences(generator, [before + new for before, new in STEPS[step]])
    engine = _Engine(len(sequences), 40, generator)
    for slot, (before, _) in enumerate(STEPS[step]):
        if before:
            engine.run(sequences, [(slot, 0, before)], 0, sinks)
    rows = [(slot, before, before + new) for slot, (before, new) in enumerate(STEPS[step])]
    indices, out = engine.run(sequences, rows, padded, sinks)
    token = 0
    for slot, begin, end in rows:
        chosen, attended = expected(sequences[slot], sinks)
        for position in range(begin, end):
            found = indices[token][indices[token] >= 0].tolist()
            assert len(found) == len(set(found)) and set(found) == chosen[position]
            token += 1
        torch.testing.assert_close(out[token - end + begin : token].double(), attended[begin:end], rtol=1e-4, atol=1e-5)
    assert not out[token:].any(), "padded tokens are zero"


@pytest.mark.parametrize("local_blocks", [0, 1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_blocks_of_keys_equal_float64(step: str, local_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "PART_BYTES", 4 * 100 * INDEX_DIM)
    generator, size, most = torch.Generator().manual_seed(1), 3, 2
    sequences = random_sequences(generator, [before + new for before, new in STEPS[step]])
    engine = _Engine(len(sequences), 40, generator)
    for slot, (before, new) in enumerate(STEPS[step]):
        one = sequences[slot]
        q, k = one["index_q"][:, :KV_HEADS], one["index_k"]
        for begin, end in ((0, before), (before, before + new)):
            if begin == end:
                continue
            meta = engine.step_of_one(slot, begin, end)
            indices = torch.full((end - begin, KV_HEADS, most * size), 99, dtype=torch.int32)
            call = (q[begin:end], k[begin:end], indices, 1, size, local_blocks)
            run_sparse_op([meta], engine.caches, OPS.sparse_block_index.default, call, {})
        scores = torch.einsum("thd,sd->hts", q.double(), k.double())
        for token, head in ((token, head) for token in range(before, before + new) for head in range(KV_HEADS)):
            groups = [range(first, min(first + size, token + 1)) for first in range(0, token + 1, size)]
            best = [scores[head, token, list(group)].max().item() for group in groups]
            order = sorted(range(len(groups)), key=lambda n: (n < len(groups) - local_blocks, -best[n]))
            found = indices[token - before, head]
            chosen = found[found >= 0].tolist()
            assert len(chosen) == len(set(chosen))
            assert set(chosen) == {place for n in order[:most] for place in groups[n]}


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_bias_by_distance_equals_float64(
    step: str, with_sinks: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "PART_BYTES", 4 * 300)
    generator, extent = torch.Generator().manual_seed(4), window or 7
    sequences = random_sequences(generator, [before + new for before, new in STEPS[step]])
    engine = _Engine(len(sequences), 40, generator)
    for slot, (before, new) in enumerate(STEPS[step]):
        one, length = sequences[slot], before + new
        bias = torch.randn(length, HEADS, extent, generator=generator)
        sinks = torch.randn(length, HEADS, generator=generator) if with_sinks else None
        for begin, end in ((0, before), (before, length)):
            if begin == end:
                continue
            meta = engine.step_of_one(slot, begin, end)
            out = torch.full((end - begin, HEADS, VALUE_DIM), torch.nan)
            q, k, v = (one[name][begin:end] for name in "qkv")
            now = None if sinks is None else sinks[begin:end]
            call = (q, k, v, bias[begin:end], out, 0, 0.3, window, now)
            run_sparse_op([meta], engine.caches, OPS.relative_attention.default, call, {})
        distance = torch.arange(length)[:, None] - torch.arange(length)
        k, v = (one[name].double().repeat_interleave(HEADS // KV_HEADS, dim=1) for name in "kv")
        scores = torch.einsum("thd,shd->hts", one["q"].double(), k) * 0.3
        near = (distance >= 0) & (distance < extent)
        by_key = bias.double().gather(2, distance.clamp(0, extent - 1)[:, None].expand(-1, HEADS, -1))
        scores = scores + by_key.transpose(0, 1).masked_fill(~near, 0.0)
        seen = (distance >= 0) & ((distance < window) if window else True)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().T[..., None]], -1)
        expected_out = torch.einsum("hts,shd->thd", scores.softmax(-1)[..., :length], v)
        torch.testing.assert_close(out.double(), expected_out[before:], rtol=1e-4, atol=1e-5)


def test_keys_of_each_kv_head() -> None:
    """With indices by KV head, each head attends as if it were alone."""
    one = random_sequences(torch.Generator().manual_seed(2), [9])[0]
    indices = torch.randint(0, 3, (9, KV_HEADS, 2), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    indices = indices.minimum(torch.arange(9, dtype=torch.int32)[:, None, None])
    out = torch.empty(9, HEADS, VALUE_DIM)
    OPS.sparse_attention(one["q"], one["k"], one["v"], indices, out, 0, 0.3)
    group = HEADS // KV_HEADS
    for head in range(KV_HEADS):
        queries, alone = slice(head * group, (head + 1) * group), torch.empty(9, group, VALUE_DIM)
        k, v = one["k"][:, head : head + 1], one["v"][:, head : head + 1]
        OPS.sparse_attention(one["q"][:, queries], k, v, indices[:, head], alone, 0, 0.3)
        torch.testing.assert_close(out[:, queries], alone)


class _NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("padded", [0, 2])
def test_nothing_is_read_on_the_host(padded: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = random_sequences(generator, [7, 1])
    engine = _Engine(2, 8, generator)
    with _NoHostReads():
        for op, args in _calls(engine, sequences, padded):
            op(*args)


def _calls(engine: _Engine, sequences: list[dict[str, Tensor]], padded: int) -> Any:
    slots = torch.arange(7 + padded).masked_fill(torch.arange(7 + padded) >= 7, -1)
    meta = AttentionMetadata(
        torch.tensor([0, -1]), torch.tensor([0, 7, 7]), torch.tensor([7, 0]), engine.table, slots, 2, 7 + padded, False, 8
    )  # fmt: skip
    one = {name: torch.cat([tensor, tensor[:padded]]) for name, tensor in sequences[0].items()}
    indices = torch.empty(7 + padded, TOPK, dtype=torch.int32)
    index = (one["index_q"], one["index_k"], one["weights"], indices, 1, 0.5)
    attend = (one["q"], one["k"], one["v"], indices, torch.empty(7 + padded, HEADS, VALUE_DIM), 0, 0.3)
    by_head = torch.empty(7 + padded, INDEX_HEADS, 6, dtype=torch.int32)
    blocks = (one["index_q"], one["index_k"], by_head, 1, 3, 1)
    bias = torch.zeros(7 + padded, HEADS, 3)
    relative = (one["q"], one["k"], one["v"], bias, torch.empty(7 + padded, HEADS, VALUE_DIM), 0, 0.3, 4)
    calls = {
        OPS.sparse_index.default: index,
        OPS.sparse_block_index.default: blocks,
        OPS.sparse_attention.default: attend,
        OPS.relative_attention.default: relative,
    }
    for op, args in calls.items():
        yield run_sparse_op, ([meta], engine.caches, op, args, {})


def test_padding_alone_changes_no_cache() -> None:
    generator = torch.Generator().manual_seed(0)
    engine = _Engine(1, 8, generator)
    for cache in engine.caches:
        cache.k.zero_()
        cache.v.zero_()
    meta = AttentionMetadata(
        torch.tensor([-1]), torch.tensor([0, 0]), torch.tensor([0]), engine.table, torch.tensor([-1, -1]), 1, 2, False, 8
    )  # fmt: skip
    k, v = torch.ones(2, KV_HEADS, DIM), torch.ones(2, KV_HEADS, VALUE_DIM)
    out = torch.empty(2, HEADS, VALUE_DIM)
    call = (torch.ones(2, HEADS, DIM), k, v, torch.full((2, TOPK), -1, dtype=torch.int32), out, 0, 1.0)
    run_sparse_op([meta], engine.caches, OPS.sparse_attention.default, call, {})
    assert not engine.caches[0].k.any() and not engine.caches[0].v.any() and not out.any()


def test_ops_without_an_engine_are_valid_custom_ops() -> None:
    one = random_sequences(torch.Generator().manual_seed(0), [9])[0]
    indices = torch.empty(9, TOPK, dtype=torch.int32)
    index = (one["index_q"], one["index_k"], one["weights"], indices, 1, 0.5)
    torch.library.opcheck(OPS.sparse_index.default, index)
    blocks = torch.empty(9, INDEX_HEADS, 6, dtype=torch.int32)
    torch.library.opcheck(OPS.sparse_block_index.default, (one["index_q"], one["index_k"], blocks, 1, 3, 1))
    OPS.sparse_index(*index)
    chosen, attended = expected(one, None)
    assert [set(row[row >= 0].tolist()) for row in indices] == chosen
    out = torch.empty(9, HEADS, VALUE_DIM)
    call = (one["q"], one["k"], one["v"], indices, out, 0, 0.3)
    torch.library.opcheck(OPS.sparse_attention.default, call)
    OPS.sparse_attention(*call)
    bias = torch.randn(9, HEADS, 3)
    torch.library.opcheck(
        OPS.relative_attention.default, (one["q"], one["k"], one["v"], bias, torch.empty_like(out), 0, 0.3)
    )
    torch.testing.assert_close(out.double(), attended, rtol=1e-4, atol=1e-5)
