"""Dropout that drops nothing is its input, as in eager code, and not a copy of it.

Before    y = dropout(x, 0.5, training=False)
After     y = x
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional

from torchweave.compiler.ir.graph import CapturedGraph

_PARAMETERS: dict[Any, tuple[str, str, str]] = {
    **dict.fromkeys(
        (functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout), ("input", "p", "training")
    ),
    **dict.fromkeys((torch.dropout, torch.alpha_dropout, torch.feature_dropout), ("input", "p", "train")),
}
_DEFAULTS = {functional.dropout: True}
"""`training` where it is left out; False for the others."""


def remove_idle_dropout(graph: CapturedGraph) -> None:
    """See the module's text."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in _PARAMETERS:
            continue
        given: dict[str, Any] = {**dict(zip(_PARAMETERS[node.target], node.args, strict=False)), **node.kwargs}
        training = given.get("training", given.get("train", _DEFAULTS.get(node.target, False)))
        source = given.get("input")
        if isinstance(source, fx.Node) and (training is False or given.get("p") == 0):
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
    graph.module.recompile()
