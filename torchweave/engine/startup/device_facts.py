"""Device facts for the plan: name, compute capability, attention backends."""

from __future__ import annotations

import platform

import torch

from torchweave.config import AttentionFacts, DeviceFacts, choose_device
from torchweave.ops.attention.op import available_backends, get_backend
from torchweave.ops.kernels.cpp import NO_COMPILER, has_compiler

# By preference; figures in bench/results.
_PREFERENCE = {"cuda": ("fa3", "triton", "torch", "cpp"), "cpu": ("cpp", "torch", "triton", "fa3")}
_ONLY_BLOCK_SIZES = {"fa3": (128,)}
_NO_FP8_CACHE = {"fa3": "FlashAttention 3 reads a cache in FP8 only with queries in FP8"}


def device_facts(requested: str, rank: int = 0) -> DeviceFacts:
    """Facts of the requested device (`auto`, `cpu`, `cuda`, `cuda:N`), which is that of `rank`."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = choose_device(requested, num_gpus)
    device = torch.device(name)
    is_gpu = device.type == "cuda"
    return DeviceFacts(
        device=name,
        title=torch.cuda.get_device_name(device) if is_gpu else platform.processor() or platform.machine(),
        capability=torch.cuda.get_device_capability(device) if is_gpu else None,
        attention=tuple(_attention_facts(backend, device) for backend in _PREFERENCE[device.type]),
        inductor_refusal="" if is_gpu or has_compiler() else NO_COMPILER,
        num_gpus=num_gpus - (device.index or 0) + rank if is_gpu else 0,
    )


def _attention_facts(name: str, device: torch.device) -> AttentionFacts:
    refusal = available_backends(device)[name]
    if refusal is not None:
        return AttentionFacts(name, 0, refusal=refusal)
    backend = get_backend(name, device)
    return AttentionFacts(
        name,
        backend.block_size,
        _ONLY_BLOCK_SIZES.get(name, ()),
        backend.supports_mixed_cuda_graphs,
        _NO_FP8_CACHE.get(name, ""),
    )
