"""The plug points: where packages add to Torchweave, each a registry with an entry-point group.

Torchweave's own entries are the lines below; a package adds its own by an entry point of the group (docs/how-to/write-a-plugin.md).
"""

from __future__ import annotations

from typing import Any

from torchweave.utils.registry import Registry

_ATTENTION = "torchweave.ops.attention.choose"
_WEIGHTS = "torchweave.models.weights"

ATTENTION_BACKENDS: Registry[Any] = Registry(
    "attention backend",
    "torchweave.attention_backends",
    {name: f"{_ATTENTION}:{name.upper()}" for name in ("triton", "torch", "fa3", "cpp")},
    needs=("unavailable_reason", "unsupported_reason", "__call__"),
)
"""Of `torchweave.ops.attention.choose.BackendEntry`; the option `attention_backend`."""

QUANTIZATION_FORMATS: Registry[Any] = Registry(
    "quantization format",
    "torchweave.quantization_formats",
    {
        "awq": f"{_WEIGHTS}.quantized_checkpoint:AWQ",
        "bitsandbytes": f"{_WEIGHTS}.methods.bitsandbytes:BITSANDBYTES",
        "compressed-tensors": f"{_WEIGHTS}.quantized_checkpoint:COMPRESSED_TENSORS",
        "fbgemm_fp8": f"{_WEIGHTS}.quantized_checkpoint:FBGEMM_FP8",
        "fp8": f"{_WEIGHTS}.quantized_checkpoint:FINE_GRAINED_FP8",
        "gptq": f"{_WEIGHTS}.quantized_checkpoint:GPTQ",
        "modelopt": f"{_WEIGHTS}.quantized_checkpoint:MODELOPT",
        "fp8_per_tensor": f"{_WEIGHTS}.quantize:FP8_PER_TENSOR",
        "fp8_per_channel": f"{_WEIGHTS}.quantize:FP8_PER_CHANNEL",
        "fp8_per_block": f"{_WEIGHTS}.quantize:FP8_PER_BLOCK",
        "int4": f"{_WEIGHTS}.int_linear:INT4_FORMAT",
        "nvfp4": f"{_WEIGHTS}.int_linear:NVFP4_FORMAT",
        "mxfp4": f"{_WEIGHTS}.mxfp4_experts:MXFP4_FORMAT",
    },
    needs=("read", "scheme"),
)
"""Of `torchweave.models.weights.formats.QuantizationFormat`, by the `quant_method` of a checkpoint or the option `quantization`."""

LOGITS_PROCESSORS: Registry[Any] = Registry("logits processor", "torchweave.logits_processors")
"""Classes derived from `torchweave.HostLogitsProcessor` or `DeviceLogitsProcessor`; the option `logits_processors`."""

MODEL_HOOKS: Registry[Any] = Registry("model hook", "torchweave.model_hooks")
"""Functions of a module of a model, by the name of its class; all that packages bring are used, after Torchweave's own."""

TOOL_PARSERS: Registry[Any] = Registry(
    "tool parser", "torchweave.tool_parsers", needs=("grammar", "id_form", "special_tokens")
)
"""Of `torchweave.serving.openai.tools.family.Family`; the option `tool_call_parser`. Torchweave's own stand in its `families`."""

REASONING_PARSERS: Registry[Any] = Registry(
    "reasoning parser", "torchweave.reasoning_parsers", needs=("opening", "closing")
)
"""Of `torchweave.serving.openai.reasoning.ReasoningFormat`; the option `reasoning_parser`. Torchweave's own stand there."""

PASSES: Registry[Any] = Registry("pass", "torchweave.passes")
"""Of `torchweave.compiler.Pass`, or classes of them; the option `torch_compile_config.passes`."""
