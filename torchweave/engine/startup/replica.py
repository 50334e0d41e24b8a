"""What an engine has to itself where several of them serve one model on a machine."""

from __future__ import annotations

from dataclasses import replace

import torch

from torchweave.config import choose_device
from torchweave.config.options import EngineConfig
from torchweave.engine.startup.open import device_of_rank


def replica_config(config: EngineConfig, index: int, count: int) -> EngineConfig:
    """The config of engine number `index` of `count` that share a machine; on a CPU they share torch's threads too.

    Raises:
        ValueError: the machine has too few GPUs for all of them.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    first = choose_device(config.device, num_gpus)
    if first == "cpu":
        torch.set_num_threads(max(torch.get_num_threads() // count, 1))
        device = first
    else:
        needed, there = count * config.num_ranks, num_gpus - int(first.partition(":")[2])
        if needed > there:
            raise ValueError(
                f"data_parallel_size={count} with {config.parallel_sizes_text} needs {needed} GPUs, but from "
                f"{first} on this machine has {there}; lower one of them"
            )
        device = device_of_rank(first, index * config.num_ranks)
    seed = None if config.seed is None else config.seed + index  # the same for two would draw the same twice
    build = config.torch_compile_config
    if index > 0:
        build = replace(build, dump_dir=None)  # what the first one writes there holds for all
    return replace(config, device=device, seed=seed, torch_compile_config=build)
