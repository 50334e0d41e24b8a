"""The choice of attention backend: which can run on a device and over a model's layers.

An entry of `torchweave.plug_points.ATTENTION_BACKENDS` is a `BackendEntry`: usually the class of a backend with two static
methods. Torchweave's own are described here, so that a backend's module, and the libraries of its kernels, are imported only
where it runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from torchweave.ops.attention.op import AttentionBackend, LayerSpec
from torchweave.ops.kernels.cpp import NO_COMPILER, has_compiler
from torchweave.plug_points import ATTENTION_BACKENDS


class BackendEntry(Protocol):
    """An attention backend that may be chosen; called with a device, it makes the backend.

    Attributes, all optional:
        block_sizes: the only block sizes of the KV cache that it takes; empty: any.
        fp8_cache_refusal: why it reads no KV cache in FP8, as a clause; empty if it does.
    """

    def __call__(self, device: torch.device) -> AttentionBackend: ...

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Why it cannot run on a device, as a clause; None if it can."""
        ...

    def unsupported_reason(self, spec: LayerSpec, dtype: torch.dtype) -> str | None:
        """Why it cannot run a layer, as a clause; None if it can."""
        ...


@dataclass(frozen=True)
class OwnBackend:
    """A `BackendEntry` of Torchweave.

    Attributes:
        path: `module:Class` in `torchweave.ops.attention.backends`.
        device: type of the devices it runs on; empty: any.
        library: what its kernels need; `extra`: what to install for it.
        capability: major compute capability that it is built for; None: any.
    """

    path: str
    device: str = ""
    library: str = ""
    extra: str = ""
    capability: int | None = None
    block_sizes: tuple[int, ...] = ()
    fp8_cache_refusal: str = ""

    def __call__(self, device: torch.device) -> AttentionBackend:
        backend = self._load()
        return backend(device) if self.device == "cuda" else backend()

    def _load(self) -> type:
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(f"torchweave.ops.attention.backends.{module}"), name)

    def unavailable_reason(self, device: torch.device) -> str | None:
        """See `BackendEntry`."""
        if self.device and device.type != self.device:
            return "it runs only on a CPU" if self.device == "cpu" else "it needs a CUDA GPU"
        if self.device == "cpu" and not has_compiler():
            return NO_COMPILER
        try:
            if self.library:
                importlib.import_module(self.library)
        except ImportError as error:
            return f"{error}; install {self.extra}"
        if self.capability is not None and torch.cuda.get_device_capability(device)[0] != self.capability:
            return f"it is built for GPUs of compute capability {self.capability}"
        return None

    def unsupported_reason(self, spec: LayerSpec, dtype: torch.dtype) -> str | None:
        """See `BackendEntry`; the backend's own, if it has layers that it refuses."""
        refuse = getattr(self._load(), "unsupported_reason", None)
        return None if refuse is None else refuse(spec, dtype)


TRITON = OwnBackend("triton:TritonBackend", "cuda", "triton", "triton")
TORCH = OwnBackend("torch_native:TorchBackend")
CPP = OwnBackend("cpp:CppBackend", "cpu")
FA3 = OwnBackend(
    "fa3:Fa3Backend", "cuda", "fa3_fwd_interface", "torchweave[fa3]", capability=9, block_sizes=(128,),
    fp8_cache_refusal="FlashAttention 3 reads a cache in FP8 only with queries in FP8",
)  # fmt: skip


def available_backends(device: torch.device | str) -> dict[str, str | None]:
    """For each backend of Torchweave None if it can run on `device`, else the reason."""
    return {name: unavailable_reason(name, device) for name in ATTENTION_BACKENDS.names(packages=())}


def unavailable_reason(name: str, device: torch.device | str) -> str | None:
    """Why a backend cannot run on a device, as a clause; None if it can."""
    return ATTENTION_BACKENDS.get(name).unavailable_reason(torch.device(device))


def get_backend(
    name: str, device: torch.device | str, dtype: torch.dtype = torch.float32, layers: Sequence[LayerSpec] = ()
) -> AttentionBackend:
    """The backend `name` (`auto`: triton on a GPU, cpp on a CPU, torch where these cannot run).

    Raises ValueError if it is unknown, cannot run on the device, or does not support `layers`.
    """
    device = torch.device(device)
    if name == "auto":
        best = "triton" if device.type == "cuda" else "cpp"
        name = best if unavailable_reason(best, device) is None else "torch"
    entry: BackendEntry = ATTENTION_BACKENDS.get(name)
    reason = entry.unavailable_reason(device)
    if reason is not None:
        raise ValueError(f"attention_backend {name!r} cannot run on {device}: {reason}")
    for spec in layers:
        reason = entry.unsupported_reason(spec, dtype)
        if reason is not None:
            raise ValueError(f"attention_backend {name!r} cannot run this model: {reason}; choose auto")
    return entry(device)
