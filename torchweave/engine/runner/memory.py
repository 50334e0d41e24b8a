"""Memory of the KV cache: its layers and their layout, and the number of blocks beside weights, activations and graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchweave.compiler.runtime.cuda_graphs import GraphPool
from torchweave.compiler.runtime.forward import Forward
from torchweave.config import Plan
from torchweave.engine.kv_cache.block_manager import AttentionWindow, max_blocks_needed
from torchweave.engine.kv_cache.layer_groups import KVLayout, longest_sequence
from torchweave.engine.runner.encoder_graphs import BYTES_PER_GRAPH as _BYTES_PER_ENCODER_GRAPH
from torchweave.engine.runner.model_runner import ModelRunner
from torchweave.engine.runner.parts.drafts import DraftModel
from torchweave.engine.scheduler.step_builder import LOOKAHEAD_TOKENS
from torchweave.ops.attention.op import AttentionBackend, LayerKVCache, LayerSpec
from torchweave.ops.low_rank import AdapterSlots
from torchweave.ops.recurrent.op import RecurrentSpec
from torchweave.ops.slot_state import SlotState
from torchweave.report import Report

_RESERVE = 256 << 20  # bytes left free on a GPU: libraries allocate on first use, and memory fragments
_PROBE_BLOCKS = 2  # blocks of the cache used while memory is measured
_BYTES_PER_GRAPH = 4 << 20  # of a recording beside its tensors: nodes and kernel arguments
_MAX_SNAPSHOTS = 64  # recurrent states kept for prefix reuse where no number was asked for
_SNAPSHOT_MEMORY = 0.1  # their most part of the free memory of a GPU
GIB = 1 << 30


@dataclass(frozen=True)
class KVCacheSpec:
    """The KV cache of one rank.

    Attributes:
        layers: this rank's attention layers.
        layout: their groups, and the layers that share memory.
        backend: allocates the cache and runs attention over it.
        dtype: of the model.
        recurrent: states of the layers without keys and values.
    """

    layers: Sequence[LayerSpec]
    layout: KVLayout
    backend: AttentionBackend
    dtype: torch.dtype
    block_size: int
    device: torch.device
    recurrent: Sequence[RecurrentSpec] = ()

    @property
    def both_ways(self) -> bool:
        """Whether tokens may see keys behind them."""
        return any(layer.lookahead for layer in self.layers)

    @property
    def block_bytes(self) -> int:
        layers = dict(zip(self.layout.layer_slots, self.layers, strict=True))
        return bytes_per_block(list(layers.values()), self.block_size, self.dtype)

    def allocate(self, num_blocks: int) -> list[LayerKVCache]:
        """Allocate the cache of each layer; layers with the same slot, which are in different groups, share memory."""
        slots: dict[int, LayerKVCache] = {}
        caches = []
        for layer, group, slot in zip(self.layers, self.layout.groups, self.layout.layer_slots, strict=True):
            if slot not in slots:
                slots[slot] = self.backend.allocate(layer, num_blocks, self.block_size, self.dtype, self.device)
            caches.append(slots[slot]._replace(k_scale=layer.k_scale, v_scale=layer.v_scale, group=group))
        return caches

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of one request."""
        return sum(spec.num_bytes for spec in self.recurrent)

    def default_num_snapshots(self, num_slots: int) -> int:
        """Snapshots of the recurrent states beside those of `num_slots` requests, where no number was asked for."""
        most = min(num_slots, _MAX_SNAPSHOTS)
        if self.device.type != "cuda" or not self.state_bytes:
            return most
        free = torch.cuda.mem_get_info(self.device)[0] - num_slots * self.state_bytes
        return min(max(int(free * _SNAPSHOT_MEMORY), 0) // self.state_bytes, most)

    def allocate_recurrent_states(self, num_slots: int, num_snapshots: int = 0) -> list[Tensor]:
        """Allocate the recurrent states of all slots and snapshots, `[num_slots + num_snapshots, ...]` each.

        A slot's state is zeroed by the first token of a request.

        Raises:
            ValueError: the states do not fit into the GPU's memory.
        """
        rows = num_slots + num_snapshots
        need = rows * self.state_bytes
        if need and self.device.type == "cuda" and need > (free := torch.cuda.mem_get_info(self.device)[0]):
            raise ValueError(
                f"The recurrent states of max_batch_size={num_slots} requests and of num_state_snapshots={num_snapshots} take "
                f"{_size(need)}, and {_size(free)} of the GPU's memory are free; lower max_batch_size or num_state_snapshots."
            )
        return [torch.zeros(rows, *spec.shape, dtype=spec.dtype, device=self.device) for spec in self.recurrent]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on a GPU before the KV cache is allocated."""

    total: int  # the GPU's memory
    in_use: int  # weights, buffers, libraries, other processes
    activations: int  # peak of the largest step above that
    graphs: int  # CUDA graphs


def bytes_per_block(layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    return block_size * sum(layer.bytes_per_token(dtype) for layer in layers)


def measure_memory(
    plan: Plan,
    forward: Forward,
    cache_spec: KVCacheSpec,
    state: SlotState,
    report: Report,
    recurrent_states: Sequence[Tensor] = (),
    encode_image: Callable[[], None] | None = None,
    draft_model: DraftModel | None = None,
    adapter_slots: AdapterSlots | None = None,
) -> MemoryUse | None:
    """Run and record the largest steps over a small KV cache; returns None on a CPU, where nothing is measured.

    Args:
        encode_image: encodes a large image, which happens between steps; None for a model without images.
    """
    if not plan.device.startswith("cuda"):
        return None
    device = torch.device(plan.device)
    caches = cache_spec.allocate(_PROBE_BLOCKS)
    quiet, both_ways = Report(show=False), cache_spec.both_ways
    runner = ModelRunner(
        plan, forward, cache_spec.backend, caches, state, quiet, recurrent_states, draft_model, both_ways, adapter_slots
    )
    runner.run_dummy_step(plan.max_num_tokens)  # kernels are compiled, and libraries allocate their workspaces
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.run_dummy_step(plan.max_num_tokens)
    if plan.query_len > 1 and recurrent_states:  # which hold the inputs of recurrent layers until the end
        runner.run_dummy_draft_step(plan.max_drafting_rows, plan.query_len)
    if encode_image is not None:
        encode_image()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    pool = GraphPool(device)
    recorded = 0
    if plan.token_buckets:
        recorded += runner.recordings.record_mixed(max(plan.token_buckets), pool).bytes
    if plan.batch_sizes:
        recorded += runner.recordings.record_decode(max(plan.batch_sizes), pool).bytes
    drafting = [rows for rows in plan.batch_sizes if rows <= plan.max_drafting_rows]
    if drafting:
        recorded += runner.recordings.record_drafts(max(drafting), plan.query_len, pool).bytes
    torch.cuda.synchronize(device)
    graphs = max(free - torch.cuda.mem_get_info(device)[0], recorded)
    num_graphs = len(plan.token_buckets) + len(plan.batch_sizes) + len(drafting) * len(plan.query_lens)
    graphs += num_graphs * _BYTES_PER_GRAPH + plan.max_encoder_graphs * _BYTES_PER_ENCODER_GRAPH
    runner.recordings.release()  # graphs and runner refer to each other
    del runner, caches, pool
    torch.cuda.empty_cache()
    use = MemoryUse(total=total, in_use=total - free, activations=activations, graphs=graphs)
    report.event("memory", total=total, in_use=use.in_use, activations=activations, graphs_expected=graphs)
    return use


def blocks_that_fit(
    plan: Plan, block_bytes: int, use: MemoryUse | None, windows: Sequence[AttentionWindow] = (AttentionWindow(),)
) -> int:
    """Number of KV-cache blocks of `block_bytes` that fit, at most as many as all slots can use.

    Args:
        use: measured on a GPU; None on a CPU.
        windows: of the layer groups, each of which takes blocks of its own.

    Raises:
        ValueError: a single request of the configured `max_model_len` (or of one block, if it is not set) does not fit.
    """
    config = plan.config
    per_request = _blocks_of_longest(plan, windows)
    if not block_bytes:  # no layer has keys and values
        return per_request * plan.max_batch_size
    if config.num_kv_blocks is not None:
        blocks, option = config.num_kv_blocks, "num_kv_blocks"
    elif config.kv_cache_memory_bytes is not None:
        blocks, option = config.kv_cache_memory_bytes // block_bytes, "kv_cache_memory_bytes"
    elif use is None:
        blocks, option = int(config.cpu_kv_cache_gib * GIB) // block_bytes, "cpu_kv_cache_gib"
    else:
        budget = int(use.total * config.gpu_memory_utilization)
        budget -= use.in_use + use.activations + use.graphs + _RESERVE
        blocks, option = max(budget, 0) // block_bytes, "gpu_memory_utilization"
    blocks = min(blocks, per_request * plan.max_batch_size)
    needed = per_request if config.max_model_len is not None else len(windows)
    if blocks < needed:
        raise ValueError(_too_few_blocks(plan, blocks, block_bytes, option, use, windows))
    return blocks


def longest_step(plan: Plan) -> int:
    """Most tokens for which a step allocates blocks of one sequence."""
    drafts = plan.query_len * max(plan.run_ahead, 1) if plan.query_len > 1 else 0
    return max(plan.max_num_tokens, drafts) + LOOKAHEAD_TOKENS


def _blocks_of_longest(plan: Plan, windows: Sequence[AttentionWindow]) -> int:
    """Most blocks that a request of `max_model_len` tokens holds at once; the same number in every group."""
    needed = sum(max_blocks_needed(windows, plan.max_model_len, longest_step(plan), plan.block_size))
    return -(-needed // len(windows)) * len(windows)


def _too_few_blocks(
    plan: Plan, blocks: int, block_bytes: int, option: str, use: MemoryUse | None, windows: Sequence[AttentionWindow]
) -> str:
    tokens = longest_sequence(windows, blocks, longest_step(plan), plan.block_size, plan.max_model_len)
    sentence = f"The KV cache has room for {tokens} tokens ({_size(blocks * block_bytes)})"
    if plan.config.max_model_len is not None:
        need = _blocks_of_longest(plan, windows) * block_bytes
        sentence += f", but one request of max_model_len={plan.max_model_len} needs {_size(need)}"
    if use is None:
        return f"{sentence}; raise {option}, lower max_model_len, or take a smaller model."
    taken = use.in_use + use.activations + use.graphs
    return (
        f"{sentence}; {_size(taken)} of the GPU's {_size(use.total)} are taken by weights, activations, graphs and others; "
        f"raise {option}, lower max_model_len, max_num_tokens or max_batch_size, or take a smaller model."
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:.2f} MiB"
