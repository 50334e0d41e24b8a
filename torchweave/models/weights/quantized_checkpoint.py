"""Quantized checkpoints: the `quantization_config` of config.json, and the scales of FP8 weights, activations and KV cache.

Formats with packed integers are those of `torchweave.models.weights.packed_checkpoint`. Two FP8 formats are supported; others are
rejected by name. compressed-tensors (llm-compressor, `format: float-quantized`): `X.weight`
in e4m3 with `X.weight_scale` per tensor, row or block; activations per token, per group of 128, or static with `X.input_scale`.
Hugging Face's `fp8` (fine-grained: DeepSeek, Qwen): `X.weight_scale_inv` per block of 128 x 128, or (Ministral) per tensor, with
`X.activation_scale` for static activations; AutoFP8 calls these `X.weight_scale` and `X.input_scale`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from torchweave.config.model_source import Source, read_json
from torchweave.models.weights import packed_checkpoint
from torchweave.models.weights.formats import QuantizationFormat, Scheme, StoredFormat, unsupported
from torchweave.models.weights.int_linear import MXFP4, NVFP4, NVFP4_W4A4, PER_CHANNEL, IntScheme
from torchweave.models.weights.methods.dequantized import FP8_WEIGHTS_ONLY
from torchweave.models.weights.methods.mixed import MixedFormat
from torchweave.models.weights.packed_checkpoint import PackedFormat
from torchweave.models.weights.quantize import QuantScheme
from torchweave.models.weights.read import CheckpointTensor, loadable_tensors
from torchweave.ops.quant.fp8 import GROUP
from torchweave.plug_points import QUANTIZATION_FORMATS

_CACHE_SCALES = {
    "k": (".k_scale", ".k_proj.output_scale", ".kv_scale"),
    "v": (".v_scale", ".v_proj.output_scale", ".kv_scale"),
}
"""Name suffixes of KV-cache scales: current, first llm-compressor, AutoFP8."""
_MODELOPT_FILE = "hf_quant_config.json"
_BLOCKS = ([GROUP, GROUP], (GROUP, GROUP))
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


def quantization_config(source: Source) -> dict[str, Any] | None:
    """The `quantization_config` of config.json, of its text part, or Model Optimizer's hf_quant_config.json; None if absent."""
    raw = source.raw_config()
    inner = raw.get("text_config")
    config = raw.get("quantization_config") or (inner if isinstance(inner, dict) else {}).get("quantization_config")
    file = None if source.folder is None else source.folder / _MODELOPT_FILE
    if not config and file is not None and file.is_file():
        config = read_json(file)
    if not isinstance(config, dict) or not config:
        return None
    nested = config.get("quantization")
    if isinstance(nested, dict) and "quant_algo" not in config:  # Model Optimizer's own file, also within config.json
        return {"quant_method": "modelopt", **nested}
    return config


def checkpoint_scheme(source: Source, plugins: Sequence[str] | None = None) -> Scheme | None:
    """Quantization scheme of a checkpoint; None: unquantized.

    Args:
        plugins: see `EngineConfig.plugins`.

    Raises:
        UnsupportedModel: the format is not supported.
    """
    stored = checkpoint_format(source, plugins)
    return None if stored is None else stored.scheme


def checkpoint_format(source: Source, plugins: Sequence[str] | None = None) -> StoredFormat | None:
    """How a checkpoint stores quantized weights; arguments and errors as of `checkpoint_scheme`."""
    config = quantization_config(source)
    if config is None:
        return None
    method = config.get("quant_method", "unknown")
    known = isinstance(method, str) and ":" not in method and QUANTIZATION_FORMATS.has(method, plugins)
    read = QUANTIZATION_FORMATS.get(method, plugins).read if known else None
    if read is None:
        raise unsupported(f"by {method}")
    return read(config)


def checkpoint_kv_cache_dtype(source: Source) -> str | None:
    """KV-cache dtype requested by a checkpoint; None if none or an unsupported one."""
    config = quantization_config(source) or {}
    if config.get("kv_cache_quant_algo") == "FP8":
        return "fp8_e4m3"
    cache = config.get("kv_cache_scheme")
    if not isinstance(cache, dict) or cache.get("dynamic") or cache.get("strategy", "tensor") != "tensor":
        return None
    return "fp8_e4m3" if (cache.get("type"), cache.get("num_bits")) == ("float", 8) else None


def pop_kv_cache_scales(stored: dict[str, CheckpointTensor]) -> dict[int, tuple[float, float]]:
    """Remove the KV-cache scales from `stored`; returns (k_scale, v_scale) by layer, 1.0 if absent.

    Raises:
        ValueError: a scale is not a finite number above 0.
    """
    scales_by_layer: dict[int, dict[str, float]] = {}
    removed: set[str] = set()
    for kind, endings in _CACHE_SCALES.items():
        for name in [name for ending in endings for name in stored if name.endswith(ending)]:
            layer = _LAYER_NUMBER.search(name)
            removed.add(name)
            if layer is None or stored[name].shape not in ((), (1,)):
                continue  # scales per head are not supported
            scale = float(stored[name].read())
            if not (math.isfinite(scale) and scale > 0):
                raise ValueError(f"{stored[name].file} has {name}={scale}: expected a finite number above 0.")
            scales_by_layer.setdefault(int(layer[1]), {}).setdefault(kind, scale)
    for name in removed:
        del stored[name]
    return {layer: (scales.get("k", 1.0), scales.get("v", 1.0)) for layer, scales in scales_by_layer.items()}


def resolve_scheme(source: Source, requested: str | None, plugins: Sequence[str] | None = None) -> Scheme | None:
    """Quantization scheme to load with: the checkpoint's, else the requested one.

    Args:
        plugins: see `EngineConfig.plugins`.

    Raises:
        ValueError: the request is unknown or contradicts the checkpoint.
    """
    stored_format = checkpoint_format(source, plugins)
    stored = None if stored_format is None else stored_format.scheme
    if requested == NVFP4_W4A4.name:
        if not isinstance(stored_format, PackedFormat) or not stored_format.input_scale:
            raise ValueError(
                f"quantization={requested}: {source.name!r} is no NVFP4 checkpoint with scales of FP4 activations; give one, or "
                "use quantization=nvfp4, which keeps activations in 16 bits."
            )
        return NVFP4_W4A4
    if stored is None or requested is None:
        return stored if requested is None else _requested_scheme(requested, plugins)
    if requested != stored.name and _requested_scheme(requested, plugins) != stored:
        raise ValueError(
            f"quantization={requested} contradicts {source.name!r}, which is {stored.name} already; remove the option."
        )
    return stored


def _requested_scheme(name: str, plugins: Sequence[str] | None) -> Scheme:
    scheme = QUANTIZATION_FORMATS.get("int4" if name == IntScheme().name else name, plugins).scheme
    if scheme is None:
        raise ValueError(
            f"quantization={name} is a format of checkpoints, which is followed without the option; leave it out."
        )
    return scheme


def _modelopt(config: Mapping[str, Any]) -> StoredFormat | None:
    algorithm = config.get("quant_algo")
    if algorithm is None and "quant_algo" in config:
        return None  # the KV cache alone
    if algorithm == "MIXED_PRECISION":
        return _modelopt_mixed(_json_object(config.get("quantized_layers"), "quantized_layers"))
    if (known := _MODELOPT_ALGORITHMS.get(str(algorithm))) is not None:
        return known
    raise unsupported(f"by modelopt with the algorithm {algorithm}")


def _modelopt_mixed(layers: Mapping[str, Any]) -> StoredFormat:
    """The format of layers that are quantized by different algorithms."""
    by_algorithm: dict[Any, list[str]] = {}
    for name, settings in layers.items():
        by_algorithm.setdefault(_json_object(settings, name).get("quant_algo"), []).append(name)
    if unknown := [each for each in by_algorithm if each not in _MODELOPT_ALGORITHMS]:
        raise unsupported(f"by modelopt with the algorithm {unknown[0]} in {by_algorithm[unknown[0]][0]}")
    if not by_algorithm:
        raise unsupported("by modelopt with MIXED_PRECISION that lists no quantized_layers")
    return MixedFormat(tuple((tuple(names), _MODELOPT_ALGORITHMS[each]) for each, names in by_algorithm.items()))


_MODELOPT_ALGORITHMS: Mapping[str, StoredFormat] = {
    "FP8": QuantScheme("tensor", static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": QuantScheme("channel"),
    "FP8_PB_WO": QuantScheme("block"),
    "NVFP4": packed_checkpoint.modelopt_fp4_format(NVFP4),
}
"""Formats of Model Optimizer; `FP8_PB_WO` runs with activations in FP8 by 128 channels, as in vLLM and TensorRT-LLM."""


def _awq(config: Mapping[str, Any]) -> PackedFormat:
    version, bits = str(config.get("version", "gemm")).lower(), config.get("bits")
    if (version, bits) != ("gemm", 4) or not config.get("zero_point", True):
        raise unsupported(
            f"by awq in the version {version} to {bits} bits, zero_point={config.get('zero_point', True)}"
        )
    return packed_checkpoint.awq_format(_group_size(config.get("group_size"), "by awq"))


def _gptq(config: Mapping[str, Any]) -> PackedFormat:
    bits = config.get("bits")
    form = (
        "marlin"
        if config.get("is_marlin_format")
        else config.get("checkpoint_format") or config.get("format") or "gptq"
    )
    if form not in ("gptq", "gptq_v2") or bits not in (4, 8) or config.get("pack_dtype", "int32") != "int32":
        raise unsupported(f"by gptq in the format {form} to {bits} bits in {config.get('pack_dtype', 'int32')}")
    rules = _json_object(config.get("dynamic"), "dynamic")
    if changed := [rule for rule in rules if not rule.startswith("-:")]:
        raise unsupported(f"by gptq with other settings for {changed[0]!r}")
    group = _group_size(config.get("group_size"), "by gptq")
    return packed_checkpoint.gptq_format(bits, group, bool(config.get("sym", True)), 0 if form == "gptq_v2" else 1)


def _group_size(size: Any, description: str) -> int:
    """Inputs that share a scale; -1 in a config: all of a row."""
    if size == -1:
        return PER_CHANNEL
    if not isinstance(size, int) or isinstance(size, bool) or size < 16 or size % 8:
        raise unsupported(f"{description} in groups of {size}")
    return size


def _fine_grained(config: Mapping[str, Any]) -> QuantScheme:
    static = config.get("activation_scheme", "dynamic") == "static"
    block = config.get("weight_block_size")
    if config.get("fmt", "e4m3") != "e4m3":
        raise unsupported(f"by fp8 in {config['fmt']}")
    if block is None:
        return QuantScheme("tensor", static)
    if block not in _BLOCKS or static:
        raise unsupported(f"by fp8 in blocks of {block} with {'static' if static else 'dynamic'} activations")
    return QuantScheme("block")


def _fbgemm_fp8(config: Mapping[str, Any]) -> QuantScheme:
    """Weights by row; activations by token, whose upper bound (`input_scale_ub`) is not applied."""
    return QuantScheme("channel")


def _compressed_tensors(config: Mapping[str, Any]) -> StoredFormat | None:
    if places := sorted(_online_transforms(config)):
        raise unsupported(f"by compressed-tensors with online transforms of {', '.join(places)}")
    groups = [
        (_targets(name, group), _parse_config_group(name, group, config.get("format")))
        for name, group in _json_object(config.get("config_groups"), "config_groups").items()
    ]
    if not groups:
        if config.get("kv_cache_scheme"):
            return None
        raise unsupported("by compressed-tensors without config_groups")
    if all(stored == groups[0][1] for _, stored in groups):
        return groups[0][1]
    return MixedFormat(tuple(groups))


def _targets(name: str, group: Any) -> tuple[str, ...]:
    """Names of modules, expressions and classes that a config group is about."""
    targets = _json_object(group, name).get("targets")
    return tuple(map(str, targets)) if isinstance(targets, list) and targets else ("Linear",)


def _json_object(value: Any, name: str) -> Mapping[str, Any]:
    """A JSON object in a quantization_config; null is an empty object.

    Raises:
        ValueError: the value is no JSON object.
    """
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(
            f"The quantization_config of config.json has {name}={value!r}: expected a JSON object; copy or download it again."
        )
    return value or {}


def _online_transforms(config: Mapping[str, Any]) -> set[str]:
    """Locations of transforms to apply at run time; those of weights are already applied."""
    schemes = _json_object(
        _json_object(config.get("transform_config"), "transform_config").get("config_groups"), "config_groups"
    )
    places = set()
    for name, group in schemes.items():
        applied = _json_object(group, name).get("apply")
        for each in applied if isinstance(applied, list) else [applied]:
            places.add(str(_json_object(each, "apply").get("location")))
    return places - {"weight_input", "weight_output"}


def _parse_config_group(name: str, group: Any, stored_format: Any) -> StoredFormat:
    """Scheme or packing of one config group; `stored_format`: of groups that name none."""
    group = _json_object(group, name)
    weights, inputs = _json_object(group.get("weights"), "weights"), group.get("input_activations")
    strategy = weights.get("strategy")
    description = f"by compressed-tensors to {weights.get('type')}{weights.get('num_bits')} by {strategy}"
    stored_format = group.get("format") or stored_format
    if (weights.get("type"), weights.get("num_bits")) == ("float", 4):
        return _parse_fp4_group(weights, group.get("input_activations"), stored_format, description)
    if inputs is None and (weights.get("type"), weights.get("num_bits")) == ("float", 8):
        return FP8_WEIGHTS_ONLY
    if inputs is None or stored_format == "int-quantized":
        activations = _json_object(inputs, "input_activations")
        return _parse_integer_group(weights, activations, stored_format, description)
    inputs = _json_object(inputs, "input_activations")
    if any((part.get("type"), part.get("num_bits")) != ("float", 8) for part in (weights, inputs)):
        raise unsupported(f"{description} with activations in {inputs.get('type')}{inputs.get('num_bits')}")
    static = not inputs.get("dynamic", False)
    activations = f"{description} with {'static' if static else 'dynamic'} activations by {inputs.get('strategy')}"
    if strategy == "block":
        fits = weights.get("block_structure") in _BLOCKS and not static
        if fits and inputs.get("strategy") == "group" and inputs.get("group_size") == GROUP:
            return QuantScheme("block")
    elif strategy in ("tensor", "channel") and inputs.get("strategy") == ("tensor" if static else "token"):
        return QuantScheme(strategy, static)
    elif strategy in ("tensor", "channel") and inputs.get("strategy") == "tensor":
        # With a scale over all tokens of a step, one request would change another's results.
        return QuantScheme(strategy)
    raise unsupported(activations)


def _parse_fp4_group(weights: Mapping[str, Any], inputs: Any, stored_format: Any, description: str) -> PackedFormat:
    """Packing of a config group with e2m1 weights; activations keep 16 bits unless W4A4 is asked for."""
    inputs = _json_object(inputs, "input_activations")
    for fp4_scheme, strategy in ((NVFP4, "tensor_group"), (MXFP4, "group")):
        settings = (strategy, fp4_scheme.group)
        if stored_format == f"{fp4_scheme.code}-pack-quantized" and _groups_of(weights) == settings:
            in_fp4 = fp4_scheme is NVFP4 and (inputs.get("type"), inputs.get("num_bits")) == ("float", 4)
            return packed_checkpoint.fp4_format(
                fp4_scheme, "input_global_scale" if in_fp4 and _groups_of(inputs) == settings else ""
            )
    raise unsupported(f"{description} in groups of {weights.get('group_size')} in the format {stored_format}")


def _groups_of(numbers: Mapping[str, Any]) -> tuple[Any, Any]:
    return numbers.get("strategy"), numbers.get("group_size")


def _parse_integer_group(
    weights: Mapping[str, Any], activations: Mapping[str, Any], stored_format: Any, description: str
) -> PackedFormat:
    """Packing of a config group whose activations are unquantized, or in int8: by token, or with scales that are dropped."""
    strategy, bits, symmetric = weights.get("strategy"), weights.get("num_bits"), bool(weights.get("symmetric", True))
    in_int8 = stored_format == "int-quantized" and bits == 8 and symmetric
    if activations and (not in_int8 or (activations.get("type"), activations.get("num_bits")) != ("int", 8)):
        raise unsupported(f"{description} with activations in {activations.get('type')}{activations.get('num_bits')}")
    in_int32 = stored_format == "pack-quantized" and bits in (4, 8)
    if weights.get("type") != "int" or not (in_int8 or in_int32) or strategy not in ("group", "channel"):
        raise unsupported(f"{description} with unquantized activations in the format {stored_format}")
    size = PER_CHANNEL if strategy == "channel" else _group_size(weights.get("group_size"), description)
    by_token = (activations.get("strategy"), activations.get("dynamic"), activations.get("symmetric", True))
    tokens = size == PER_CHANNEL and by_token == ("token", True, True)
    return (
        packed_checkpoint.int8_format(size, tokens)
        if in_int8
        else packed_checkpoint.compressed_tensors_format(weights["num_bits"], size, symmetric)
    )


AWQ, GPTQ, MODELOPT, COMPRESSED_TENSORS = map(QuantizationFormat, (_awq, _gptq, _modelopt, _compressed_tensors))
FBGEMM_FP8 = QuantizationFormat(_fbgemm_fp8)
FINE_GRAINED_FP8 = QuantizationFormat(_fine_grained, QuantScheme("tensor"))


def check_dtypes(
    model: PreTrainedModel,
    stored: Mapping[str, CheckpointTensor],
    filled: Mapping[str, str],
    scaled: Mapping[str, Tensor],
) -> None:
    """Raise `ValueError` for FP8 weights without scales, scales of other weights, and integers in float tensors.

    Args:
        filled: checkpoint name -> name of the model's tensor that contains it.
    """
    wanted = loadable_tensors(model)
    for name, target in filled.items():
        dtype = stored[name].dtype
        if target.removesuffix(".weight") in scaled:
            fault = "" if dtype == "F8_E4M3" else f"{dtype} with a scale"
        elif dtype in _FLOATS or (target in wanted and not wanted[target].is_floating_point()):
            fault = ""
        else:
            fault = (
                f"{dtype} without a scale" if dtype.startswith("F8") else f"{dtype}, expected floating-point numbers"
            )
        if fault:
            raise ValueError(
                f"{stored[name].file} has {name} as {fault}; check that config.json belongs to these weights."
            )
