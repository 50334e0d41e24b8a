"""What the plan needs to know of the device and the model. Whoever calls `resolve` gathers it; nothing here knows torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionFacts:
    """One attention backend, as it would serve this model on this device.

    Attributes:
        name: as users ask for it.
        block_size: the KV block that it prefers, in tokens.
        block_sizes: the only ones that it takes; empty: any.
        supports_mixed_cuda_graphs: mixed steps may be recorded whole in one CUDA graph.
        fp8_cache_refusal: why it cannot read a KV cache in FP8, as a clause; empty when it can.
        refusal: why it cannot serve here, as a clause ("it needs a GPU"); empty when it can.
    """

    name: str
    block_size: int
    block_sizes: tuple[int, ...] = ()
    supports_mixed_cuda_graphs: bool = False
    fp8_cache_refusal: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class DeviceFacts:
    """The device that will run the model.

    Attributes:
        device: torch's name for it, `cpu` or `cuda:N` (see `choose_device`).
        title: what a person calls it ("NVIDIA H100 80GB HBM3").
        capability: compute capability of a GPU; None on a CPU.
        attention: backends in the order of preference: the first that can serve is taken.
        inductor_refusal: why Inductor cannot build here ("no C++ compiler was found"); empty when it can.
        num_gpus: GPUs of this machine from that of rank 0 on; 0 on a CPU.
    """

    device: str
    title: str
    capability: tuple[int, int] | None
    attention: tuple[AttentionFacts, ...]
    inductor_refusal: str = ""
    num_gpus: int = 0

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True)
class ModelFacts:
    """What the plan needs to know of a model.

    Attributes:
        name: as the user wrote it.
        max_model_len: its longest context in tokens.
        dtype: its checkpoint's; None where that names none.
        quantization: how its checkpoint keeps linears (`fp8_per_block`); None: unquantised.
        kv_cache_dtype: what its checkpoint wants keys and values kept in (`fp8_e4m3`); None: it says nothing.
        num_layers: how many it has; None: its config does not say.
        num_heads: query heads of its attention; None: its config does not say, or they differ from layer to layer.
        longest_model_len: tokens that `max_model_len` may ask for, where its RoPE stretches; None: no more than its own.
    """

    name: str
    max_model_len: int
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    longest_model_len: int | None = None


def choose_device(requested: str, num_gpus: int) -> str:
    """`cpu` or `cuda:N` for what was asked, where `num_gpus` GPUs can be seen.

    Raises:
        ValueError: an unknown name, or a GPU that is not there.
    """
    if requested == "auto":
        return "cuda:0" if num_gpus else "cpu"
    if requested == "cpu":
        return "cpu"
    kind, _, index = requested.partition(":")
    if kind != "cuda" or (index and not index.isdigit()) or requested.endswith(":"):
        raise ValueError(f"device={requested!r} is not known; use auto, cpu, cuda or cuda:N")
    if not num_gpus:
        raise ValueError(f"device={requested!r} was asked for, but no CUDA GPU can be seen; use device=cpu or auto")
    number = int(index or 0)
    if number >= num_gpus:
        raise ValueError(
            f"device={requested!r} was asked for, but the GPUs end at cuda:{num_gpus - 1}; use one that is there"
        )
    return f"cuda:{number}"
