"""Copies of KV cache blocks: between device and host (`torchweave.engine.kv_cache.cpu_offload`), and on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchweave.engine.kv_cache.cpu_offload import BlockCopier
from torchweave.ops.attention.op import LayerKVCache
from torchweave.utils.cuda_streams import side_stream

_CHUNK = 1 << 30  # bytes per pinned allocation: torch rounds each up to a power of two


def make_block_copier(tensors: Sequence[Tensor], num_bytes: int) -> BlockCopier:
    """A copier for the blocks of `tensors`, each `[num_blocks, ...]` contiguous, with `num_bytes` of host memory."""
    return CudaBlockCopier(tensors, num_bytes) if tensors[0].is_cuda else CpuBlockCopier(tensors, num_bytes)


def _by_block(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.view(tensor.shape[0], -1).view(torch.uint8) for tensor in tensors]


class CpuBlockCopier:
    """Copier for a cache in CPU memory; its copies are synchronous."""

    def __init__(self, tensors: Sequence[Tensor], num_bytes: int) -> None:
        self._parts = _by_block(tensors)
        self.num_host_blocks = num_bytes // sum(part.shape[1] for part in self._parts)
        self._host = [torch.empty(self.num_host_blocks, part.shape[1], dtype=torch.uint8) for part in self._parts]

    def store(self, blocks: np.ndarray, host_blocks: np.ndarray) -> int:
        for part, host in zip(self._parts, self._host, strict=True):
            host[torch.from_numpy(host_blocks)] = part[torch.from_numpy(blocks)]
        return 0

    def load(self, host_blocks: np.ndarray, blocks: np.ndarray) -> int:
        for part, host in zip(self._parts, self._host, strict=True):
            part[torch.from_numpy(blocks)] = host[torch.from_numpy(host_blocks)]
        return 0

    def is_done(self, ticket: int) -> bool:
        return True

    def wait_for(self, ticket: int) -> None:
        raise AssertionError("copies on the CPU are synchronous")


class CudaBlockCopier:
    """Copier for a GPU: one kernel per copy, on a side stream, with pinned host memory.

    Call it on the thread that launches the steps; their stream is the current one.
    """

    def __init__(self, tensors: Sequence[Tensor], num_bytes: int) -> None:
        from torchweave.ops.kernels.attention.copy_blocks import WORD_BYTES

        parts = _by_block(tensors)
        self._device = tensors[0].device
        self._tensors = parts  # keeps the memory that the table points to alive
        widths = [part.shape[1] for part in parts]
        assert not any(width % WORD_BYTES for width in widths), (
            "the size of a block is a multiple of the copy kernel's word"
        )
        self._host_block_bytes = sum(widths)
        offsets = np.cumsum([0, *widths[:-1]])
        table = [
            (part.data_ptr(), width // WORD_BYTES, offset // WORD_BYTES)
            for part, width, offset in zip(parts, widths, offsets.tolist(), strict=True)
        ]
        self._table = torch.tensor(table, dtype=torch.int64, device=self._device)
        self._per_chunk = max(_CHUNK // self._host_block_bytes, 1)
        chunks = num_bytes // (self._per_chunk * self._host_block_bytes)
        rest = num_bytes // self._host_block_bytes - chunks * self._per_chunk
        self.num_host_blocks = chunks * self._per_chunk + rest
        sizes = [self._per_chunk] * chunks + [rest] * (rest > 0)
        self._chunks = [
            torch.empty(size * self._host_block_bytes, dtype=torch.uint8, pin_memory=True) for size in sizes
        ]
        self._addresses = np.array([chunk.data_ptr() for chunk in self._chunks], np.int64)
        self._stream = side_stream(self, self._device)
        self._pending: deque[tuple[int, torch.cuda.Event, Tensor, Tensor]] = deque()
        self._begun = self._done = -1

    def store(self, blocks: np.ndarray, host_blocks: np.ndarray) -> int:
        return self._copy(blocks, host_blocks, to_host=True)

    def load(self, host_blocks: np.ndarray, blocks: np.ndarray) -> int:
        return self._copy(blocks, host_blocks, to_host=False)

    def _copy(self, blocks: np.ndarray, host_blocks: np.ndarray, to_host: bool) -> int:
        from torchweave.ops.kernels.attention.copy_blocks import launch_copy_blocks

        at = self._addresses[host_blocks // self._per_chunk] + host_blocks % self._per_chunk * self._host_block_bytes
        pairs = torch.from_numpy(np.stack([blocks, at], 1).astype(np.int64)).pin_memory()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            on_device = pairs.to(self._device, non_blocking=True)
            launch_copy_blocks(on_device, self._table, to_host)
            event.record()
        self._begun += 1
        self._pending.append((self._begun, event, pairs, on_device))
        return self._begun

    def is_done(self, ticket: int) -> bool:
        while self._pending and self._pending[0][1].query():
            self._done = self._pending.popleft()[0]
        return ticket <= self._done

    def wait_for(self, ticket: int) -> None:
        for number, event, _, _ in self._pending:
            if number == ticket:
                torch.cuda.current_stream(self._device).wait_event(event)


def copy_blocks(caches: Sequence[LayerKVCache], sources: np.ndarray, targets: np.ndarray) -> None:
    """Copy blocks in the cache of every layer, on the current stream; no target is a source."""
    # Groups of layers share tensors.
    tensors = {tensor.data_ptr(): tensor for layer in caches for tensor in layer.tensors}
    if not tensors:  # all layers are recurrent
        return
    device = next(iter(tensors.values())).device
    pairs = torch.empty(2, len(sources), dtype=torch.int64, pin_memory=device.type == "cuda")
    pairs.numpy()[:] = sources, targets
    read, write = pairs.to(device, non_blocking=True)
    for tensor in tensors.values():
        values = tensor.view(torch.uint8)  # independent of the dtype
        values.index_copy_(0, write, values.index_select(0, read))


def copy_states(states: Sequence[Tensor], sources: np.ndarray, targets: np.ndarray) -> None:
    """Copy rows of every recurrent state `[rows, ...]`, on the current stream; no target is a source."""
    for dtype in {state.dtype for state in states}:  # one launch for the tensors of a dtype
        group = [state for state in states if state.dtype == dtype]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            pairs = [state[target] for state in group], [state[source] for state in group]
            torch._foreach_copy_(*pairs)  # pyright: ignore[reportPrivateImportUsage]
