"""A small engine for tests: continuous batching over a paged cache, in plain Python, around a `DecoderStep`.

Prompts are read in chunks, rows of several requests share a step, tokens are padded, and each sequence's blocks lie
scattered, so that a mistake in positions, windows or masks changes tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchweave.compiler import eager_forward
from torchweave.models import DecoderStep
from torchweave.ops.attention.choose import get_backend
from torchweave.ops.attention.op import AttentionCall, AttentionMetadata, run_attention
from torchweave.ops.attention.sparse import SPARSE_OPS, run_sparse_op
from torchweave.ops.recurrent.op import RECURRENT_OPS, run_recurrent_op

BLOCK = 16


def paged_tokens(
    step: DecoderStep,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    chunk: int = 24,
    device: str = "cpu",
    spoil: dict[str, Any] | None = None,
    lost: str = "",
) -> list[list[int]]:
    """Greedy tokens of each prompt, all of them in flight together; the last one joins two steps late.

    `spoil` replaces arguments of the attention op, to see that tokens depend on them; `lost` is a recurrent op whose states
    are zeroed before each step.
    """
    dtype = next(step.parameters()).dtype
    backend = get_backend("torch", device)
    blocks_each = -(-(max(map(len, prompts)) + num_tokens) // BLOCK)
    order = torch.randperm(blocks_each * len(prompts), generator=torch.Generator().manual_seed(1))
    table = order.view(len(prompts), blocks_each).to(torch.int32)
    caches = [
        backend.allocate(spec, table.numel(), BLOCK, dtype, torch.device(device)) for spec in step.attention_layers
    ]
    for cache in caches:  # memory that was never written must never be read
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)
    states = [
        torch.full((len(prompts), *call.shape), torch.nan, dtype=call.dtype, device=device)
        for call in step.recurrent_layers
    ]
    forward = eager_forward(step, {"torchweave::attention", *(op.name() for op in RECURRENT_OPS | SPARSE_OPS)})
    sequences, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    answers: list[list[int]] = [[] for _ in prompts]
    number = 0
    while any(len(answer) < num_tokens for answer in answers):
        rows = []
        for i, sequence in enumerate(sequences):
            late = i == len(sequences) - 1 and number < 2
            if not late and len(answers[i]) < num_tokens:
                rows.append((i, sequence[done[i] :][:chunk]))
        rows.sort(key=lambda row: len(row[1]) > 1)
        ids, positions, meta = _metadata(rows, done, table, number, device)
        attention = backend.begin(meta)

        for state, call in zip(states, step.recurrent_layers, strict=True):
            if lost and lost in call.op.name():
                state.zero_()

        def boundary(
            op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], attention: Any = attention, meta: Any = meta
        ) -> None:
            if op in RECURRENT_OPS:
                run_recurrent_op(meta, states, op, args, kwargs)
                return
            if op in SPARSE_OPS:
                run_sparse_op([meta], caches, op, args, kwargs)
                return
            named = {argument.name: argument.default_value for argument in op._schema.arguments}
            named |= dict(zip(named, args, strict=False)) | kwargs | (spoil or {})
            run_attention(attention, AttentionCall(**named), caches[named["layer"]])

        ends = meta.query_start[1:].long() - 1
        chosen = forward(boundary, ids, positions, ends).argmax(-1).tolist()
        for (i, given), token in zip(rows, chosen, strict=True):
            done[i] += len(given)
            if done[i] == len(sequences[i]):
                sequences[i].append(token)
                answers[i].append(token)
        number += 1
    return answers


def _metadata(
    rows: list[tuple[int, list[int]]], done: list[int], table: torch.Tensor, number: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    ids = [token for _, given in rows for token in given]
    positions = [done[i] + offset for i, given in rows for offset in range(len(given))]
    owners = [i for i, given in rows for _ in given]
    slots = [int(table[i, p // BLOCK]) * BLOCK + p % BLOCK for i, p in zip(owners, positions, strict=True)]
    padding = number % 3
    lengths = [done[i] + len(given) for i, given in rows]
    start = torch.tensor([0, *(len(given) for _, given in rows)]).cumsum(0)
    meta = AttentionMetadata(
        slots=torch.tensor([i for i, _ in rows], dtype=torch.int32, device=device),
        query_start=start.to(device, torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.tensor(slots + [-1] * padding, device=device),
        num_rows=len(rows),
        num_tokens=len(ids) + padding,
        decode_only=False,
        max_seq_len=max(lengths),
    )
    none = [0] * padding
    return torch.tensor(ids + none, device=device), torch.tensor(positions + none, device=device), meta
