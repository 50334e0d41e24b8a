"""Allocate host memory for offloaded blocks of the KV cache."""

from __future__ import annotations

from torchweave.engine.kv_cache.block_copy import make_block_copier
from torchweave.engine.kv_cache.cpu_offload import HostBlockPool
from torchweave.engine.runner.memory import GIB
from torchweave.engine.runner.model_runner import ModelRunner
from torchweave.report import Report


def host_pool(runner: ModelRunner, report: Report) -> HostBlockPool | None:
    """Allocate host memory for offloaded KV-cache blocks; None if `kv_offload_gb` is 0."""
    plan = runner.plan
    if not plan.kv_offload_gb:
        return None
    tensors = {tensor.data_ptr(): tensor for layer in runner.caches for tensor in layer.tensors}
    block_bytes = sum(tensor[0].nbytes for tensor in tensors.values())
    if plan.kv_offload_gb * GIB < block_bytes:
        raise ValueError(
            f"kv_offload_gb={plan.kv_offload_gb} is less than a block of the KV cache ({block_bytes} bytes); raise it, or set 0."
        )
    with report.stage("allocating host memory"):
        copier = make_block_copier(list(tensors.values()), int(plan.kv_offload_gb * GIB))
    report.event("kv_offload", blocks=copier.num_host_blocks, bytes=copier.num_host_blocks * block_bytes)
    return HostBlockPool(copier, plan.max_batch_size)
