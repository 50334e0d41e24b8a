"""Cut a captured graph to one pipeline stage, at the marker ops of the model.

Before                                       After
    h = ... embedding, of another stage          placeholder: stage_input
    x = torchweave.stage_input(h)                y = ... layers(stage_input)
    y = ... layers(x)                            return y
    z = torchweave.stage_output(y)
    return ... output layer(z)

Each stage computes shared values, such as the angles of rotary embeddings, from its own inputs.
"""

from __future__ import annotations

from torch import fx
from torch.utils import _pytree as pytree

from torchweave.compiler.errors import TraceError
from torchweave.compiler.ir.collectives import op_schema
from torchweave.compiler.ir.graph import CapturedGraph, Input, OutputTree
from torchweave.compiler.ir.mutation import mutated_args, storage_id
from torchweave.compiler.ir.symbols import value

STAGE_INPUT = "stage_input"
"""Name of the graph's last input in every stage but the first."""


def extract_pipeline_stage(graph: CapturedGraph) -> None:
    """Cut the graph, in place, to its stage; a graph without markers is unchanged.

    Raises:
        TraceError: the stage reads a value of another stage besides its stage input.
    """
    begin, end = _mark(graph, "torchweave::stage_input"), _mark(graph, "torchweave::stage_output")
    if begin is None and end is None:
        return
    if end is not None:
        _end_at(graph, end)
    if begin is not None:
        _begin_at(graph, begin)
    _eliminate_dead_code(graph)
    if _mark(graph, "torchweave::elsewhere") is not None:
        raise TraceError(
            "its layers pass more than hidden states to the next layer; pipeline stages exchange hidden states only"
        )
    graph.drop_unused_constants()
    graph.graph.lint()
    graph.module.recompile()


def _mark(graph: CapturedGraph, name: str) -> fx.Node | None:
    calls = (node for node in graph.graph.nodes if node.op == "call_function")
    return next((node for node in calls if (schema := op_schema(node)) is not None and schema.name == name), None)


def _end_at(graph: CapturedGraph, end: fx.Node) -> None:
    output = graph.graph.output_node()
    output.args = ((end.args[0],),)
    graph.output = OutputTree(pytree.tree_flatten(0)[1], (0,))


def _begin_at(graph: CapturedGraph, begin: fx.Node) -> None:
    *_, last = graph.placeholders()
    with graph.graph.inserting_after(last):
        placeholder = graph.graph.placeholder(STAGE_INPUT)
    placeholder.meta["example_value"] = value(begin)
    graph.bindings[placeholder.name] = Input(STAGE_INPUT)
    graph.inputs = (*graph.inputs, STAGE_INPUT)
    begin.replace_all_uses_with(placeholder)


def _eliminate_dead_code(graph: CapturedGraph) -> None:
    """Erase nodes that neither feed the output nor write to a storage that does."""
    live: set[fx.Node] = set()
    live_storages: set[int] = set()
    for node in reversed(list(graph.graph.nodes)):
        needed = node.op in ("output", "placeholder") or any(user in live for user in node.users)
        if needed or any(storage_id(argument) in live_storages for argument in mutated_args(node)):
            live.add(node)
            live_storages.update(
                storage for each in (node, *node.all_input_nodes) if (storage := storage_id(each)) is not None
            )
        else:
            graph.graph.erase_node(node)
