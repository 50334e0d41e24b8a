"""Capture a module's forward with Dynamo: one graph of Torch IR with dynamic sizes, without guards.

No guard is kept: the caller promises that the module does not change, and declares the sizes that may. Everything that the
graph is specialized to by declaration (dtypes and devices of the examples, each undeclared size) is checked at every call.
"""

from __future__ import annotations

import inspect
import logging
import operator
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any
from unittest import mock

import sympy
import torch
from torch import Tensor, fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg

from torchweave.compiler.cache.read_globals import globals_of
from torchweave.compiler.capture.outputs import EXTRA_KEYWORDS, output_tree, record_side_effects, source_text
from torchweave.compiler.capture.trace_once.clone_layers import (
    CloneError,
    PlaceholderMap,
    clone_layers,
    placeholder_layers,
)
from torchweave.compiler.capture.trace_once.layer_recorder import NotRepeatableError
from torchweave.compiler.capture.trace_once.repeated_layers import find_repeated, trace_once_facts
from torchweave.compiler.dump import bytecode_text
from torchweave.compiler.eager_semantics.registry import while_tracing
from torchweave.compiler.eager_semantics.size_answers import dynamic_shapes_mode
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
    SourceError,
    UnusedInput,
    clean_up_graph,
    resolve,
)
from torchweave.compiler.ir.mutation import mutated_args, storage_id
from torchweave.compiler.ir.symbols import (
    DynamicDims,
    choose_size_hints,
    condition_text,
    example,
    fixed_sizes,
    mark,
    record_size_names,
    symbol_name,
    value,
)
from torchweave.config.options import DynamicShapes
from torchweave.report import Report

_TRACE_ONCE_PREFIX = f"{__package__}.trace_once."
_NUMPY_SOURCE_PREFIX = "___from_numpy("
"""Prefix of Dynamo's source of a numpy number or array."""
_INPUT_SIZE = re.compile(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]")
"""Dynamo's source of a size of an input."""
_FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")
"""Logs a failing operation with a traceback and the symbols of sizes; the exception has them by their names."""
_NODE_META = ("example_value", "stack_trace")
"""Metadata of nodes that later stages read."""


@dataclass(frozen=True)
class _Request:
    """One forward to trace; see `capture`."""

    module: nn.Module
    inputs: Mapping[str, Tensor]
    dynamic: DynamicDims
    mode: DynamicShapes
    report: Report

    @property
    def arguments(self) -> tuple[Any, ...]:
        return _call_arguments(self.module, self.inputs)


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
        report: receives the bytecode that Dynamo generated, and a `trace_once` event: the layers that were traced and the
            number of cloned layers, or the reason why none was cloned.
        trace_once: trace equal layers once and clone the nodes of the others. The graph is the same either way.

    Raises:
        ValueError: the names of the inputs are not parameters of forward, in its order, or one without a default is left out.
        TraceError: the forward cannot be traced, with the line and the cause.
    """
    _call_arguments(module, inputs)  # raises for wrong names
    static_sizes = {size for tensor in [*module.parameters(), *module.buffers()] for size in tensor.shape}
    hints = choose_size_hints(inputs, dynamic, static_sizes)
    examples = {name: example(tensor, dynamic.get(name, {}), hints) for name, tensor in inputs.items()}
    request = _Request(module, examples, dynamic, mode, report or Report(show=False))
    graph = _capture_once(request) if trace_once else None
    return graph or _capture(request, {})


def _call_arguments(module: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """The positional arguments of forward up to the last input: inputs, and defaults of parameters between them."""
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    names = list(parameters)
    if by_keyword := [
        name
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name in inputs
    ]:
        raise ValueError(
            f"{by_keyword[0]} is keyword-only in forward, and inputs are passed by position; move it before the `*`, or call the "
            "module in the forward of another one"
        )
    if not names and inputs:
        raise ValueError(
            f"forward of {type(module).__name__} has no named parameter for {next(iter(inputs))}; name its tensors, as in "
            "`def forward(self, x)`, or call the module in the forward of another one"
        )
    used = names[: 1 + max((names.index(name) for name in inputs if name in parameters), default=-1)]
    required = [name for name in used if parameters[name].default is inspect.Parameter.empty]
    if list(inputs) != [name for name in used if name in inputs] or any(name not in inputs for name in required):
        optional = [name for name in names if parameters[name].default is not inspect.Parameter.empty]
        may = f", of which {optional} may be left out" if optional else ""
        raise ValueError(f"inputs must be named in forward's order: {names}{may}, not {list(inputs)}")
    return tuple(inputs[name] if name in inputs else parameters[name].default for name in used)


def _capture_once(request: _Request) -> CapturedGraph | None:
    """The graph with each kind of layer traced once; None when no layer can be shown to repeat another."""
    try:
        repeated = find_repeated(request.module, request.arguments)
        if repeated is None:
            return None
        with placeholder_layers(repeated) as placeholders:
            graph = _capture(request, placeholders)
    except Exception as error:  # an optimization must not stop a capture that works without it
        is_expected = isinstance(error, (NotRepeatableError, CloneError, TraceError))
        why = str(error) if is_expected else f"{type(error).__name__}: {error}"
        request.report.event("trace_once", traced=[], cloned=0, why=why)
        return None
    request.report.event("trace_once", **trace_once_facts(repeated))
    return graph


def _capture(request: _Request, placeholders: PlaceholderMap) -> CapturedGraph:
    """Trace the module in its current state, and replace the placeholders of layers by clones."""
    for name, tensor in request.inputs.items():
        mark(tensor, request.dynamic.get(name, {}), request.mode)
    with record_side_effects() as side_effects, record_size_names(request.inputs) as size_names:
        captured = _trace(request, size_names)
    if captured.backend_input is None:
        raise TraceError("forward computes no tensor, so there is nothing to compile")
    gm = captured.backend_input.graph_module
    _reject_functorch(gm)
    _reject_triton_kernels(gm)
    code, traced = captured.graph_capture_output.bytecode, _traced_code(captured)
    request.report.artifact("dynamo/transformed_code.txt", lambda: bytecode_text(code))
    roots = _roots(request, captured)
    bindings = _bind(gm, roots, request)
    graph = CapturedGraph(
        module=_plain_module(gm),
        inputs=tuple(request.inputs),
        bindings=bindings,
        output=output_tree(captured, request.arguments, request.module, request.inputs, roots, side_effects),
        symbols={},
        size_names=size_names,
        sources=tuple(sorted(traced)),
        globals=tuple(
            sorted({each for name, codes in traced.items() for code in codes for each in globals_of(code, name)})
        ),
        unused_inputs=_unused_inputs(request, bindings),
    )
    if placeholders:
        clone_layers(graph, placeholders)
    graph.symbols = _name_symbols(graph, request.dynamic)
    _lift_attributes(graph)
    _lift_number_tensors(graph)
    _reject_shared_constants(graph)
    clean_up_graph(graph)
    return graph


def _trace(request: _Request, size_names: Mapping[str, str]) -> Any:
    """Dynamo's capture of the whole forward; only marked sizes are dynamic."""
    import torch._dynamo as dynamo
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    rules = dynamo.config.patch(
        specialize_int=True,
        specialize_float=True,
        assume_static_by_default=True,
        automatic_dynamic_shapes=False,
        allow_rnn=True,
    )
    dynamo.reset()
    try:
        with (
            torch.no_grad(),
            dynamic_shapes_mode(request.mode),
            rules,
            get_metrics_context(),
            dynamo_timed("torchweave_capture"),
            while_tracing(),
            mock.patch.object(_FAKE_TENSOR_LOG, "disabled", True),
        ):
            return fullgraph_capture(request.module, request.arguments)
    except Exception as error:
        raise trace_error(error, size_names) from error


def _roots(request: _Request, captured: Any) -> dict[str, Any]:
    """The roots of Dynamo's sources: the locals of the frame that it traced, without defaults, and its globals."""
    from torch._dynamo.convert_frame import get_traced_fn

    function, owner = get_traced_fn(request.module)  # forward, or `__call__` of a module with hooks
    arguments = (*(() if owner is None else (owner,)), *request.arguments)
    # A decorator may be `wrapper(*args, **kwargs)`.
    bound = inspect.signature(function, follow_wrapped=False).bind(*arguments)
    frame = {"self": request.module, **bound.arguments}
    output = captured.graph_capture_output
    globals_ = dict(output.f_globals)
    for alias, name in output.import_sources.items():
        globals_.setdefault(alias, sys.modules.get(name))
    return {"L": frame, "G": globals_, EXTRA_KEYWORDS: _extra_keywords(function.__code__)}


def _source_from_self(source: str, roots: dict[str, Any], module: nn.Module) -> str:
    """A source of the module's own objects as `L['self']...`, whatever the traced frame calls the module."""
    for name, local in roots["L"].items():
        own, first = f"L['{name}']", local
        if isinstance(local, tuple) and local:  # of `*args`
            own, first = f"{own}[0]", local[0]
        if first is module and source.startswith(own):
            return f"L['self']{source.removeprefix(own)}"
    return source


def _extra_keywords(code: CodeType) -> str | None:
    """Name of the parameter `**kwargs` of a function."""
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return None
    return code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]


def _source(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        source = node.meta["grapharg"].source
    return source.name if isinstance(source.name, str) else source.name()


def _bind(gm: fx.GraphModule, roots: dict[str, Any], request: _Request) -> dict[str, Binding]:
    """The binding of each placeholder: an input, a size of an input, or a tensor of the module."""
    by_identity = {id(tensor): name for name, tensor in request.inputs.items()}
    bindings: dict[str, Binding] = {}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        if isinstance(value(node), (torch.SymInt, int)):
            continue
        source = _source_from_self(_source(node), roots, request.module)
        if source.startswith(_NUMPY_SOURCE_PREFIX):
            name = source.removeprefix(_NUMPY_SOURCE_PREFIX).removesuffix(")").replace("L['self']", "self")
            raise TraceError(
                f"forward reads {name}, a numpy value; keep a number as a Python number (`float(...)`, `int(...)`), and an "
                "array as a tensor (`torch.from_numpy(...)`, a buffer)"
            )
        try:
            tensor = resolve(source, roots)
        except SourceError as error:
            raise TraceError(f"forward reads a tensor that cannot be bound: {error}") from error
        if not isinstance(tensor, Tensor):
            raise TraceError(f"forward reads {source}, which is not a tensor but {type(tensor).__name__}")
        name = by_identity.get(id(tensor))
        bindings[node.name] = Constant(tensor, source) if name is None else Input(name)
    for node in placeholders:
        if node.name not in bindings:
            bindings[node.name] = _bind_size(node, placeholders, bindings, request.inputs)
    return bindings


def _bind_size(
    size: fx.Node, placeholders: list[fx.Node], bindings: dict[str, Binding], inputs: Mapping[str, Tensor]
) -> Size:
    expected = str(value(size))
    for node in placeholders:
        binding = bindings.get(node.name)
        if isinstance(binding, Input):
            for dim, dim_size in enumerate(value(node).shape):
                if isinstance(dim_size, torch.SymInt) and str(dim_size) == expected:
                    return Size(binding.name, dim)
    read = _INPUT_SIZE.fullmatch(_source(size))
    if read is None or read[1] not in inputs:
        raise TraceError(f"forward reads a number that is no size of an input, {_source(size)}; pass it in a tensor")
    return Size(read[1], int(read[2]))  # of an input whose values are not read


def _unused_inputs(request: _Request, bindings: Mapping[str, Binding]) -> tuple[UnusedInput, ...]:
    """The inputs that no placeholder is bound to."""
    used = {binding.name for binding in bindings.values() if isinstance(binding, Input)}
    unused = []
    for name, tensor in request.inputs.items():
        if name not in used:
            sizes = tuple(request.dynamic.get(name, {}).get(dim, size) for dim, size in enumerate(tensor.shape))
            unused.append(UnusedInput(name, tensor.dtype, tensor.device.type, sizes))
    return tuple(unused)


def _name_symbols(graph: CapturedGraph, dynamic: DynamicDims) -> dict[str, str]:
    """The caller's names of symbols.

    Raises:
        SizeError: tracing turned a declared size into a number.
    """
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
                raise SizeError(f"{size_name} ({input_name}.shape[{dim}]) was fixed to {shape[dim]}{why}", where)
            names[symbol] = size_name
    for node in graph.placeholders():
        binding = graph.bindings[node.name]
        symbol = symbol_name(value(node))
        if isinstance(binding, Size) and symbol is not None and binding.input not in used:
            names[symbol] = dynamic[binding.input][binding.dim]
    return names


def _specialization_cause(size: Any, graph: CapturedGraph) -> tuple[str, str]:
    """The location and the cause of a size that became a number, as recorded by the shape environment."""
    shape_env = getattr(graph.fake_mode, "shape_env", None)
    guards = [guard for guard in getattr(shape_env, "guards", []) if isinstance(guard.expr, sympy.Eq)]
    fixed = fixed_sizes(shape_env)
    for guard in guards:
        other = {symbol: fixed[str(symbol)] + 1 for symbol in guard.expr.free_symbols if fixed.get(str(symbol)) == size}
        if other and guard.expr.xreplace(other) == False:  # noqa: E712  sympy's false is not False
            where, code = user_location(guard.sloc)
            return where, f" by `{code}`, which needs a number (`{condition_text(guard.expr, graph.size_names)}`)"
    return "", ": forward works for this size only"


def _plain_module(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph on a module without parameters, with flat outputs and only the metadata of `_NODE_META`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    written: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in gm.graph.nodes:
        if targets := _copied_to_out(graph, node, copies):
            copies[node], written[node] = targets[0], targets
            continue
        if node.target is operator.getitem and node.args[0] in written:
            copies[node] = written[node.args[0]][node.args[1]]
            continue
        if node.op == "output":
            copy = graph.output(map_arg(tuple(node.args[0]), copies.__getitem__))
        else:
            copy = graph.node_copy(node, copies.__getitem__)
        copies[node] = copy
        copy.meta = {key: node.meta[key] for key in _NODE_META if key in node.meta}
    return _LazyGraphModule(gm, graph, "Captured")  # generates its code on demand, not after each change


def _copied_to_out(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> tuple[fx.Node, ...]:
    """`f(..., out=m)` of torch as `m.copy_(f(...))`, and its like for several results; nothing for another call.

    Functionalization puts the result in the place of m, with the result's strides; stock torch.compile returns these.
    """
    out = node.kwargs.get("out")
    given = out if isinstance(out, (tuple, list)) else (out,)
    targets = [each for each in given if isinstance(each, fx.Node)]
    if len(targets) < len(given) or not inspect.isbuiltin(node.target):
        return ()  # a Python function may need its `out`
    args, kwargs = map_arg((node.args, {**node.kwargs, "out": None}), value)
    with value(targets[0]).fake_mode:
        result = node.target(*args, **kwargs)
    results = (result,) if isinstance(result, Tensor) else tuple(result)
    if [list(each.shape) for each in results] != [list(value(each).shape) for each in targets]:
        return ()  # eager code resizes m
    trace = {key: node.meta[key] for key in _NODE_META if key in node.meta}

    def insert(op: str, target: Any, args: Any, kwargs: Any, example: Any) -> fx.Node:
        made = graph.create_node(op, target, args, kwargs)
        made.meta = {**trace, "example_value": example}
        return made

    args, kwargs = map_arg((node.args, {**node.kwargs, "out": None}), copies.__getitem__)
    call = insert("call_function", node.target, args, kwargs, result)
    items = [call]
    if not isinstance(result, Tensor):
        items = [insert("call_function", operator.getitem, (call, i), {}, each) for i, each in enumerate(results)]
    pairs = zip(targets, items, strict=True)
    return tuple(insert("call_method", "copy_", (copies[m], item), {}, value(m)) for m, item in pairs)


def _reject_functorch(gm: fx.GraphModule) -> None:
    """Refuse `vmap`, `grad` and the like: they switch global state of torch on and off around other operations, and running
    the operations separately (on fake tensors, over streams) would leave it on in the whole process."""
    modules = {
        node: getattr(node.target, "__module__", None) or "" for node in gm.graph.nodes if node.op == "call_function"
    }
    transforms = [
        node for node, name in modules.items() if name.startswith(("torch._functorch", "torch._C._functorch"))
    ]
    if transforms:
        raise TraceError(
            "forward uses a transform of torch.func (vmap, grad or the like), which cannot be split into operations; write it "
            "for the whole batch, or put it into a custom op",
            _last_user_location(transforms),
        )


def _reject_triton_kernels(gm: fx.GraphModule) -> None:
    """Refuse Triton kernels: a graph holds an index that is valid in this process only, and no mutated arguments."""
    if launches := [node for node in gm.graph.nodes if op_name(node)[1].startswith("triton_kernel_wrapper")]:
        raise TraceError(
            "forward launches a Triton kernel, and a graph does not hold which arguments it writes; put the launch into a "
            "custom op (torch.library.custom_op, with its mutates_args)",
            _last_user_location(launches),
        )


def _last_user_location(nodes: Sequence[fx.Node]) -> str:
    """The last source line of the nodes outside torch."""
    places = [
        where for node in nodes for where in source_locations(node) if not where.startswith(f"{torch.__path__[0]}/")
    ]
    return places[-1] if places else ""


def _lift_attributes(graph: CapturedGraph) -> None:
    """Turn tensors that tracing stored on the graph module into constants."""
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        attribute: Any = graph.module
        for part in str(node.target).split("."):
            attribute = getattr(attribute, part)
        if isinstance(attribute, Tensor):
            node.replace_all_uses_with(graph.add_constant(node.name, attribute))
            graph.graph.erase_node(node)


def _lift_number_tensors(graph: CapturedGraph) -> None:
    """Turn `torch.tensor(<numbers>)`, and its copy on a device, into constants, unless forward writes to it.

    A forward would copy them from the host each time, which a CUDA graph cannot record.
    """
    written = {storage_id(argument) for node in graph.graph.nodes for argument in mutated_args(node)}
    made_tensors: dict[fx.Node, Tensor] = {}
    for node in list(graph.graph.nodes):
        sources = node.all_input_nodes
        if node.op == "call_function" and node.target is torch.tensor and not sources:
            made = torch.tensor(*node.args, **node.kwargs)
        elif node.op == "call_method" and node.target == "to" and len(sources) == 1 and sources[0] in made_tensors:
            made = made_tensors[sources[0]].to(*node.args[1:], **node.kwargs)
        else:
            continue
        if storage_id(node) not in written:
            constant = graph.add_constant(node.name, made)
            made_tensors[constant] = made
            node.replace_all_uses_with(constant)
            graph.graph.erase_node(node)


def reject_written_constants(graph: CapturedGraph) -> None:
    """Refuse a forward that writes to a parameter or buffer, or to a view of one: an engine keeps its state elsewhere.

    Raises:
        InvariantError: with the line of the write.
    """
    for node, owner, _ in _written_constants(graph):
        raise InvariantError(
            f"forward writes to {owner}, but parameters and buffers are bound once and must not change; pass the tensor in as "
            "an input, or write to it in a boundary op",
            source_location(node),
        )


def _reject_shared_constants(graph: CapturedGraph) -> None:
    """Refuse writes to a constant that shares its memory with another one: the graph does not know of the other's change."""
    constants = [(node, each) for node, each in graph.constants()]
    for node, owner, written in _written_constants(graph):
        address = written.tensor.untyped_storage().data_ptr()
        for other, each in constants:
            if each.tensor is not written.tensor and each.tensor.untyped_storage().data_ptr() == address:
                raise InvariantError(
                    f"forward writes to the memory that {owner} shares with {source_text(each.source) or other.name}; give "
                    "each its own (`clone()`)",
                    source_location(node),
                )


def _written_constants(graph: CapturedGraph) -> Iterator[tuple[fx.Node, str, Constant]]:
    """Nodes that write to a constant, its name in the user's code, and the constant."""
    owners: dict[int | None, tuple[str, Constant]] = {}
    for node, each in graph.constants():
        owners.setdefault(storage_id(node), (source_text(each.source) or node.name, each))
    for node in graph.graph.nodes:
        for argument in mutated_args(node):
            if storage_id(argument) in owners:
                yield node, *owners[storage_id(argument)]


def _traced_code(captured: Any) -> dict[str, list[CodeType]]:
    """The traced code by the importable name of its file, or by the name of a file without a module, such as a notebook's cell.

    Without torch's own files, for which torch's version stands.
    """
    by_file = {getattr(module, "__file__", None): name for name, module in reversed(list(sys.modules.items()))}
    traced: dict[str, list[CodeType]] = {}
    for code in dict.fromkeys(captured.graph_capture_output.traced_code):
        name = by_file.get(code.co_filename, code.co_filename)
        if name and not _is_generated(code) and not name.startswith(("torch.", _TRACE_ONCE_PREFIX)):
            traced.setdefault(name, []).append(code)
    return traced


def _is_generated(code: CodeType) -> bool:
    """Whether Python or torch generated it (`__init__` of a dataclass, a lambda), or it is a frozen module of Python."""
    name = code.co_filename
    return name.startswith("<frozen ") or (
        name == "<string>" and re.fullmatch("__.*__|<lambda>", code.co_name) is not None
    )
