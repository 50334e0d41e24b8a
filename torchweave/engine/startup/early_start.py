"""What an engine can begin before torch is imported: the other ranks' processes, which import at the same time, and GPUs.

Nothing here imports more than a config does.
"""

from __future__ import annotations

import os

from torchweave.config.options import EngineConfig
from torchweave.config.validate import check_names, check_value_ranges
from torchweave.distributed.gpu_context import open_gpu_context
from torchweave.distributed.launchers.local import WorkerPool

WORKER_ENTRYPOINT = "torchweave.engine.startup.rank_worker:run_worker"


def prestart_workers(config: EngineConfig, replica: int = 0) -> WorkerPool:
    """The local ranks of an engine, for `open_engine`; none where others start them, or where there is no processor for each.

    They and this process open their GPUs meanwhile.

    Args:
        replica: number of the engine among those of this machine.

    Raises:
        ValueError: an option cannot be, whatever the device and the model are; nothing is started then.
    """
    check_names(config, None)
    check_value_ranges(config)
    here = config.executor == "local" or config.num_ranks == 1  # where others start ranks, they say which GPU each has
    gpu = _first_gpu(config, replica) if here else None
    if gpu is not None:
        open_gpu_context(gpu)
    others = config.num_ranks - 1 if here else 0
    return WorkerPool(WORKER_ENTRYPOINT, others if others < (os.cpu_count() or 1) else 0, gpu)


def _first_gpu(config: EngineConfig, replica: int) -> int | None:
    """The number of rank 0's GPU, if there is one, as far as the config says; None on a CPU."""
    kind, _, number = config.device.partition(":")
    if kind not in ("auto", "cuda") or not (number or "0").isdigit():
        return None
    return int(number or 0) + replica * config.num_ranks
