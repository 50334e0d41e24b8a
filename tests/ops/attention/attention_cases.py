"""Random steps over a paged cache and their float64 results, for every attention test."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from torchweave.ops.attention.kv_cache_dtype import as_indexable, dequantize_kv, quantize_kv
from torchweave.ops.attention.op import (
    AttentionCall,
    AttentionMetadata,
    AttentionStep,
    LayerKVCache,
    LayerSpec,
    run_attention,
)
from torchweave.ops.rope import Rotary


@dataclass(frozen=True)
class Case:
    """A step: `rows` are `(new tokens, cached tokens)`; None is a padding row.

    rotary: how many numbers of each head the backend turns; 0: it is given heads that have been turned. norm: before that.
    spans: (row, first, last) of new tokens that see each other in both directions.
    gated: with a gate that is half of each head of a projection.
    """

    rows: tuple[tuple[int, int] | None, ...]
    spec: LayerSpec = field(default_factory=lambda: LayerSpec(2, 32, 32, 4))
    block_size: int = 16
    padded_tokens: int = 0
    dtype: torch.dtype = torch.float32
    seed: int = 0
    rotary: int = 0
    norm: bool = False
    unused: float = float("nan")
    spans: tuple[tuple[int, int, int], ...] = ()
    gated: bool = False

    @property
    def decode_only(self) -> bool:
        return all(row is None or row[0] == 1 for row in self.rows) and not self.padded_tokens


@dataclass
class Built:
    """Inputs of one step and its expected outputs."""

    meta: AttentionMetadata
    call: AttentionCall
    cache: LayerKVCache
    expected: Tensor
    expected_cache: LayerKVCache

    @property
    def out(self) -> Tensor:
        return self.call.out

    def run(self, step: AttentionStep) -> None:
        """One layer of the step."""
        assert step.fuses_rope or self.call.cos is None
        run_attention(step, self.call, self.cache)

    def check(self, tolerance: float) -> None:
        """`out` and the cache have the expected values, padding included, and nothing else was written."""
        torch.testing.assert_close(self.out.double().cpu(), self.expected, rtol=tolerance, atol=tolerance)
        for got, wanted in zip(self.cache.tensors, self.expected_cache.tensors, strict=True):
            if as_indexable(got) is not got:
                self._check_kept(got.cpu(), wanted)
                continue
            got, wanted = torch.nan_to_num(got.cpu(), 7.5), torch.nan_to_num(wanted, 7.5)
            if self.call.cos is None:
                assert torch.equal(got, wanted), "the cache is wrong"
            else:  # a norm adds up in another order
                torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)

    def _check_kept(self, got: Tensor, wanted: Tensor) -> None:
        """An FP8 cache, bitwise; where a norm sums in another order, adjacent FP8 values are accepted."""
        steps = (got.view(torch.uint8).int() - wanted.view(torch.uint8).int()).abs()
        assert steps.max() <= (0 if self.call.cos is None else 1), "the cache is wrong"


def reference(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, lookahead: Tensor | None = None) -> Tensor:
    """Attention, with the scores of `call`, of the last `len(q)` of `len(k)` positions of one sequence, in float64.

    lookahead: int `[len(q)]`, how many keys behind its own position a query sees.
    """
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    k_pos = torch.arange(len(k))[None]
    q_pos = torch.arange(len(k) - len(q), len(k))[:, None]
    scores = torch.einsum("qhd,khd->hqk", q, k) * call.scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.alibi_slopes is not None:
        scores = scores - call.alibi_slopes.double().cpu()[:, None, None] * (q_pos - k_pos)
    seen = k_pos <= q_pos + (0 if lookahead is None else lookahead[:, None])
    if call.window:
        seen &= q_pos - k_pos < call.window
    if call.chunk:
        seen &= k_pos // call.chunk == q_pos // call.chunk
    weights = scores.masked_fill(~seen, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if call.sinks is not None:
        total = total + call.sinks.double().cpu().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, v)


def build(case: Case, device: str = "cpu") -> Built:
    """Draw the tensors of `case`. Memory that no row may use is `case.unused`: other blocks, tails of blocks; `out` is NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    spec, size = case.spec, case.block_size

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    lengths = [sum(row) if row else 0 for row in case.rows]
    counts = [row[0] if row else 0 for row in case.rows]
    per_row = max(-(-max(lengths, default=0) // size), 1) + 1
    num_slots = len(case.rows) + 2
    num_blocks = num_slots * per_row + 3
    table = torch.randperm(num_blocks, generator=generator)[: num_slots * per_row].view(num_slots, per_row).int()
    slots = torch.randperm(num_slots, generator=generator)[: len(case.rows)].int()
    padding = torch.tensor([row is None for row in case.rows])
    sinks = draw(spec.num_heads).to(device) if spec.sinks else None
    slopes = torch.rand(spec.num_heads, generator=generator).to(device) * 0.3 if spec.alibi else None
    decode_only = case.decode_only
    tokens = len(case.rows) if decode_only else sum(counts) + case.padded_tokens
    nan = float("nan")
    kept, scales = spec.cache_dtype or case.dtype, (spec.k_scale, spec.v_scale)
    cache = LayerKVCache(
        torch.full((num_blocks, size, spec.num_kv_heads, spec.head_dim), case.unused).to(kept),
        torch.full((num_blocks, size, spec.num_kv_heads, spec.value_dim), case.unused).to(kept),
        *scales,
    )
    after = LayerKVCache(cache.k.clone(), cache.v.clone(), *scales)
    q, k = draw(tokens, spec.num_heads, spec.head_dim), draw(tokens, spec.num_kv_heads, spec.head_dim)
    given_q, given_k, rotary = q, k, None
    if case.rotary:
        weights = (draw(spec.head_dim), draw(spec.head_dim)) if case.norm else ()
        rotary = Rotary(draw(1, tokens, case.rotary), draw(1, tokens, case.rotary), *weights, eps=1e-6)
        q, k = rotary.apply_rotary(q, k)
        rotary = Rotary(*(item.to(device) if isinstance(item, Tensor) else item for item in rotary))
    v = draw(tokens, spec.num_kv_heads, spec.value_dim)
    mapping = torch.full((tokens,), -1, dtype=torch.int64)
    expected = torch.zeros(tokens, spec.num_heads, spec.value_dim, dtype=torch.float64)
    out = torch.full((tokens, spec.num_heads, spec.value_dim), nan, dtype=case.dtype, device=device)
    scores = (spec.head_dim**-0.5, spec.window, spec.softcap, sinks, spec.chunk)
    tensors = (given_q.to(device), given_k.to(device), v.to(device), out)
    gate = draw(tokens, spec.num_heads, 2 * spec.value_dim)[..., spec.value_dim :] if case.gated else None
    call = AttentionCall(
        *tensors, 0, *scores, *(rotary or ()), alibi_slopes=slopes, gate=None if gate is None else gate.to(device)
    )
    lookahead = torch.zeros(tokens, dtype=torch.int32)
    start, starts = 0, [0]
    for i, row in enumerate(case.rows):
        start = i if decode_only else start
        if row is not None:
            count, cached = row
            blocks = table[slots[i]].long()
            place = torch.arange(cached + count)
            place = blocks[place // size] * size + place % size
            keys = torch.cat([draw(cached, spec.num_kv_heads, spec.head_dim), k[start : start + count]])
            values = torch.cat([draw(cached, spec.num_kv_heads, spec.value_dim), v[start : start + count]])
            keys, values = quantize_kv(keys, kept, spec.k_scale), quantize_kv(values, kept, spec.v_scale)
            for store, content in ((cache, cached), (after, cached + count)):
                as_indexable(store.k).flatten(0, 1)[place[:content]] = as_indexable(keys)[:content]
                as_indexable(store.v).flatten(0, 1)[place[:content]] = as_indexable(values)[:content]
            mapping[start : start + count] = place[cached:]
            for _, first, last in (span for span in case.spans if span[0] == i):
                lookahead[start + first : start + last] = torch.arange(last - first - 1, -1, -1)
            seen = (
                dequantize_kv(keys, spec.k_scale, torch.float32),
                dequantize_kv(values, spec.v_scale, torch.float32),
            )
            new = slice(start, start + count)
            expected[new] = reference(q[new], *seen, call, lookahead[new])
            if gate is not None:
                expected[new] *= gate[new].double().sigmoid()
            start += count
        starts.append(start)
    meta = AttentionMetadata(
        slots=torch.where(padding, -1, slots).int().to(device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=mapping.to(device),
        num_rows=len(case.rows),
        num_tokens=tokens,
        decode_only=decode_only,
        max_seq_len=max(lengths, default=1),
        lookahead=lookahead.to(device) if case.spans else None,
    )
    cache = LayerKVCache(cache.k.to(device), cache.v.to(device), *scales)
    return Built(meta, call, cache, expected, after)


def in_fp8(case: Case, cache_dtype: torch.dtype = torch.float8_e4m3fn) -> Case:
    """The same step over a cache in FP8 that saturates here and there."""
    return replace(case, spec=replace(case.spec, cache_dtype=cache_dtype, k_scale=0.004, v_scale=1.5))


PLAIN = LayerSpec(2, 32, 32, 4)
CASES: dict[str, Case] = {
    "decode_one": Case(((1, 0),)),
    "decode": Case(((1, 5), (1, 0), (1, 40), (1, 31), (1, 16))),
    "decode_padded": Case(((1, 5), (1, 33), None, None)),
    "decode_holes": Case(((1, 5), None, (1, 33))),
    "decode_window": Case(((1, 5), (1, 50), (1, 70)), LayerSpec(2, 32, 32, 4, window=16)),
    "decode_chunk": Case(((1, 5), (1, 31), (1, 32), (1, 70)), LayerSpec(2, 32, 32, 4, chunk=16)),
    "decode_softcap": Case(((1, 5), (1, 50)), LayerSpec(2, 32, 32, 4, softcap=2.0)),
    "decode_sinks": Case(((1, 5), (1, 50)), LayerSpec(2, 32, 32, 4, sinks=True)),
    "decode_alibi": Case(((1, 5), (1, 50), (1, 0)), LayerSpec(2, 32, 32, 4, alibi=True)),
    "decode_all": Case(((1, 5), (1, 50)), LayerSpec(2, 32, 32, 4, window=20, softcap=3.0, sinks=True)),
    "decode_value_dim": Case(((1, 5), (1, 50)), LayerSpec(3, 48, 32, 3)),
    "context": Case(((23, 0),)),
    "context_many": Case(((3, 0), (17, 0), (40, 0), (19, 0))),
    "chunked_context": Case(((20, 37), (9, 3))),
    "mixed": Case(((1, 44), (1, 0), (13, 0), (18, 25)), padded_tokens=3),
    "mixed_padding_rows": Case(((1, 44), (13, 0), None, None), padded_tokens=5),
    "mixed_window": Case(((1, 44), (40, 0), (18, 25)), LayerSpec(2, 32, 32, 4, window=12)),
    "mixed_chunk": Case(((1, 44), (40, 0), (18, 25)), LayerSpec(2, 32, 32, 4, chunk=16)),
    "mixed_softcap": Case(((1, 44), (40, 0), (18, 25)), LayerSpec(2, 32, 32, 4, softcap=2.0)),
    "mixed_sinks": Case(((1, 44), (40, 0), (18, 25)), LayerSpec(2, 32, 32, 4, sinks=True, window=24)),
    "mixed_alibi": Case(((1, 44), (40, 0), (18, 25)), LayerSpec(2, 32, 32, 6, alibi=True), padded_tokens=2),
    "mixed_alibi_window": Case(((1, 44), (40, 0), (18, 25)), LayerSpec(2, 32, 32, 4, alibi=True, window=12)),
    "context_alibi": Case(((23, 0),), LayerSpec(4, 32, 32, 4, alibi=True)),
    "mixed_value_dim": Case(((1, 44), (20, 9)), LayerSpec(2, 48, 32, 6)),
    "mixed_narrow_values": Case(((1, 44), (20, 9)), LayerSpec(2, 32, 16, 6)),
    "mixed_odd_head": Case(((1, 44), (20, 9)), LayerSpec(1, 80, 80, 5), block_size=32),
    "context_spans": Case(((23, 0),), spans=((0, 2, 21),)),
    "mixed_spans": Case(((1, 44), (40, 0), (18, 25)), padded_tokens=3, spans=((1, 3, 9), (1, 9, 30), (2, 0, 18))),
    "mixed_spans_window": Case(
        ((1, 44), (40, 0), (18, 25), (9, 0)),
        LayerSpec(2, 32, 32, 4, window=12),
        spans=((1, 0, 30), (2, 5, 18)),
    ),
    "decode_gated": Case(((1, 5), (1, 0), (1, 70), None), LayerSpec(2, 48, 32, 6), gated=True),
    "mixed_gated": Case(((1, 44), (1, 0), (13, 0), (18, 25)), padded_tokens=3, gated=True),
    "only_padding": Case((None, None), padded_tokens=4),
}
ROTARY_CASES: dict[str, Case] = {
    "turned_decode": Case(((1, 5), (1, 0), (1, 40), None), rotary=32),
    "turned_decode_part": Case(((1, 5), (1, 33)), LayerSpec(1, 24, 16, 3), rotary=8),
    "turned_decode_norm": Case(((1, 5), (1, 40)), LayerSpec(2, 32, 32, 4, window=16), rotary=24, norm=True),
    "turned_mixed": Case(((1, 44), (1, 0), (13, 0), (18, 25)), padded_tokens=3, rotary=32),
    "turned_mixed_norm": Case(((1, 44), (20, 9)), LayerSpec(2, 48, 32, 6), padded_tokens=2, rotary=32, norm=True),
}
"""Steps whose queries and keys the backend rotates (RoPE)."""
