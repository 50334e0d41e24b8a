"""What the plan says of several ranks: how many, who starts them, and what they cannot do yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchweave.config.facts import DeviceFacts, ModelFacts
from torchweave.config.options import EngineConfig

Note = Callable[..., Any]


def resolve_ranks(config: EngineConfig, device: DeviceFacts, model: ModelFacts, note: Note) -> None:
    """Note the options of several ranks.

    Raises:
        ValueError: there are too few GPUs or layers, heads do not divide, or an option needs a single rank, or layers
            that are not divided.
    """
    size = config.num_ranks
    if size == 1:
        note("enable_expert_parallel", False, "there is one rank")
        note("executor", None, "there is one rank")
        note("rank_timeout", None, "there is one rank")
        return
    if config.kv_offload_gb:
        raise ValueError(
            f"kv_offload_gb={config.kv_offload_gb} cannot be had over {size} ranks: only one rank moves blocks; leave it out"
        )
    if config.executor == "local" and device.is_gpu and size > device.num_gpus:
        raise ValueError(
            f"{config.parallel_sizes_text} needs {size} GPUs, but from {device.device} on this machine has "
            f"{device.num_gpus}; lower it, or "
            "use executor=ray for GPUs of several machines"
        )
    _check_heads(config, model)
    _check_stages(config, model)


def _check_heads(config: EngineConfig, model: ModelFacts) -> None:
    """What the model's own division would find, but that needs its modules, which ranks build: seconds after they were started."""
    parts = config.tensor_parallel_size
    if model.num_heads is not None and model.num_heads % parts:
        fit = [str(count) for count in range(2, model.num_heads + 1) if model.num_heads % count == 0]
        raise ValueError(
            f"tensor_parallel_size={parts} does not divide the {model.num_heads} attention heads of {model.name}; "
            + (f"choose among {', '.join(fit)}" if fit else "use one rank")
        )


def _check_stages(config: EngineConfig, model: ModelFacts) -> None:
    stages = config.pipeline_parallel_size
    if stages > 1 and not config.torch_compile_config.enable_fullgraph:
        raise ValueError(
            f"pipeline_parallel_size={stages} needs torch_compile_config.enable_fullgraph: it is the captured graph that is cut "
            "into stages; turn it on, or use tensor_parallel_size"
        )
    if model.num_layers is not None and stages > model.num_layers:
        raise ValueError(
            f"pipeline_parallel_size={stages} is above the {model.num_layers} layers of {model.name}, and each stage needs one; "
            "lower it"
        )


def resolve_userbuffers(config: EngineConfig, device: DeviceFacts, fullgraph: bool) -> tuple[bool, str]:
    """Whether collectives read operands where they are made, and why not."""
    if config.tensor_parallel_size == 1:
        return False, "one GPU exchanges nothing"
    if not device.is_gpu:
        return False, "only GPUs see each other's memory"
    if not fullgraph:
        return False, "needs enable_fullgraph"
    return config.torch_compile_config.enable_userbuffers, ""
