"""Device facts for the plan: name, compute capability, attention backends."""

from __future__ import annotations

import platform

import torch

from torchweave.config import AttentionFacts, DeviceFacts, choose_device
from torchweave.ops.attention.choose import get_backend, unavailable_reason
from torchweave.ops.kernels.cpp import NO_COMPILER, has_compiler
from torchweave.plug_points import ATTENTION_BACKENDS

# By preference; figures in bench/results.
_PREFERENCE = {"cuda": ("fa3", "triton", "torch", "cpp"), "cpu": ("cpp", "torch", "triton", "fa3")}


def device_facts(requested: str, rank: int = 0, attention_backend: str = "auto") -> DeviceFacts:
    """Facts of the requested device (`auto`, `cpu`, `cuda`, `cuda:N`), which is that of `rank`.

    `attention_backend` is the requested one: a package's is loaded only then.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = choose_device(requested, num_gpus)
    device = torch.device(name)
    is_gpu = device.type == "cuda"
    backends = _PREFERENCE[device.type]
    if attention_backend not in ("auto", *backends):
        backends = (*backends, attention_backend)
    return DeviceFacts(
        device=name,
        title=torch.cuda.get_device_name(device) if is_gpu else platform.processor() or platform.machine(),
        capability=torch.cuda.get_device_capability(device) if is_gpu else None,
        attention=tuple(_attention_facts(backend, device) for backend in backends),
        inductor_refusal="" if is_gpu or has_compiler() else NO_COMPILER,
        num_gpus=num_gpus - (device.index or 0) + rank if is_gpu else 0,
    )


def _attention_facts(name: str, device: torch.device) -> AttentionFacts:
    refusal = unavailable_reason(name, device)
    if refusal is not None:
        return AttentionFacts(name, 0, refusal=refusal)
    backend, entry = get_backend(name, device), ATTENTION_BACKENDS.get(name)
    return AttentionFacts(
        name,
        backend.block_size,
        getattr(entry, "block_sizes", ()),
        backend.supports_mixed_cuda_graphs,
        getattr(entry, "fp8_cache_refusal", ""),
    )
