"""Tensors of multi-token-prediction (MTP) layers, which checkpoints hold beside the model's own.

Two published forms:

    DeepSeek, GLM    `model.layers.N.`, after the model's N layers: `enorm`, `hnorm`, `eh_proj`, `shared_head.norm`, and a layer
    Mellum, Qwen     `mtp.`: `pre_fc_norm_embedding`, `pre_fc_norm_hidden`, `fc`, `norm`, and `layers.0.`
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

_Tensor = TypeVar("_Tensor")
_MODULE = re.compile(r"^(model\.)?mtp\.")
_PROJECTION = re.compile(r"(?:^|\.)layers\.(\d+)\.eh_proj\.weight$")
_LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")
_RENAMED = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "fc.": "eh_proj.",
    "shared_head.norm.": "norm.",
    "post_norm.": "norm.",
}
_BASE_MODULES = ("enorm.", "hnorm.", "eh_proj.", "norm.")
"""Modules of the base model there."""
_SHARED = ("shared_head.", "embed_tokens.")
"""Copies of the model's embeddings and head."""


def split_mtp_tensors(stored: Mapping[str, _Tensor], num_layers: int) -> tuple[dict[str, _Tensor], dict[str, _Tensor]]:
    """The tensors of a checkpoint without those of MTP layers, and these.

    Args:
        num_layers: of the model; layers after them with an `eh_proj` are MTP layers.
    """
    numbers = _layer_numbers(stored, num_layers)
    mtp = {
        name: tensor
        for name, tensor in stored.items()
        if _MODULE.match(name) or ((layer := _LAYER.match(name)) is not None and int(layer[1]) in numbers)
    }
    return {name: tensor for name, tensor in stored.items() if name not in mtp}, mtp


def count_mtp_layers(mtp: Iterable[str]) -> int:
    """Number of layers of the tensors that `split_mtp_tensors` returned."""
    layers = {found[0] for name in mtp if (found := re.search(r"layers\.\d+\.", name)) is not None}
    return len(layers)


def as_model_of_one_layer(mtp: Mapping[str, _Tensor]) -> dict[str, _Tensor]:
    """The tensors of an MTP layer by their names in a model whose only layer it is, without copies of the model's own.

    `enorm`, `hnorm` and `eh_proj` are modules of the base model there, and its final norm is the layer's.
    """
    renamed = {}
    for name, tensor in mtp.items():
        part = _LAYER.sub("", _MODULE.sub("", name))
        for old, new in _RENAMED.items():
            part = new + part.removeprefix(old) if part.startswith(old) else part
        if part.startswith(_SHARED):
            continue
        renamed[f"model.{part}" if part.startswith(_BASE_MODULES) else f"model.layers.0.{part}"] = tensor
    return renamed


def _layer_numbers(names: Iterable[str], num_layers: int) -> set[int]:
    found = (_PROJECTION.search(name) for name in names)
    return {int(match[1]) for match in found if match is not None and int(match[1]) >= num_layers}
