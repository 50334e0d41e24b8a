"""Early start, before torch is imported: processes of the other local ranks, which import in parallel, GPU contexts, and stored
bytecode.

This module imports little more than the config does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchweave.compiler.cache.store import BYTECODE_FOLDER, open_cache
from torchweave.config.model_source import local_source
from torchweave.config.options import EngineConfig, bytecode_of_commands_in
from torchweave.config.validate import check_config
from torchweave.distributed.gpu_context import open_gpu_context
from torchweave.distributed.launchers.local import WorkerPool
from torchweave.report import Report
from torchweave.utils.bytecode import bytecode_in, is_bytecode_missing

WORKER_ENTRYPOINT = "torchweave.engine.startup.rank_worker:run_worker"


def prestart_workers(config: EngineConfig, replica: int = 0) -> WorkerPool:
    """Start the local ranks of an engine, for `open_engine`; none with another executor or with fewer processors than ranks.

    These processes and this one also open their GPUs.

    Args:
        replica: index of the engine on this machine.

    Raises:
        ValueError: an option is not supported on any device or model, or the model's name is wrong; nothing is started.
    """
    check_config(config)
    local_source(config.model, config.revision)
    is_local = config.executor == "local" or config.num_ranks == 1  # other executors choose the GPU of each rank
    gpu = _first_gpu(config, replica) if is_local else None
    if gpu is not None:
        open_gpu_context(gpu)
    others = config.num_ranks - 1 if is_local else 0
    return WorkerPool(WORKER_ENTRYPOINT, others if others < (os.cpu_count() or 1) else 0, gpu)


@contextmanager
def stored_bytecode(config: EngineConfig) -> Iterator[None]:
    """Context in which this process, its children and Python commands that they start keep bytecode in the compile cache, if Python
    cannot keep it itself."""
    folder = _bytecode_folder(config) if is_bytecode_missing() else None
    if folder is None:
        yield
        return
    with bytecode_in(folder), bytecode_of_commands_in(folder):
        yield


def _bytecode_folder(config: EngineConfig) -> Path | None:
    try:
        cache = open_cache(config.torch_compile_config, Report(show=False))
        if cache is None:
            return None
        folder = cache.folder / BYTECODE_FOLDER
        folder.mkdir(exist_ok=True, mode=0o700)
    except (ValueError, OSError):  # reported when the engine opens the cache
        return None
    return folder


def _first_gpu(config: EngineConfig, replica: int) -> int | None:
    """Index of rank 0's GPU according to the config; None on a CPU."""
    kind, _, number = config.device.partition(":")
    if kind not in ("auto", "cuda") or not (number or "0").isdigit():
        return None
    return int(number or 0) + replica * config.num_ranks
