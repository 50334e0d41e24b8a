"""The return value of a forward, as a tree over the flat outputs of its graph."""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchweave.compiler.capture.side_effects import reject_side_effects
from torchweave.compiler.errors import TraceError, source_location
from torchweave.compiler.ir.graph import Attribute, Constant, Input, OutputTree, same_geometry
from torchweave.compiler.ir.symbols import value

_VIEW_ATTRIBUTES = ("T", "mT", "H", "mH", "data")


def output_tree(
    captured: Any,
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    roots: Mapping[str, Any],
    side_effects: Sequence[str],
) -> OutputTree:
    """Run Dynamo's generated code around the graph on marker tensors, and find each marker in the return value.

    Args:
        captured: Dynamo's capture of the module's forward for these inputs.
        roots: of its sources.
        side_effects: sources of the objects that the generated code changes.

    Raises:
        TraceError: forward returns an object that cannot be returned again at each call, or changes Python objects.
    """
    (output,) = (node for node in captured.backend_input.graph_module.graph.nodes if node.op == "output")
    if sizes := [node for node in output.all_input_nodes if not isinstance(value(node), Tensor)]:
        raise TraceError(
            "forward returns a size, or a number computed from sizes; return tensors", source_location(sizes[0])
        )
    markers = tuple(torch.empty(0) for _ in output.args[0])
    try:
        generated = captured.forward_callable(compiled_fn=lambda *args: markers, extra_globals=roots["G"])
        roots = {**roots, "G": ChainMap(generated.__globals__, roots["G"])}
        with reject_side_effects(side_effects, roots):
            result = generated(module, *inputs.values())
    except TraceError:
        raise
    except Exception as error:  # raised by the code that Dynamo generated
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(
            f"forward returns an object that cannot be rebuilt at each call, such as a generator; return tensors ({message})"
        ) from error
    index_of = {id(marker): index for index, marker in enumerate(markers)}
    input_of = {id(tensor): name for name, tensor in inputs.items()}
    flat, spec = pytree.tree_flatten(result)
    leaves: list[Any] = []
    for leaf in flat:
        if id(leaf) in index_of:
            leaves.append(index_of[id(leaf)])
        elif id(leaf) in input_of:
            leaves.append(Input(input_of[id(leaf)]))
        elif isinstance(leaf, Tensor):
            leaves.append(_attribute_of(leaf, inputs) or Constant(leaf))
        elif leaf is None or isinstance(leaf, (bool, str, float)):
            leaves.append(("value", leaf))
        else:
            raise TraceError(
                f"forward returns a {type(leaf).__name__}; return tensors, or None, a bool, float or string"
            )
    return OutputTree(spec, tuple(leaves))


def _attribute_of(leaf: Tensor, inputs: Mapping[str, Tensor]) -> Attribute | None:
    """The attribute of an input that a returned tensor is; None when it is no view of an input."""
    for name, tensor in inputs.items():
        if leaf.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            continue
        for attribute in _VIEW_ATTRIBUTES:
            with contextlib.suppress(RuntimeError):  # not every input has every attribute
                if same_geometry(getattr(tensor, attribute), leaf):
                    return Attribute(name, attribute)
        raise TraceError(f"forward returns a view of {name} that is not part of the traced graph; return a copy of it")
    return None
