"""Capture: a module's forward as ONE graph of Torch IR with dynamic sizes, by Dynamo, without guards.

No guard is kept: whoever weaves a module promises that it does not change, and the sizes that may change are declared.
What the graph was specialised to by declaration (example dtypes, devices, every undeclared size) is checked at the call.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg

from torchweave.compiler.capture.outputs import output_tree
from torchweave.compiler.capture.side_effects import record_side_effects
from torchweave.compiler.capture.trace_once.clone import CloneError
from torchweave.compiler.capture.trace_once.found import PlaceholderMap
from torchweave.compiler.capture.trace_once.kinds import find_repeated
from torchweave.compiler.capture.trace_once.placeholder import lazy_modules
from torchweave.compiler.capture.trace_once.stitch import stitch_layers
from torchweave.compiler.capture.trace_once.tails import without_tails
from torchweave.compiler.capture.trace_once.watch import NotRepeatableError
from torchweave.compiler.dump import bytecode_text
from torchweave.compiler.errors import (
    InvariantError,
    SizeError,
    TraceError,
    source_location,
    source_locations,
    trace_error,
    user_location,
)
from torchweave.compiler.ir.aliasing import op_name
from torchweave.compiler.ir.graph import (
    Binding,
    CapturedGraph,
    Constant,
    Input,
    Size,
    UnusedInput,
    clean_up_graph,
)
from torchweave.compiler.ir.mutation import mutated_args, storage_id
from torchweave.compiler.ir.sources import SourceError, resolve
from torchweave.compiler.ir.symbols import (
    DynamicDims,
    choose_size_hints,
    dynamic_shapes_mode,
    example,
    mark,
    symbol_name,
    value,
)
from torchweave.config.options import DynamicShapes
from torchweave.report import Report

_TRACE_ONCE_PREFIX = f"{__package__}.trace_once."
_NUMPY_SOURCE_PREFIX = "___from_numpy("
"""How Dynamo's source of a numpy number or array begins."""


def capture(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    dynamic: DynamicDims,
    mode: DynamicShapes,
    report: Report | None = None,
    trace_once: bool = True,
) -> CapturedGraph:
    """Trace `module(*inputs.values())` into one graph.

    Args:
        inputs: example tensors by forward's parameter names, in forward's order. Their values are not read.
        dynamic: names of the dimensions that vary, by input and dimension: `{"input_ids": {0: "T"}}`.
        mode: how these dimensions are kept symbolic.
        report: is offered the code that Dynamo made of the forward, and gets a `trace_once` event: which layers were
            traced and how many were cloned, or why none was.
        trace_once: trace layers that do the same once, and clone the nodes of the others. The graph is the same either way.

    Raises:
        TraceError: the forward cannot be traced, with the line and the cause.
    """
    forward_parameters(module, inputs)
    hints = choose_size_hints(inputs, dynamic, _static_sizes(module))
    examples = {name: example(tensor, dynamic.get(name, {}), hints) for name, tensor in inputs.items()}
    report = report or Report(show=False)
    graph = _capture_once(module, examples, dynamic, mode, report) if trace_once else None
    return graph or _capture(module, examples, dynamic, mode, report, {})


def _capture_once(
    module: nn.Module, examples: Mapping[str, Tensor], dynamic: DynamicDims, mode: DynamicShapes, report: Report
) -> CapturedGraph | None:
    """The graph with each kind of layer traced once; None when no layer repeats another, or it cannot be shown to."""
    try:
        repeated = find_repeated(module, list(examples.values()))
        if repeated is None:
            return None
        with lazy_modules(repeated.kinds, repeated.tails) as placeholder_map, without_tails(repeated.tails):
            graph = _capture(module, examples, dynamic, mode, report, placeholder_map)
    except Exception as error:  # whatever it is: a saving must not stop what works without it
        known = isinstance(error, (NotRepeatableError, CloneError, TraceError))
        report.event("trace_once", traced=[], cloned=0, why=str(error) if known else f"{type(error).__name__}: {error}")
        return None
    report.event("trace_once", **repeated.facts())
    return graph


def _capture(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    dynamic: DynamicDims,
    mode: DynamicShapes,
    report: Report,
    placeholders: PlaceholderMap,
) -> CapturedGraph:
    """Trace the module as it stands, and put the layers that it has stand-ins for into the graph."""
    names, examples = forward_parameters(module, inputs), list(inputs.values())
    for name, tensor in inputs.items():
        mark(tensor, dynamic.get(name, {}), mode)
    with record_side_effects() as side_effects:
        captured = _trace(module, examples, mode)
    if captured.backend_input is None:
        raise TraceError("forward computes no tensor, so there is nothing to compile")
    gm = captured.backend_input.graph_module
    _reject_functorch(gm)
    _reject_triton_kernels(gm)
    code = captured.graph_capture_output.bytecode
    report.artifact("dynamo/transformed_code.txt", lambda: bytecode_text(code))
    roots = _roots(module, names, examples, captured)
    given = dict(zip(names, examples, strict=True))
    bindings = _bind(gm, roots, given)
    graph = CapturedGraph(
        module=_plain_module(gm),
        inputs=names,
        bindings=bindings,
        output=output_tree(captured, module, given, roots, side_effects),
        symbols={},
        sources=_traced_modules(captured),
        unused_inputs=_unused_inputs(given, dynamic, bindings),
    )
    if placeholders:
        stitch_layers(graph, placeholders)
    graph.symbols = _name_symbols(graph, dynamic)
    _lift_attributes(graph)
    _reject_mutated_constants(graph)
    clean_up_graph(graph)
    return graph


def forward_parameters(module: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The names of `inputs`, checked to be the leading parameters of the module's forward."""
    parameters = [
        name
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    names = tuple(inputs)
    if list(names) != parameters[: len(names)]:
        raise ValueError(f"inputs must be named in forward's order: {parameters}, not {list(names)}")
    return names


def _static_sizes(module: nn.Module) -> set[int]:
    return {size for tensor in [*module.parameters(), *module.buffers()] for size in tensor.shape}


def _trace(module: nn.Module, examples: list[Tensor], mode: DynamicShapes) -> Any:
    """Dynamo's capture of the whole forward. Sizes are dynamic only where they were marked."""
    import torch._dynamo as dynamo
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    rules = dynamo.config.patch(
        specialize_int=True, specialize_float=True, assume_static_by_default=True, automatic_dynamic_shapes=False
    )
    dynamo.reset()
    try:
        with (
            torch.no_grad(),
            dynamic_shapes_mode(mode),
            rules,
            get_metrics_context(),
            dynamo_timed("torchweave_capture"),
        ):
            return fullgraph_capture(module, tuple(examples))
    except Exception as error:
        raise trace_error(error) from error


def _roots(module: nn.Module, names: tuple[str, ...], examples: list[Tensor], captured: Any) -> dict[str, Any]:
    """What Dynamo's sources start from. A module with hooks is traced through `__call__(self, *args)`."""
    forward = getattr(module.forward, "__func__", module.forward)
    myself = forward.__code__.co_varnames[0] if hasattr(module.forward, "__self__") else "self"
    frame = {myself: module, "self": module, "args": tuple(examples), **dict(zip(names, examples, strict=True))}
    output = captured.graph_capture_output
    globals_ = dict(output.f_globals)
    for alias, name in output.import_sources.items():
        globals_.setdefault(alias, sys.modules.get(name))
    return {"L": frame, "G": globals_}


def _source(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        source = node.meta["grapharg"].source
    return source.name if isinstance(source.name, str) else source.name()


def _bind(gm: fx.GraphModule, roots: dict[str, Any], inputs: dict[str, Tensor]) -> dict[str, Binding]:
    """What each placeholder is: an input, a size of an input, or a tensor of the module."""
    by_identity = {id(tensor): name for name, tensor in inputs.items()}
    bindings: dict[str, Binding] = {}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        if isinstance(value(node), (torch.SymInt, int)):
            continue
        source = _source(node)
        if source.startswith(_NUMPY_SOURCE_PREFIX):
            name = source.removeprefix(_NUMPY_SOURCE_PREFIX).removesuffix(")").replace("L['self']", "self")
            raise TraceError(
                f"forward reads {name}, which is numpy's; keep a number as Python's (`float(...)`, `int(...)`), and an array as "
                "a tensor (`torch.from_numpy(...)`, a buffer)"
            )
        try:
            found = resolve(source, roots)
        except SourceError as error:
            raise TraceError(f"forward reads a tensor that cannot be bound: {error}") from error
        if not isinstance(found, Tensor):
            raise TraceError(f"forward reads {source}, which is no tensor but {type(found).__name__}")
        if id(found) in by_identity:
            bindings[node.name] = Input(by_identity[id(found)])
        else:
            bindings[node.name] = Constant(found, source)
    for node in placeholders:
        if node.name not in bindings:
            bindings[node.name] = _bind_size(node, placeholders, bindings)
    return bindings


def _bind_size(size: fx.Node, placeholders: list[fx.Node], bindings: dict[str, Binding]) -> Size:
    wanted = str(value(size))
    for node in placeholders:
        binding = bindings.get(node.name)
        if isinstance(binding, Input):
            for dim, found in enumerate(value(node).shape):
                if isinstance(found, torch.SymInt) and str(found) == wanted:
                    return Size(binding.name, dim)
    raise TraceError(
        f"the size {_source(size)} is of an input of which forward reads nothing else; take it from one that it reads"
    )


def _unused_inputs(
    inputs: Mapping[str, Tensor], dynamic: DynamicDims, bindings: Mapping[str, Binding]
) -> tuple[UnusedInput, ...]:
    """The inputs that no placeholder is bound to."""
    read = {binding.name for binding in bindings.values() if isinstance(binding, Input)}
    found = []
    for name, tensor in inputs.items():
        if name not in read:
            sizes = tuple(dynamic.get(name, {}).get(dim, size) for dim, size in enumerate(tensor.shape))
            found.append(UnusedInput(name, tensor.dtype, tensor.device.type, sizes))
    return tuple(found)


def _name_symbols(graph: CapturedGraph, dynamic: DynamicDims) -> dict[str, str]:
    """Symbols by the caller's names; a declared size that tracing turned into a number is refused."""
    names: dict[str, str] = {}
    used = {
        binding.name: node for node in graph.placeholders() if isinstance(binding := graph.bindings[node.name], Input)
    }
    for input_name, dims in dynamic.items():
        if input_name not in used:
            continue
        shape = value(used[input_name]).shape
        for dim, size_name in dims.items():
            symbol = symbol_name(shape[dim])
            if symbol is None:
                where, why = _specialization_cause(shape[dim], graph)
                raise SizeError(f"{size_name} ({input_name} dimension {dim}) was fixed to {shape[dim]}{why}", where)
            names[symbol] = size_name
    return names


def _specialization_cause(size: Any, graph: CapturedGraph) -> tuple[str, str]:
    """Where and why a size became a number, as far as the shape environment remembers."""
    shape_env = getattr(graph.fake_mode, "shape_env", None)
    for guard in reversed(getattr(shape_env, "guards", [])):
        if str(size) in str(guard.expr):
            where, code = user_location(guard.sloc)
            return where, f" by a comparison ({guard.expr}) in `{code}`"
    return "", ": forward needs this very size"


def _plain_module(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph on a module of its own that holds no parameters, with flat outputs and only what later stages read."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            copy = graph.output(map_arg(tuple(node.args[0]), copies.__getitem__))
        else:
            copy = graph.node_copy(node, copies.__getitem__)
        copies[node] = copy
        kept = ("example_value", "stack_trace")
        copy.meta = {key: node.meta[key] for key in kept if key in node.meta}
    return _LazyGraphModule(gm, graph, "Captured")  # its code is made when it is asked for, not after each change


def _reject_functorch(gm: fx.GraphModule) -> None:
    """`vmap`, `grad` and their like turn a state of torch on and off around other operations: whoever runs these one by one, on
    fakes or over streams, stops in between and leaves it on in the whole process."""
    homes = {
        node: getattr(node.target, "__module__", None) or "" for node in gm.graph.nodes if node.op == "call_function"
    }
    found = [node for node, home in homes.items() if home.startswith(("torch._functorch", "torch._C._functorch"))]
    if found:
        raise TraceError(
            "forward uses a transform of torch.func (vmap, grad or the like), which cannot be divided into operations; write it "
            "for the whole batch, or put it into a custom op",
            _last_user_location(found),
        )


def _reject_triton_kernels(gm: fx.GraphModule) -> None:
    """A graph names a Triton kernel by its number in this process, where another one has another kernel, and not what it writes."""
    if found := [node for node in gm.graph.nodes if op_name(node)[1].startswith("triton_kernel_wrapper")]:
        raise TraceError(
            "forward launches a Triton kernel, of which a graph cannot tell what it writes; put the launch into a custom op "
            "(torch.library.custom_op, with its mutates_args)",
            _last_user_location(found),
        )


def _last_user_location(nodes: Sequence[fx.Node]) -> str:
    """The last of their lines that is not torch's own."""
    places = [
        where for node in nodes for where in source_locations(node) if not where.startswith(f"{torch.__path__[0]}/")
    ]
    return places[-1] if places else ""


def _lift_attributes(graph: CapturedGraph) -> None:
    """Turn tensors that tracing stored on the graph module into constants."""
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        found = _get_attribute(graph.module, str(node.target))
        if not isinstance(found, Tensor):
            continue
        placeholder = graph.add_constant(node.name, found)
        node.replace_all_uses_with(placeholder)
        graph.graph.erase_node(node)


def _get_attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def _reject_mutated_constants(graph: CapturedGraph) -> None:
    """Constants are bound once: a forward that writes to a parameter or buffer, or to a view of one, is refused."""
    owners = {storage_id(node): constant.source or node.name for node, constant in graph.constants()}
    for node in graph.graph.nodes:
        for argument in mutated_args(node):
            if storage_id(argument) in owners:
                raise InvariantError(
                    f"forward writes to {owners[storage_id(argument)]}, but parameters and buffers are bound once and must "
                    "stay as they are; pass the tensor in as an input, or write to it in a boundary op",
                    source_location(node),
                )


def _traced_modules(captured: Any) -> tuple[str, ...]:
    """Importable names of the files whose code was traced, without those that torch's version stands for; and the names of files
    that are no module's, such as a cell of a notebook."""
    by_file = {getattr(module, "__file__", None): name for name, module in reversed(list(sys.modules.items()))}
    traced = captured.graph_capture_output.traced_code
    found = {by_file.get(code.co_filename, code.co_filename) for code in traced if not _is_generated(code)}
    return tuple(sorted(name for name in found if name and not name.startswith(("torch.", _TRACE_ONCE_PREFIX))))


def _is_generated(code: CodeType) -> bool:
    """Whether Python or torch wrote it (an `__init__` of a dataclass, a lambda), or Python brings it."""
    name = code.co_filename
    return name.startswith("<frozen ") or (
        name == "<string>" and re.fullmatch("__.*__|<lambda>", code.co_name) is not None
    )
