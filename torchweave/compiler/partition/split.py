"""Split a captured graph at its boundary ops into pieces, which are compared, built and recorded one by one.

A piece takes sizes, then tensors in order of first use, then constants. It recomputes derived sizes, so that equal layers give
equal pieces.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from torchweave.compiler.dump import graph_text
from torchweave.compiler.errors import InvariantError, TraceError, source_location
from torchweave.compiler.ir.collectives import exchanges
from torchweave.compiler.ir.graph import CapturedGraph, FakeGraph
from torchweave.compiler.ir.mutation import mutated_aliased_inputs, mutated_args, op_overload, storage_id
from torchweave.compiler.ir.symbols import free_symbols, is_size, value
from torchweave.report import Report
from torchweave.utils.suggest import did_you_mean


@dataclass(frozen=True)
class Piece(FakeGraph):
    """The operations between two boundary ops.

    Attributes:
        index: position among the graph's pieces.
        module: takes `inputs` then `constants`, returns `outputs` as a flat tuple.
        inputs, constants, outputs: the corresponding nodes of the captured graph.
        digest: equal for pieces with the same operations on inputs of the same dtype and geometry.
    """

    index: int
    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    digest: str

    def examples(self) -> list[Any]:
        """The fake values of the piece's placeholders."""
        return [value(node) for node in self.module.graph.nodes if node.op == "placeholder"]


@dataclass(frozen=True)
class BoundaryCall:
    """A call of a boundary op between two pieces; `args` holds every positional argument of the schema."""

    op: torch._ops.OpOverload
    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def report_parts(parts: Sequence[Piece | BoundaryCall], symbols: Mapping[str, str], report: Report) -> None:
    """Write an event `parts` (pieces by digest, boundary ops by name), and `communication` for each piece with collectives.

    Args:
        symbols: the caller's names of sizes, by symbol.
    """
    pieces = [part for part in parts if isinstance(part, Piece)]
    order = [
        {"piece": part.digest} if isinstance(part, Piece) else {"boundary": part.op._schema.name} for part in parts
    ]
    report.event("parts", order=order)
    uses = Counter(piece.digest for piece in pieces)
    for piece in {piece.digest: piece for piece in reversed(pieces)}.values():
        if collectives := exchanges(piece, symbols):
            report.event("communication", piece=piece.digest, shared_by=uses[piece.digest], exchanges=collectives)


def parts_text(parts: Sequence[Piece | BoundaryCall]) -> str:
    """Pieces and boundary ops in execution order as Python: their calls, then the graph of each distinct piece, with shapes."""
    calls, pieces = [], {}
    for part in parts:
        if isinstance(part, Piece):
            pieces.setdefault(part.digest, part)
            outputs = ", ".join(node.name for node in part.outputs)
            inputs = ", ".join(node.name for node in part.inputs)
            calls.append(f"{outputs or '_'} = piece_{part.digest}({inputs})  # piece {part.index}")
        else:
            calls.append(f"{part.op._schema.name.replace('::', '.')}({', '.join(map(str, part.args))})")
    graphs = (f"# piece_{digest}\n{graph_text(piece.module)}" for digest, piece in pieces.items())
    return "\n\n".join(["# In execution order; weights are left out.\n" + "\n".join(calls), *graphs]) + "\n"


def split(graph: CapturedGraph) -> list[Piece | BoundaryCall]:
    """The pieces and boundary calls of a graph, in execution order.

    Raises:
        TraceError, InvariantError: see `check`.
    """
    segments = _segments(graph)
    constants = frozenset(node for node, _ in graph.constants())
    parts: list[Piece | BoundaryCall] = []
    num_pieces = 0
    for segment in segments:
        if isinstance(segment, BoundaryCall):
            parts.append(segment)
        elif any(user not in set(segment) for node in segment for user in node.users) or _mutates_external(segment):
            parts.append(
                extract_subgraph(graph.module, segment, num_pieces, is_constant=constants.__contains__, is_free=is_size)
            )
            num_pieces += 1
    check(graph, parts)
    return parts


def _segments(graph: CapturedGraph) -> list[list[fx.Node] | BoundaryCall]:
    """The graph's calls in order, cut before and after each boundary op and each splitting op."""
    last: list[fx.Node] = []
    segments: list[list[fx.Node] | BoundaryCall] = [last]
    own: dict[fx.Node, list[fx.Node]] = {}  # by splitting op with outputs: its segment
    for node in graph.graph.nodes:
        op = boundary_op(node.target, graph.boundary_ops) if node.op == "call_function" else None
        splits = op is None and call_name(node) in graph.splitting_ops
        if splits and (written := op_overload(node.target)) is not None and not written._schema.returns:
            op = written
        if op is not None:
            last = []
            segments += [BoundaryCall(op, node, *normalize_call(op, node.args, node.kwargs)), last]
        elif node.op in ("placeholder", "output") or is_size(node) or node in graph.result_views:
            continue
        elif splits:
            own[node], last = [node], []
            segments += [own[node], last]
        elif node.target is operator.getitem and node.args[0] in own:
            own[node.args[0]].append(node)
        else:
            last.append(node)
    return segments


def call_name(node: fx.Node) -> str:
    """`namespace::name` of a call, as `splitting_ops` spells it; torch's functions, methods and operators are in `aten`."""
    if not node.op.startswith("call_") or node.op == "call_module":
        return ""
    op = op_overload(node.target)
    return op._schema.name if op is not None else f"aten::{getattr(node.target, '__name__', node.target)}"


def select_splitting_ops(graph: CapturedGraph, names: Sequence[str]) -> frozenset[str]:
    """`names`, which calls of the graph have after the passes.

    Raises:
        ValueError: no call of the graph has such a name.
    """
    present = {call_name(node) for node in graph.graph.nodes} - {""}
    for name in names:
        if name not in present:
            hint = did_you_mean(name, present, f"its ops are {', '.join(sorted(present))}")
            raise ValueError(f"splitting_ops names {name}, which the graph does not call after the passes; {hint}")
    return frozenset(names)


def _mutates_external(segment: list[fx.Node]) -> bool:
    """Whether the segment writes to a tensor from outside; it is a piece then even if no later node reads its results."""
    inside, changed = set(segment), {storage_id(target) for node in segment for target in mutated_args(node)} - {None}
    return any(
        storage_id(source) in changed for node in segment for source in node.all_input_nodes if source not in inside
    )


def boundary_op(target: Any, names: frozenset[str]) -> torch._ops.OpOverload | None:
    """The overload that a call's target resolves to if it is a boundary op, else None."""
    op = op_overload(target)
    return op if op is not None and op._schema.name in names else None


def normalize_call(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Arguments of a call with defaults filled in: all positional ones of the schema, and keyword-only ones by name."""
    positional, keywords = list(args), {}
    for index, argument in enumerate(op._schema.arguments):
        if not argument.kwarg_only and index < len(args):
            continue
        argument_value = kwargs.get(argument.name, argument.default_value)
        if argument.kwarg_only:
            keywords[argument.name] = argument_value
        else:
            positional.append(argument_value)
    return tuple(positional), keywords


def calls_of(graph: FakeGraph, *ops: torch._ops.OpOverload) -> Iterator[tuple[fx.Node, tuple[Any, ...]]]:
    """Yield each call of these ops, by packet or overload, with its positional arguments. The graph may change meanwhile."""
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and (op := op_overload(node.target)) in ops:
            yield node, normalize_call(op, node.args, node.kwargs)[0]


def extract_subgraph(
    module: fx.GraphModule,
    body: list[fx.Node],
    index: int,
    *,
    is_constant: Callable[[fx.Node], bool],
    is_free: Callable[[fx.Node], bool],
) -> Piece:
    """Copy `body` into a graph of its own.

    Args:
        is_constant: whether an input is one of the piece's constants.
        is_free: whether a node outside can be recomputed inside from inputs and other free nodes, as derived sizes can.

    Raises:
        TraceError: an input is neither a tensor nor a size.
    """
    inside = set(body)
    read = dict.fromkeys(
        source for node in body for leaf in node.all_input_nodes for source in _sources(leaf, inside, is_free)
    )
    constants = [node for node in read if is_constant(node)]
    sizes = [node for node in read if isinstance(value(node), torch.SymInt)]
    tensors = [node for node in read if node not in set(constants) and node not in set(sizes)]
    inputs = sizes + tensors
    copies: dict[fx.Node, fx.Node] = {}
    new = fx.Graph()
    for position, node in enumerate(inputs + constants):
        if not isinstance(value(node), (Tensor, torch.SymInt)):
            raise TraceError(
                "a context manager or another object that is no tensor stays open across a boundary op; close it before",
                source_location(node),
            )
        copies[node] = new.placeholder(f"input_{position}" if position < len(inputs) else f"constant_{position}")
        copies[node].meta = dict(node.meta)

    def copy_free(node: fx.Node) -> None:
        if node in copies or node in inside or not is_free(node):
            return
        for source in node.all_input_nodes:
            copy_free(source)
        copies[node] = new.node_copy(node, copies.__getitem__)

    for node in body:
        for source in node.all_input_nodes:
            copy_free(source)
        copies[node] = new.node_copy(node, copies.__getitem__)
    outputs = [node for node in body if any(_is_used_outside(user, inside, is_free) for user in node.users)]
    output = new.output(tuple(copies[node] for node in outputs))
    output.meta["example_value"] = tuple(value(node) for node in outputs)
    part = _LazyGraphModule(module, new, "Piece")  # equal pieces are built once: most never need their code
    return Piece(index, part, tuple(inputs), tuple(constants), tuple(outputs), digest(part, len(inputs)))


def _sources(node: fx.Node, inside: set[fx.Node], is_free: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Outside nodes that a piece needs as inputs to read `node`."""
    if node in inside:
        return []
    if is_free(node):
        return [source for argument in node.all_input_nodes for source in _sources(argument, inside, is_free)]
    return [node]


def _is_used_outside(user: fx.Node, inside: set[fx.Node], is_free: Callable[[fx.Node], bool]) -> bool:
    """Whether a reader is outside the piece; a free node counts by its own readers."""
    if user in inside:
        return False
    if user.op != "output" and is_free(user):
        return any(_is_used_outside(each, inside, is_free) for each in user.users)
    return True


def check(graph: CapturedGraph, parts: list[Piece | BoundaryCall]) -> None:
    """Check the invariants of pieces and of their CUDA graphs.

    Raises:
        InvariantError: a boundary op has an output or writes to a foreign tensor; a size depends on data; a piece has no
            dynamic input.
        TraceError: a value that is no tensor crosses a boundary op.
    """
    known, before = set(graph.symbols), None
    for part in parts:
        if isinstance(part, BoundaryCall):
            _check_boundary(part, before)
        else:
            _check_piece(part, known)
            before = part


def _check_boundary(call: BoundaryCall, before: Piece | None) -> None:
    schema = call.op._schema
    if schema.returns:
        cause = f"boundary op {schema.name} has an output; it must write to a tensor argument instead"
        raise InvariantError(cause, source_location(call.node))
    mutated_args = [
        argument
        for argument, declared in zip(call.args, schema.arguments, strict=False)
        if declared.alias_info is not None and declared.alias_info.is_write
    ]
    if not mutated_args:
        raise InvariantError(
            f"boundary op {schema.name} declares no mutated argument; name its output tensor in mutates_args",
            source_location(call.node),
        )
    for argument in mutated_args:
        if isinstance(argument, fx.Node) and (before is None or argument not in before.outputs):
            raise InvariantError(
                f"boundary op {schema.name} writes to a tensor that the preceding piece did not allocate; allocate it with "
                "torch.empty right before the call",
                source_location(call.node),
            )


def _check_piece(piece: Piece, known: set[str]) -> None:
    for node in [*piece.inputs, *piece.outputs]:
        if free_symbols(value(node)) - known:
            raise InvariantError(
                "forward makes a tensor with a size that depends on the values of a tensor; every size must be constant or "
                "declared dynamic",
                source_location(node),
            )
    for node in piece.outputs:
        if not isinstance(value(node), Tensor):
            raise TraceError(
                "a value that crosses a boundary op is no tensor; compute it again after", source_location(node)
            )
    if known and not any(free_symbols(value(node)) for node in piece.inputs):
        raise InvariantError(
            f"piece {piece.index} has no input with a dynamic size in its shape, so its token count is unknown",
            source_location(piece.outputs[0]) if piece.outputs else "",
        )


def digest(module: fx.GraphModule, num_inputs: int) -> str:
    """Hash of a piece's `structure`: twelve hex digits."""
    return hashlib.sha256(structure(module, num_inputs).encode()).hexdigest()[:12]


def structure(module: fx.GraphModule, num_inputs: int) -> str:
    """Operations, arguments and geometry of all values as text, without names and device indices.

    Nodes are numbered, and symbols named in order of appearance.
    """
    texts, shared = _StructureWriter(), mutated_aliased_inputs(module.graph)
    lines = [f"inputs {num_inputs}"]
    for node in module.graph.nodes:
        storage = storage_id(node) if shared and node.op == "placeholder" else None
        if storage is not None and storage in shared and shared[storage] is not node:
            lines.append(f"a write to %{texts.numbers[shared[storage]]} changes it")
        texts.numbers[node] = len(texts.numbers)
        arguments = "" if node.op == "placeholder" else texts.text([node.args, dict(sorted(node.kwargs.items()))])
        target = "" if node.op in ("placeholder", "output") else _target(node, module)
        lines.append(f"{node.op} {target} {arguments} -> {texts.text(value(node))}")
    return "\n".join(lines)


def _target(node: fx.Node, module: fx.GraphModule) -> str:
    target = node.target
    if node.op == "get_attr":
        child = module.get_submodule(str(target))
        return structure(child, 0) if isinstance(child, fx.GraphModule) else repr(child)
    if isinstance(target, (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    name = getattr(target, "__qualname__", getattr(target, "__name__", str(target)))
    unique = f" {id(target)}" if "<" in name else ""
    return f"{getattr(target, '__module__', None)}.{name}{unique}"


class _StructureWriter:
    """Writes arguments and values of one graph as text."""

    def __init__(self) -> None:
        self.numbers: dict[fx.Node, int] = {}
        self._symbols: dict[str, str] = {}
        self._expressions: dict[Any, str] = {}

    def text(self, thing: Any) -> str:
        if isinstance(thing, fx.Node):
            return f"%{self.numbers[thing]}"
        if isinstance(thing, Tensor):
            geometry = [list(thing.shape), list(thing.stride()), thing.storage_offset()]
            return f"{thing.dtype}@{thing.device.type}{self.text(geometry)}"
        if isinstance(thing, (torch.SymInt, torch.SymBool, torch.SymFloat)):
            return self._expression(thing.node.expr)
        if isinstance(thing, (tuple, list)):
            return "(" + ", ".join(self.text(item) for item in thing) + ")"
        if isinstance(thing, dict):
            return "{" + ", ".join(f"{key}: {self.text(item)}" for key, item in thing.items()) + "}"
        if isinstance(thing, slice):
            return f"[{self.text((thing.start, thing.stop, thing.step))}]"
        if isinstance(thing, torch.device):
            return thing.type
        return repr(thing)

    def _expression(self, expression: Any) -> str:
        if expression not in self._expressions:
            names = self._symbols
            for symbol in sorted(map(str, expression.free_symbols)):
                names.setdefault(symbol, f"S{len(names)}")
            renamed = {symbol: type(symbol)(names[str(symbol)]) for symbol in expression.free_symbols}
            self._expressions[expression] = str(expression.xreplace(renamed))
        return self._expressions[expression]
