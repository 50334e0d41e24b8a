"""FP8 checkpoints: what `quantization_config` in a config.json says, and the scales beside the weights.

Two forms are read. compressed-tensors (llm-compressor, `format: float-quantized`): `X.weight` in e4m3 with `X.weight_scale`, one
number, one a row, or one a block; activations per token, per group of 128, or static with `X.input_scale`. Hugging Face's `fp8`
(fine-grained: DeepSeek, Qwen): `X.weight_scale_inv` by blocks of 128 x 128, or (Ministral) one number, with `X.activation_scale`
where activations are static; AutoFP8 calls these two `X.weight_scale` and `X.input_scale`. Whatever is not one of these is refused
with what it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from torchweave.models.attention import UnsupportedModel
from torchweave.models.resolve import Source, read_json
from torchweave.models.weights.quantize import QuantScheme, scheme
from torchweave.models.weights.read import CheckpointTensor, loadable_tensors
from torchweave.models.weights.shards import TensorShard
from torchweave.ops.quant.fp8 import GROUP

WEIGHT_SCALES = (".weight_scale", ".weight_scale_inv")
INPUT_SCALES = (".input_scale", ".activation_scale")
_CACHE_SCALES = {
    "k": (".k_scale", ".k_proj.output_scale", ".kv_scale"),
    "v": (".v_scale", ".v_proj.output_scale", ".kv_scale"),
}
"""Endings of the scales of a layer's keys and values: today's, those of the first llm-compressor, those of AutoFP8."""
_BLOCKS = ([GROUP, GROUP], (GROUP, GROUP))
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


def quantization_config(source: Source) -> dict[str, Any] | None:
    """The `quantization_config` of a model's config.json, of its text part if need be; None where it has none."""
    raw = source.config if source.folder is None else read_json(source.folder / "config.json")
    assert raw is not None
    inner = raw.get("text_config")
    found = raw.get("quantization_config") or (inner if isinstance(inner, dict) else {}).get("quantization_config")
    return found if isinstance(found, dict) else None


def checkpoint_scheme(source: Source) -> QuantScheme | None:
    """How a checkpoint is quantised; None: not at all.

    Raises:
        UnsupportedModel: in a way that cannot be served; says which.
    """
    config = quantization_config(source)
    if config is None:
        return None
    method = config.get("quant_method", "unknown")
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    if method == "fp8":
        return _fine_grained(config)
    raise _unsupported(f"by {method}")


def checkpoint_kv_cache_dtype(source: Source) -> str | None:
    """What a checkpoint wants keys and values kept in; None where it says nothing, or something that there is not."""
    cache = (quantization_config(source) or {}).get("kv_cache_scheme")
    if not isinstance(cache, dict) or cache.get("dynamic") or cache.get("strategy", "tensor") != "tensor":
        return None
    return "fp8_e4m3" if (cache.get("type"), cache.get("num_bits")) == ("float", 8) else None


def pop_kv_cache_scales(stored: dict[str, CheckpointTensor]) -> dict[int, tuple[float, float]]:
    """Take the scales of keys and values out of a checkpoint's tensors: one of each a layer, 1.0 where there is none.

    Raises:
        ValueError: a scale that cannot be one.
    """
    found: dict[int, dict[str, float]] = {}
    taken: set[str] = set()
    for kind, endings in _CACHE_SCALES.items():
        for name in [name for ending in endings for name in stored if name.endswith(ending)]:
            layer = _LAYER_NUMBER.search(name)
            taken.add(name)
            if layer is None or stored[name].shape not in ((), (1,)):
                continue  # a scale for each head: there is no such cache
            with safe_open(stored[name].file, framework="pt") as tensors:
                scale = float(tensors.get_tensor(name))
            if not (math.isfinite(scale) and scale > 0):
                raise ValueError(f"{stored[name].file} has {name}={scale}: a scale is a finite number above 0.")
            found.setdefault(int(layer[1]), {}).setdefault(kind, scale)
    for name in taken:
        del stored[name]
    return {layer: (scales.get("k", 1.0), scales.get("v", 1.0)) for layer, scales in found.items()}


def resolve_scheme(source: Source, requested: str | None) -> QuantScheme | None:
    """How linears are to be quantised: as the checkpoint has them, else as asked.

    Raises:
        ValueError: it is quantised in another way than asked.
    """
    stored = checkpoint_scheme(source)
    if stored is None or requested is None:
        return stored if requested is None else scheme(requested)
    if requested != stored.name and scheme(requested) != stored:
        raise ValueError(
            f"quantization={requested} was asked for, but {source.name!r} is {stored.name} already; leave it out."
        )
    return stored


def _unsupported(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"This checkpoint is quantized {what}, which is not supported; use an unquantized one (quantization=fp8 quantises it as "
        "it is loaded), or one in FP8 (compressed-tensors, or Hugging Face's fp8)."
    )


def _fine_grained(config: Mapping[str, Any]) -> QuantScheme:
    static = config.get("activation_scheme", "dynamic") == "static"
    block = config.get("weight_block_size")
    if config.get("fmt", "e4m3") != "e4m3":
        raise _unsupported(f"by fp8 in {config['fmt']}")
    if block is None:
        return QuantScheme("tensor", static)
    if block not in _BLOCKS or static:
        raise _unsupported(f"by fp8 in blocks of {block} with {'static' if static else 'dynamic'} activations")
    return QuantScheme("block")


def _compressed_tensors(config: Mapping[str, Any]) -> QuantScheme | None:
    if places := sorted(_online_transforms(config)):
        raise _unsupported(f"by compressed-tensors with transforms of {', '.join(places)} as the model runs")
    schemes = {
        _parse_config_group(*each) for each in _json_object(config.get("config_groups"), "config_groups").items()
    }
    if not schemes and config.get("kv_cache_scheme"):
        return None
    if len(schemes) != 1:
        raise _unsupported(f"by compressed-tensors in {len(schemes)} different ways")
    (found,) = schemes
    return found


def _json_object(found: Any, name: str) -> Mapping[str, Any]:
    """What is called `name` in a quantization_config, an empty object where it is null.

    Raises:
        ValueError: it is no JSON object.
    """
    if found is not None and not isinstance(found, Mapping):
        raise ValueError(
            f"The quantization_config of config.json has {name}={found!r}: expected a JSON object; copy or download it again."
        )
    return found or {}


def _online_transforms(config: Mapping[str, Any]) -> set[str]:
    """What a checkpoint wants multiplied by a matrix as the model runs; what it says so of weights was done to them."""
    schemes = _json_object(
        _json_object(config.get("transform_config"), "transform_config").get("config_groups"), "config_groups"
    )
    places = set()
    for name, group in schemes.items():
        applied = _json_object(group, name).get("apply")
        for each in applied if isinstance(applied, list) else [applied]:
            places.add(str(_json_object(each, "apply").get("location")))
    return places - {"weight_input", "weight_output"}


def _parse_config_group(name: str, group: Any) -> QuantScheme:
    """The scheme of one group of layers."""
    group = _json_object(group, name)
    weights, inputs = _json_object(group.get("weights"), "weights"), group.get("input_activations")
    strategy = weights.get("strategy")
    what = f"by compressed-tensors to {weights.get('type')}{weights.get('num_bits')} by {strategy}"
    if inputs is None:
        raise _unsupported(f"{what} with activations as they are")
    inputs = _json_object(inputs, "input_activations")
    if any((part.get("type"), part.get("num_bits")) != ("float", 8) for part in (weights, inputs)):
        raise _unsupported(f"{what} with activations in {inputs.get('type')}{inputs.get('num_bits')}")
    static = not inputs.get("dynamic", False)
    how = f"{what} with {'static' if static else 'dynamic'} activations by {inputs.get('strategy')}"
    if strategy == "block":
        fits = weights.get("block_structure") in _BLOCKS and not static
        if fits and inputs.get("strategy") == "group" and inputs.get("group_size") == GROUP:
            return QuantScheme("block")
    elif strategy in ("tensor", "channel") and inputs.get("strategy") == ("tensor" if static else "token"):
        return QuantScheme(strategy, static)
    elif strategy in ("tensor", "channel") and inputs.get("strategy") == "tensor":
        return QuantScheme(strategy)  # one scale over all tokens of a step would let one request change another's
    raise _unsupported(how)


def pop_scales(
    stored: dict[str, CheckpointTensor], renamed: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Take the scales out of a checkpoint's tensors: (weight scales, input scales) by the name of the model's linear.

    Args:
        stored: loses them.
        renamed: checkpoint name -> model name, of weights.
    """
    weights: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    by_file: dict[Path, list[tuple[str, str, dict[str, Tensor]]]] = {}
    for name in list(stored):
        ending = next((end for end in (*WEIGHT_SCALES, *INPUT_SCALES) if name.endswith(end)), None)
        if ending is None:
            continue
        entry = stored.pop(name)
        target = renamed.get(name.removesuffix(ending) + ".weight")
        if target is not None:
            kind = inputs if ending in INPUT_SCALES else weights
            by_file.setdefault(entry.file, []).append((name, target.removesuffix(".weight"), kind))
    for file, entries in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for name, target, kind in entries:
                kind[target] = tensors.get_tensor(name)
    return weights, inputs


def shard_scales(scales: Mapping[str, Tensor], shards: Mapping[str, TensorShard]) -> dict[str, Tensor]:
    """One rank's scales: of the part of each weight that it keeps.

    Raises:
        UnsupportedModel: a part ends within a block of weights that has one scale.
    """
    return {name: _shard_scale(name, scale, shards.get(f"{name}.weight")) for name, scale in scales.items()}


def _shard_scale(name: str, scale: Tensor, shard: TensorShard | None) -> Tensor:
    if shard is None or scale.numel() == 1:
        return scale
    if scale.numel() == shard.full[0]:  # one for each row
        return scale if shard.dim else TensorShard((scale.numel(),), 0, shard.ranges).extract(scale.flatten())
    blocks = shard.for_block_scales(GROUP, scale.shape)
    if blocks is None:
        raise UnsupportedModel(
            f"{name} has one scale for each {GROUP} x {GROUP} weights, and the parts of ranks would end within such a block; "
            "use fewer ranks, or a checkpoint with a scale for each row."
        )
    return blocks.extract(scale)


def check_scales(weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
    """Refuse scales that would turn all that follows into numbers that mean nothing: no finite ones, or activations over zero.

    Raises:
        ValueError: names the linear.
    """
    for name, scale in weights.items():
        if not bool((torch.isfinite(scale.float()) & (scale.float() >= 0)).all()):
            raise ValueError(
                f"This checkpoint has scales of {name}.weight that are not all finite and at least 0; copy or download it again."
            )
    for name, scale in inputs.items():
        given = float(scale) if scale.numel() == 1 else f"a tensor of shape {list(scale.shape)}"
        if isinstance(given, str) or not (math.isfinite(given) and given > 0):
            raise ValueError(
                f"This checkpoint has {given} as the scale of what {name} is given: expected one finite number above 0; copy or "
                "download it again."
            )


def check_dtypes(
    model: PreTrainedModel,
    stored: Mapping[str, CheckpointTensor],
    filled: Mapping[str, str],
    scaled: Mapping[str, Tensor],
) -> None:
    """Refuse weights in FP8 without scales, scales beside weights that are not in FP8, and integers where numbers belong.

    Args:
        filled: checkpoint name -> what of the model it becomes, or becomes a part of.
    """
    wanted = loadable_tensors(model)
    for name, target in filled.items():
        dtype = stored[name].dtype
        if target.removesuffix(".weight") in scaled and target.endswith(".weight"):
            said = "" if dtype == "F8_E4M3" else f"{dtype} with a scale"
        elif dtype in _FLOATS or (target in wanted and not wanted[target].is_floating_point()):
            said = ""
        else:
            said = f"{dtype} without a scale" if dtype.startswith("F8") else f"{dtype}, expected floating-point numbers"
        if said:
            raise ValueError(
                f"{stored[name].file} has {name} as {said}; check that config.json belongs to these weights."
            )
