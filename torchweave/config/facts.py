"""Properties of the device and the model that the plan depends on; independent of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionFacts:
    """Properties of an attention backend for this model on this device.

    Attributes:
        name: value of the option `attention_backend`.
        block_size: preferred KV block size, in tokens.
        block_sizes: supported KV block sizes; empty: any.
        supports_mixed_cuda_graphs: mixed steps can be recorded as whole-step CUDA graphs.
        fp8_cache_refusal: why an FP8 KV cache is unsupported, as a clause; empty if supported.
        refusal: why the backend is unavailable, as a clause ("it needs a GPU"); empty if available.
    """

    name: str
    block_size: int
    block_sizes: tuple[int, ...] = ()
    supports_mixed_cuda_graphs: bool = False
    fp8_cache_refusal: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class DeviceFacts:
    """Properties of the device.

    Attributes:
        device: torch's name, `cpu` or `cuda:N` (see `choose_device`).
        title: display name ("NVIDIA H100 80GB HBM3").
        capability: compute capability of a GPU; None on a CPU.
        attention: backends in order of preference.
        inductor_refusal: why Inductor is unavailable ("no C++ compiler was found"); empty if available.
        num_gpus: GPUs of this machine, counted from rank 0's; 0 on a CPU.
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
    """Properties of a model.

    Attributes:
        name: the name given by the user.
        max_model_len: longest context in tokens.
        dtype: the checkpoint's dtype; None: not set.
        quantization: the checkpoint's quantization of linears (`fp8_per_block`); None: unquantized.
        quantization_method: name of the checkpoint's format (`awq`), its config's quant_method; None: unquantized.
        kv_cache_dtype: KV-cache dtype requested by the checkpoint (`fp8_e4m3`); None: none.
        num_layers: number of layers; None: not in the config.
        num_heads: query heads; None: not in the config, or different between layers.
        longest_model_len: largest valid option `max_model_len`, if RoPE stretches; None: `max_model_len`.
        hidden_size: width of the residual stream; None: not in the config.
    """

    name: str
    max_model_len: int
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    longest_model_len: int | None = None
    hidden_size: int | None = None
    quantization_method: str | None = None


def choose_device(requested: str, num_gpus: int) -> str:
    """Resolve the option `device` to `cpu` or `cuda:N`, given the number of visible GPUs.

    Raises:
        ValueError: an unknown name or an unavailable GPU.
    """
    if requested == "auto":
        return "cuda:0" if num_gpus else "cpu"
    if requested == "cpu":
        return "cpu"
    kind, _, index = requested.partition(":")
    if kind != "cuda" or (index and not index.isdigit()) or requested.endswith(":"):
        raise ValueError(f"device={requested!r} is not valid; use auto, cpu, cuda or cuda:N")
    if not num_gpus:
        raise ValueError(f"device={requested!r}: no CUDA GPU is visible; use device=cpu or auto")
    number = int(index or 0)
    if number >= num_gpus:
        raise ValueError(f"device={requested!r}: the last GPU is cuda:{num_gpus - 1}; use an available one")
    return f"cuda:{number}"
