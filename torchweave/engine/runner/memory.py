"""How many blocks the KV cache gets: what is left when weights, activations and graphs are in place, measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchweave.config import Plan
from torchweave.engine.kv_cache.layer_groups import AttentionWindow, longest_sequence, max_blocks_needed
from torchweave.engine.scheduler.step_builder import LOOKAHEAD_TOKENS
from torchweave.ops.attention.op import LayerSpec

_RESERVE = 256 << 20  # bytes left free on a GPU, for libraries that allocate on first use and for fragments
GIB = 1 << 30


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on a GPU before the KV cache is allocated."""

    total: int  # the GPU's memory
    in_use: int  # weights, buffers, libraries, other processes
    activations: int  # the largest step's peak above that
    graphs: int  # what recordings keep


def bytes_per_block(layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    return block_size * sum(layer.bytes_per_token(dtype) for layer in layers)


def blocks_that_fit(
    plan: Plan, block_bytes: int, use: MemoryUse | None, windows: Sequence[AttentionWindow] = (AttentionWindow(),)
) -> int:
    """Blocks of `block_bytes` that fit; `use` is what was measured on a GPU, None on a CPU.

    Never more than all slots can hold together. `windows` are those of the groups of layers, each of which takes blocks of its own.

    Raises:
        ValueError: not even one request of `max_model_len` asked for, or of one block, would fit.
    """
    config = plan.config
    per_request = _blocks_of_longest(plan, windows)
    if config.num_kv_blocks is not None:
        blocks, room = config.num_kv_blocks, "num_kv_blocks"
    elif use is None:
        blocks, room = int(config.cpu_kv_cache_gib * GIB) // block_bytes, "cpu_kv_cache_gib"
    else:
        budget = int(use.total * config.gpu_memory_utilization)
        budget -= use.in_use + use.activations + use.graphs + _RESERVE
        blocks, room = max(budget, 0) // block_bytes, "gpu_memory_utilization"
    blocks = min(blocks, per_request * plan.max_batch_size)
    needed = per_request if config.max_model_len is not None else len(windows)
    if blocks < needed:
        raise ValueError(_too_little(plan, blocks, block_bytes, room, use, windows))
    return blocks


def longest_step(plan: Plan) -> int:
    """Most tokens by which a step makes room for a sequence."""
    return plan.max_num_tokens + LOOKAHEAD_TOKENS


def _blocks_of_longest(plan: Plan, windows: Sequence[AttentionWindow]) -> int:
    """Blocks that a request of max_model_len tokens may hold at once, the same of every group."""
    needed = int(max_blocks_needed(windows, plan.max_model_len, longest_step(plan), plan.block_size).sum())
    return -(-needed // len(windows)) * len(windows)


def _too_little(
    plan: Plan, blocks: int, block_bytes: int, room: str, use: MemoryUse | None, windows: Sequence[AttentionWindow]
) -> str:
    tokens = longest_sequence(windows, blocks, longest_step(plan), plan.block_size, plan.max_model_len)
    sentence = f"The KV cache has room for {tokens} tokens ({_size(blocks * block_bytes)})"
    if plan.config.max_model_len is not None:
        need = _blocks_of_longest(plan, windows) * block_bytes
        sentence += f", but one request of max_model_len={plan.max_model_len} needs {_size(need)}"
    if use is None:
        return f"{sentence}; raise {room}, lower max_model_len, or take a smaller model."
    taken = use.in_use + use.activations + use.graphs
    return (
        f"{sentence}; {_size(taken)} of the GPU's {_size(use.total)} are taken by weights, activations, graphs and others; "
        f"raise {room}, lower max_model_len, max_num_tokens or max_batch_size, or take a smaller model."
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:.2f} MiB"
