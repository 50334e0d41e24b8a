"""A compiled forward: straight-line code that calls built pieces and passes boundary ops to a handler."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torchweave.compiler.codegen.pieces import BuiltPiece
from torchweave.compiler.ir.graph import Attribute, CapturedGraph, Constant, Input, OutputTree, Size
from torchweave.compiler.ir.mutation import mutated_args, storage_id
from torchweave.compiler.ir.size_ranges import SizeRange
from torchweave.compiler.ir.symbols import is_size, token_count, value
from torchweave.compiler.partition.split import BoundaryCall, Piece
from torchweave.compiler.runtime.forward import BoundaryHandler
from torchweave.report import Report

Parts = list[Piece | BoundaryCall]


@dataclass(frozen=True)
class Effects:
    """What a call of a compiled forward writes to, and where it computes.

    Attributes:
        mutated_inputs: names of the inputs that it writes to.
        mutated_constants: parameters and buffers that it writes to.
        devices: kinds of devices on which it computes.
        nested: it may hold a nested graph, such as the branches of `torch.cond`.
    """

    mutated_inputs: frozenset[str]
    mutated_constants: tuple[Tensor, ...]
    devices: frozenset[str]
    nested: bool


def find_effects(graph: CapturedGraph) -> Effects:
    """The effects of a captured graph, by the schemas and names of its operations."""
    nodes = graph.graph.nodes
    changed = {storage_id(target) for node in nodes for target in mutated_args(node)} - {None}
    bindings = [graph.bindings[node.name] for node in graph.placeholders() if storage_id(node) in changed]
    return Effects(
        frozenset(binding.name for binding in bindings if isinstance(binding, Input)),
        tuple(binding.tensor for binding in bindings if isinstance(binding, Constant)),
        frozenset(fake.device.type for node in nodes if isinstance(fake := value(node), Tensor)),
        any(node.op == "get_attr" for node in nodes),
    )


class CompiledGraph:
    """A compiled forward: `compiled_graph(boundary, *inputs)`.

    Attributes:
        code: the Python of a call; `piece_<digest>` are built pieces, `constants_<i>` the constants of piece i.
        pieces: pieces in execution order; equal digests share one built piece.
        built: built pieces by digest.
        constants: constants of each piece, by the piece's index.
        inputs: names of the inputs, in order.
        sources: importable names of the traced modules.
        sizes: smallest and largest value of a dynamic size.
        effects: what a call writes to, and where it computes.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        parts: Parts,
        built: Mapping[str, BuiltPiece],
        sizes: SizeRange,
        report: Report,
    ) -> None:
        self.report = report
        self.inputs = graph.inputs
        self.sources = graph.sources
        self.parts = parts
        self.pieces = [part for part in parts if isinstance(part, Piece)]
        self.built = dict(built)
        self.sizes = sizes[:2]
        self.effects = find_effects(graph)
        self.code, namespace = _ForwardGenerator(graph, parts, built, sizes, self.effects.mutated_inputs).run()
        exec(compile(self.code, "<torchweave stitched>", "exec"), namespace)
        self._run, self._namespace = namespace["forward"], namespace
        self.constants = {piece.index: namespace.get(f"constants_{piece.index}", ()) for piece in self.pieces}

    def __call__(self, boundary: BoundaryHandler, *inputs: Tensor) -> Any:
        """Run a step.

        Args:
            boundary: handler of the boundary ops.
            inputs: contiguous tensors in forward's order, with the dtypes, devices and static sizes of the examples.

        Raises:
            ValueError: an input has another dtype, device, shape or layout, or shares memory with an input that is written.
        """
        return self._run(boundary, *inputs)

    def with_constants(self, replace: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
        """The forward of an equal module, called as this one: `replace` returns its tensor for each constant of this one.

        Raises:
            ValueError: the forward holds a tensor that is no argument of a piece.
        """
        namespace = dict(self._namespace)
        if any(isinstance(thing, Tensor) for thing in namespace.values()):
            raise ValueError("the forward returns a constant or passes it to a boundary op")
        for index, constants in self.constants.items():
            if constants:
                namespace[f"constants_{index}"] = tuple(map(replace, constants))
        exec(compile(self.code, "<torchweave stitched>", "exec"), namespace)
        return namespace["forward"]

    @property
    def plan(self) -> str:
        """The pieces and boundary ops in execution order, as text."""
        lines = []
        for part in self.parts:
            if isinstance(part, BoundaryCall):
                lines.append(f"  boundary  {part.op._schema.name}")
            else:
                how = self.built[part.digest].built
                lines.append(f"piece {part.index:<4} {part.digest}  {part.num_calls()} operations  {how}")
        return "\n".join(lines)


class _ForwardGenerator:
    """Generates straight-line code over the parts, and its namespace. Each value is deleted after its last use."""

    def __init__(
        self,
        graph: CapturedGraph,
        parts: Parts,
        built: Mapping[str, BuiltPiece],
        sizes: SizeRange,
        mutated_inputs: frozenset[str],
    ) -> None:
        self.graph, self.parts, self.built, self.sizes, self.mutated_inputs = graph, parts, built, sizes, mutated_inputs
        self.namespace: dict[str, Any] = {"no_grad": torch.no_grad, "refuse": refuse, "refuse_shared": refuse_shared}
        self.names: dict[fx.Node, str] = {}
        self.arguments: dict[str, str] = {}
        self.used_names: set[str] = set(self.namespace)
        self.lines: list[str] = []
        self.callables: dict[str, str] = {}
        self.tokens = ""
        self.read_from: dict[str, str] = {}  # `x.shape[0]` by the name of the size that is read there

    def run(self) -> tuple[str, dict[str, Any]]:
        pieces = [part for part in self.parts if isinstance(part, Piece)]
        self.used_names |= {
            "tree",
            "slice",
            *(f"piece_{piece.digest}" for piece in pieces),
            *(f"constants_{piece.index}" for piece in pieces),
        }
        boundary = self._unique_name("boundary")
        self.arguments = {name: self._unique_name(name) for name in self.graph.inputs}
        self._check_inputs()
        last_use = self._last_uses()
        for position, part in enumerate(self.parts):
            if isinstance(part, Piece):
                self._call_piece(part)
            else:
                self._call_boundary(part)
            dead = [self.names[node] for node, last in last_use.items() if last == position and node in self.names]
            if dead:
                self.lines.append(f"del {', '.join(dead)}")
        self.lines.append(f"return {self._return_expression()}")
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"@no_grad()\ndef forward({', '.join((boundary, *self.arguments.values()))}):\n{body}", self.namespace

    def _unique_name(self, wanted: str) -> str:
        base = re.sub(r"\W", "_", wanted)
        base = f"{base}_" if keyword.iskeyword(base) else base
        name, count = base, 1
        while name in self.used_names:
            count += 1
            name = f"{base}_{count}"
        self.used_names.add(name)
        return name

    def _check_inputs(self) -> None:
        """Emit the reads of dynamic sizes and the checks of all inputs."""
        known: dict[str, str] = {}
        for node in self.graph.placeholders():
            binding = self.graph.bindings[node.name]
            if isinstance(binding, Input):
                fake = value(node)
                sizes = [
                    self.graph.symbols.get(str(size), str(size)) if isinstance(size, torch.SymInt) else size
                    for size in fake.shape
                ]
                self.names[node] = self.arguments[binding.name]
                self._check_input(binding.name, sizes, fake.dtype, fake.device.type, known)
        for each in self.graph.unused_inputs:
            self._check_input(each.name, each.sizes, each.dtype, each.device, known)
        self._check_aliasing()
        symbol = token_count(self.graph.symbols)
        self.tokens = known[self.graph.symbols[symbol]] if symbol is not None else ""
        for node in self.graph.placeholders():
            if isinstance(self.graph.bindings[node.name], Size) and node.users:
                symbol = str(value(node))
                self.names[node] = known[self.graph.symbols.get(symbol, symbol)]

    def _check_input(
        self, name: str, sizes: Sequence[int | str], dtype: torch.dtype, device: str, known: dict[str, str]
    ) -> None:
        """Emit the check of an input; `known` maps names of dynamic sizes to variables."""
        low, high, why_not_one = self.sizes
        argument, conditions = self.arguments[name], []
        elsewhere = [size for size in dict.fromkeys(sizes) if size in self.read_from]
        for dim, size in enumerate(sizes):
            if isinstance(size, str) and size not in known:
                known[size], self.read_from[size] = self._unique_name(size), f"{name}.shape[{dim}]"
                self.lines.append(
                    f"{known[size]} = {argument}.shape[{dim}] if {argument}.dim() == {len(sizes)} else -1"
                )
                conditions.append(f"{low} <= {known[size]} <= {high}")
        shape = "".join(f"{known[size] if isinstance(size, str) else size}, " for size in sizes)
        text = str(dtype).removeprefix("torch.")
        conditions += [f"{argument}.dtype is {self._bind_object(text, dtype, None)}", f"{argument}.shape == ({shape})"]
        conditions += [f"{argument}.is_contiguous()", f"{argument}.is_{device}"]
        self.lines.append(f"if not ({' and '.join(conditions)}):")
        kind = f"{text}[{shape.strip(', ')}] on {device}"
        others = "".join(f"{f'{size} ({self.read_from[size]})'!r}: {known[size]}, " for size in elsewhere)
        expected = f"{kind}, {low} <= sizes <= {high}"
        self.lines.append(f"    refuse({name!r}, {argument}, {expected!r}, {{{others}}}, {why_not_one!r})")

    def _check_aliasing(self) -> None:
        """Emit checks that no mutated input shares memory with another input; pieces are built on that assumption."""
        bindings = [self.graph.bindings[node.name] for node in self.graph.placeholders()]
        read = {each.name: self.arguments[each.name] for each in bindings if isinstance(each, Input)}
        for name, argument in read.items():
            others = ", ".join(other for other in read.values() if other != argument)
            if name in self.mutated_inputs and others:
                self.lines.append(f"refuse_shared({argument!r}, {argument}, {others})")

    def _last_uses(self) -> dict[fx.Node, int]:
        """Position of the last part that reads each output of a piece; returned tensors are left out."""
        last: dict[fx.Node, int] = {}
        for position, part in enumerate(self.parts):
            if isinstance(part, Piece):
                last.update(dict.fromkeys(part.outputs, position))
                read = part.inputs
            else:
                read = part.node.all_input_nodes
            last.update({node: position for node in read if node in last})
        output = self.graph.graph.output_node()
        for node in (output, *self.graph.result_views):
            for source in node.all_input_nodes:
                last.pop(source, None)
        return last

    def _call_piece(self, piece: Piece) -> None:
        arguments = [self._value(node) for node in piece.inputs]
        if piece.constants:
            constants = f"constants_{piece.index}"
            self.namespace[constants] = tuple(self._tensor(node) for node in piece.constants)
            arguments.append(f"*{constants}")
        for node in piece.outputs:
            self.names[node] = self._unique_name(node.name)
        targets = ", ".join(self.names[node] for node in piece.outputs)
        call = f"{self._callable_for(piece.digest)}([{', '.join(arguments)}])"
        self.lines.append(f"{targets}{',' if len(piece.outputs) == 1 else ''} = {call}" if targets else call)

    def _callable_for(self, digest: str) -> str:
        """Expression of the callable: the first variant that covers the token count, else the general build."""
        if digest not in self.callables:
            built, choice = self.built[digest], f"piece_{digest}"
            self.namespace[choice] = built.call
            for variant in reversed(built.variants):
                name = self._unique_name(f"piece_{digest}_T{variant.high}")
                self.namespace[name] = variant.built.call
                holds = f"{self.tokens} {'==' if variant.low == variant.high else '<='} {variant.high}"
                choice = f"{name} if {holds} else {choice}"
            self.callables[digest] = f"({choice})" if built.variants else choice
        return self.callables[digest]

    def _call_boundary(self, call: BoundaryCall) -> None:
        if call.op not in self.namespace.values():
            self.namespace[self._unique_name(call.op._schema.name.split("::")[-1])] = call.op
        function = next(name for name, item in self.namespace.items() if item is call.op)
        args = "".join(f"{self._expression(argument)}, " for argument in call.args)
        kwargs = ", ".join(f"{name!r}: {self._expression(argument)}" for name, argument in call.kwargs.items())
        self.lines.append(f"boundary({function}, ({args}), {{{kwargs}}})")

    def _value(self, node: fx.Node) -> str:
        if node in self.names:
            return self.names[node]
        if self.graph.constant(node) is not None:
            return self._bind_object(node.name, self._tensor(node), node)
        assert is_size(node) or node in self.graph.result_views, f"{node} is not computed by any piece"
        arguments = [self._expression(argument) for argument in node.args]
        if node.op == "call_method":
            called, arguments = f"{arguments[0]}.{node.target}", arguments[1:]
        else:
            called = self._bind_object(node.name, node.target, None)
        arguments += [f"{name}={self._expression(argument)}" for name, argument in node.kwargs.items()]
        self.names[node] = self._unique_name(node.name)
        self.lines.append(f"{self.names[node]} = {called}({', '.join(arguments)})")
        return self.names[node]

    def _tensor(self, node: fx.Node) -> Tensor:
        constant = self.graph.constant(node)
        assert constant is not None
        return constant.detach()

    def _bind_object(self, wanted: str, thing: Any, node: fx.Node | None) -> str:
        name = self._unique_name(f"const_{wanted}")
        self.namespace[name] = thing
        if node is not None:
            self.names[node] = name
        return name

    def _expression(self, thing: Any) -> str:
        if isinstance(thing, fx.Node):
            return self._value(thing)
        if isinstance(thing, (tuple, list)):
            inner = "".join(f"{self._expression(item)}, " for item in thing)
            return f"[{inner}]" if isinstance(thing, list) else f"({inner})"
        if isinstance(thing, slice):
            return f"slice({', '.join(self._expression(each) for each in (thing.start, thing.stop, thing.step))})"
        if thing is None or (isinstance(thing, (bool, int, str)) or (isinstance(thing, float) and thing - thing == 0)):
            return repr(thing)
        return self._bind_object("value", thing, None)

    def _return_expression(self) -> str:
        output: Any = self.graph.graph.output_node()
        flat = [self._expression(item) for item in output.args[0]]
        tree = self.graph.output
        if tree.is_single_tensor():
            return flat[0]
        self.namespace["tree"] = partial(_build_output, tree)
        names = {leaf.name for leaf in tree.leaves if isinstance(leaf, Input)}
        inputs = ", ".join(f"{name!r}: {self.arguments[name]}" for name in sorted(names))
        return f"tree(({''.join(f'{item}, ' for item in flat)}), {{{inputs}}})"


def refuse(name: str, tensor: Tensor, expected: str, sizes: Mapping[str, int], why_not_one: str) -> None:
    """Raise the error for an input of the wrong kind.

    Args:
        sizes: of the expected shape, read from earlier inputs: `T (x.shape[0])`.
        why_not_one: said when a dimension of the tensor is 1.
    """
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device.type}"
    layout = "" if tensor.is_contiguous() else ", not contiguous"
    why = f": {why_not_one}" if why_not_one and 1 in tensor.shape else ""
    where = f", where {', '.join(f'{size} is {number}' for size, number in sizes.items())}" if sizes else ""
    raise ValueError(f"{name} is {kind}{layout}; the module was compiled for {expected}{where}{why}")


def refuse_shared(name: str, changed: Tensor, *others: Tensor) -> None:
    """Raise an error if a mutated input overlaps another input in memory."""
    begin, end = changed.data_ptr(), changed.data_ptr() + changed.nbytes
    for other in others:
        if begin < other.data_ptr() + other.nbytes and other.data_ptr() < end:
            raise ValueError(
                f"forward writes to {name}, which shares its memory with another input; pass a copy of one of them"
            )


def _build_output(tree: OutputTree, flat: tuple[Any, ...], inputs: dict[str, Tensor]) -> Any:
    """Forward's return value from flat outputs."""

    def build(leaf: Any) -> Any:
        if isinstance(leaf, int):
            return flat[leaf]
        if isinstance(leaf, Attribute):
            return getattr(inputs[leaf.name], leaf.attribute)
        if isinstance(leaf, Input):
            return inputs[leaf.name]
        return leaf.tensor if isinstance(leaf, Constant) else leaf[1]

    return pytree.tree_unflatten(list(map(build, tree.leaves)), tree.spec)
