"""Pattern matcher: compares every argument, tries both operand orders of commutative ops, and explains near-misses.

A pattern is a plain function over explicit ops, traced once symbolically. Its parameters are wildcards of the annotated kind; the
graph must contain everything else as written. `either` lists alternative spellings of one value:

    def pattern(x: Tensor, weight: Tensor, eps: float):
        mean = aten.mean.dim(aten.pow.Tensor_Scalar(x, 2), [-1], True) + eps
        return weight * (x * either(aten.rsqrt.default(mean), aten.pow.Tensor_Scalar(mean, -0.5)))

Shapes, dtypes and devices of tensors (`x.shape[1] // 2`) are compared by value. An op that writes into its arguments is written as
`auto_functionalized_v2(op, x=x, _out_base_index=0, _all_bases=[out])`, whose results are the op's, then the bases.
"""

from __future__ import annotations

import operator
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import normalize_call
from torchweave.compiler.passes.tensor_facts import describe_fact, fact_nodes, fact_value, same_fact

aten = torch.ops.aten

_OPERATORS = {
    operator.add: aten.add,
    operator.sub: aten.sub,
    operator.mul: aten.mul,
    operator.truediv: aten.div,
    operator.neg: aten.neg,
    operator.pow: aten.pow,
}
_FUNCTIONALIZED_V1 = torch.ops.higher_order.auto_functionalized
_FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2
_CALLS = ("call_function", "call_method")
_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default)
_UNSQUEEZE = (aten.unsqueeze.default, "unsqueeze", torch.unsqueeze)


def either(*alternatives: Any) -> Any:
    """Alternative sub-patterns, tried in order; the first is the usual form. Every use in a pattern binds to the same node."""
    proxy = next(each for each in alternatives if isinstance(each, fx.Proxy))
    return proxy.tracer.create_proxy("call_function", either, alternatives, {})


@dataclass(frozen=True)
class Match:
    """An occurrence of a pattern.

    Attributes:
        bindings: the node, number or list bound to each parameter; no entry for a parameter that only an unused alternative has.
        nodes: the calls that the pattern covers, in graph order.
        outputs: the calls that the pattern returns, in its order.
    """

    bindings: Mapping[str, Any]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    def __getitem__(self, name: str) -> Any:
        return self.bindings[name]

    def value(self, name: str) -> Any:
        """The fake tensor, symbolic size or plain number bound to a parameter."""
        bound = self.bindings[name]
        return value(bound) if isinstance(bound, fx.Node) else bound


@dataclass(frozen=True)
class PartialMatch:
    """A call that matches the end of a pattern, but not all of it.

    Attributes:
        why: the first difference at the furthest point of the search.
        matched_share: matched fraction of the pattern's operations.
    """

    why: str
    matched_share: float = 1.0


@dataclass(frozen=True)
class _State:
    """Partial match: wildcards to bound values, calls of the pattern to calls of the graph, `either` nodes to bound values.

    `facts` are (name, fact of the pattern, value in the graph, node), compared when the tensors that they read are matched.
    """

    bound: dict[fx.Node, Any] = field(default_factory=dict)
    calls: dict[fx.Node, fx.Node] = field(default_factory=dict)
    choices: dict[fx.Node, Any] = field(default_factory=dict)
    facts: tuple[tuple[str, fx.Node, Any, fx.Node], ...] = ()

    @property
    def num_matched(self) -> int:
        """Number of matched operations; `getitem` does not count."""
        return sum(call.target is not operator.getitem for call in self.calls)

    def node_of(self, output: fx.Node) -> fx.Node:
        return self.choices[output] if output.target is either else self.calls[output]


class Pattern:
    """A traced pattern.

    Args:
        torch_ir: match the captured Torch IR graph, in which Python operators, torch functions and methods stand for themselves.

    Raises:
        ValueError: the function does not return calls, or it calls `auto_functionalized`.
    """

    def __init__(self, function: Callable[..., Any], torch_ir: bool = False) -> None:
        self.name = getattr(function, "__name__", "pattern")
        hints = typing.get_type_hints(function)
        graph = fx.Tracer().trace(function)
        nodes = list(graph.nodes)
        # In a pattern of torch's matcher a parameter without an annotation is a tensor.
        self.kinds = {node: hints.get(str(node.target), Tensor) for node in nodes if node.op == "placeholder"}
        returned = nodes[-1].args[0]
        outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
        if not outputs or not all(isinstance(node, fx.Node) and node.op in _CALLS for node in outputs):
            raise ValueError(f"{function.__module__}.{self.name} must return the result of a call, or a tuple of them")
        if len(outputs) > 1 and any(node.target is either for node in outputs):
            raise ValueError(
                f"{function.__module__}.{self.name} returns `either` among several outputs; write variants"
            )
        self.outputs: tuple[fx.Node, ...] = tuple(outputs)
        self.facts = frozenset() if torch_ir else fact_nodes(nodes, self.kinds)
        self.calls = [
            node for node in nodes if node.op in _CALLS and node.target is not either and node not in self.facts
        ]
        if any(node.target is _FUNCTIONALIZED_V1 for node in self.calls):
            raise ValueError(
                f"{function.__module__}.{self.name} calls auto_functionalized, but lowered pieces hold its second version; write "
                "auto_functionalized_v2(op, x=x, _out_base_index=0, _all_bases=[out])"
            )
        operators = {} if torch_ir else _OPERATORS
        self.targets = {node: operators.get(node.target, node.target) for node in self.calls}
        order = {node: position for position, node in enumerate(nodes)}
        self.anchor = max(self.outputs, key=order.__getitem__)
        self.num_operations = _count_operations(self.outputs, self.facts)

    def match_at(self, node: fx.Node) -> Match | PartialMatch | None:
        """The match whose last call is `node`, the reason when at least half of the pattern matches, or None."""
        if not self._same_op(self.anchor, node):
            return None
        search = _MatchSearch(self)
        for state in search.call(self.anchor, node, _State()):
            for whole in search.rest(state):
                why = self._other_fact(whole) or self._external_reader(whole)
                if why is None:
                    return self._match(whole)
                search.note_mismatch(len(self.calls), why)
        return search.near_miss()

    def _same_op(self, call: fx.Node, node: fx.Node) -> bool:
        if call.target is either:
            return any(self._same_op(alternative, node) for alternative in call.all_input_nodes)
        if node.op != call.op:
            return False
        expected, target = self.targets[call], node.target
        if expected is operator.getitem and target is expected and isinstance(call.args[1], int):
            return call.args[1] == node.args[1]  # reading another part of a result is not a near-miss
        if isinstance(expected, torch._ops.OpOverloadPacket):
            return isinstance(target, torch._ops.OpOverload) and target.overloadpacket is expected
        return target == expected  # method names loaded from the cache are equal, but not identical, strings

    def _match(self, state: _State) -> Match:
        covered = set(state.calls.values())
        graph = next(iter(covered)).graph
        return Match(
            bindings={str(node.target): bound for node, bound in state.bound.items()},
            nodes=tuple(node for node in graph.nodes if node in covered),
            outputs=tuple(state.node_of(node) for node in self.outputs),
        )

    def _other_fact(self, state: _State) -> str | None:
        """Why a complete match is none: a shape, dtype or device differs from what the pattern computes."""

        def of(node: fx.Node) -> Any:
            actual = state.bound.get(node, state.calls.get(node, state.choices.get(node)))
            return value(actual) if isinstance(actual, fx.Node) else actual

        for name, fact, actual, node in state.facts:
            expected = fact_value(fact, of, self.facts)
            if not same_fact(expected, value(actual) if isinstance(actual, fx.Node) else actual):
                why = f"argument {name} of {node.name} is {_describe(actual)}, not {describe_fact(fact, self.facts)}"
                return f"{why}, which is {expected}"
        return None

    def _external_reader(self, state: _State) -> str | None:
        """Why a complete match cannot be rewritten: a node outside it reads one of its intermediate results."""
        covered = set(state.calls.values())
        output_nodes = {state.node_of(node) for node in self.outputs}
        for node in covered - output_nodes:
            others = [user.name for user in node.users if user not in covered]
            if others:
                return f"{node.name} is also read by {', '.join(others)}"
        return None


def _count_operations(outputs: Iterable[fx.Node], facts: frozenset[fx.Node]) -> int:
    """Number of operations of a pattern's usual form, which takes the first alternative of every `either`."""
    usual: set[fx.Node] = set()
    pending = list(outputs)
    while pending:
        node = pending.pop()
        if node.target is either:
            pending.append(node.all_input_nodes[0])
        elif node.op in _CALLS and node not in usual:
            usual.add(node)
            pending += [source for source in node.all_input_nodes if source not in facts]
    return sum(node.target is not operator.getitem for node in usual)


class _MatchSearch:
    """A backtracking search at one node, which records the mismatch at the furthest point."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.num_matched, self.why = 0, ""
        self.has_op = False  # the pattern's custom op was found, so that the place is meant however little matches

    def note_mismatch(self, num_matched: int, why: str) -> None:
        if num_matched > self.num_matched:
            self.num_matched, self.why = num_matched, why

    def _note_argument(self, name: str, actual: Any, expected: str, node: fx.Node, state: _State) -> None:
        why = f"argument {name} of {node.name} is {_describe(actual)}, not {expected}"
        self.note_mismatch(state.num_matched, why)

    def near_miss(self) -> PartialMatch | None:
        """The furthest mismatch, if half of the pattern and at least two operations match, or an op that writes does."""
        total = self.pattern.num_operations
        is_near_miss = self.num_matched >= min(2, total) and 2 * self.num_matched >= total
        found = self.why and (is_near_miss or self.has_op)
        return PartialMatch(self.why, min(1.0, self.num_matched / total)) if found else None

    def call(self, call: fx.Node, node: fx.Node, state: _State) -> Iterator[_State]:
        """Yield a state for each way in which a call of the pattern matches this call of the graph."""
        if call.target is either:
            yield from self._match_alternatives("self", call, node, node, state)
            return
        if call in state.calls:
            if state.calls[call] is node:
                yield state
            return
        if not self.pattern._same_op(call, node):
            self.note_mismatch(
                state.num_matched, f"{node.name} is {_name(node.target)}, not {_name(self.pattern.targets[call])}"
            )
            return
        if node in state.calls.values():
            return
        inside = replace(state, calls={**state.calls, call: node})
        if call.target is _FUNCTIONALIZED and call.args == node.args:
            self.has_op = True
            if set(call.kwargs) != set(node.kwargs):
                keywords = " ".join(node.kwargs)
                self.note_mismatch(
                    inside.num_matched, f"{node.name} has the arguments {keywords}, not {' '.join(call.kwargs)}"
                )
        for pairs in _arguments(call, node):
            yield from self._match_all(pairs, node, inside)

    def _match_all(self, pairs: list[tuple[str, Any, Any]], node: fx.Node, state: _State) -> Iterator[_State]:
        if not pairs:
            yield state
            return
        (name, expected, actual), *rest = pairs
        for extended in self._match_argument(name, expected, actual, node, state):
            yield from self._match_all(rest, node, extended)

    def _match_argument(self, name: str, expected: Any, actual: Any, node: fx.Node, state: _State) -> Iterator[_State]:
        if isinstance(expected, slice) and isinstance(actual, slice):
            expected, actual = ([each.start, each.stop, each.step] for each in (expected, actual))
        if isinstance(expected, fx.Node):
            if expected.op == "placeholder":
                yield from self._bind_wildcard(name, expected, actual, node, state)
            elif expected in self.pattern.facts:
                yield replace(state, facts=(*state.facts, (name, expected, actual, node)))
            elif expected.target is either:
                yield from self._match_alternatives(name, expected, actual, node, state)
            elif isinstance(actual, fx.Node):
                yield from self.call(expected, actual, state)
            else:
                self._note_argument(name, actual, "computed", node, state)
        elif isinstance(expected, (tuple, list)) and isinstance(actual, (tuple, list)) and len(expected) == len(actual):
            items = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(expected, actual, strict=True))]
            if _has_calls(expected) or not _same_dims(name, expected, actual, node):
                yield from self._match_all(items, node, state)
            else:
                yield state
        elif _equal(expected, actual) or _same_dims(name, expected, actual, node):
            yield state
        else:
            self._note_argument(name, actual, _describe(expected), node, state)

    def _match_alternatives(
        self, name: str, expected: fx.Node, actual: Any, node: fx.Node, state: _State
    ) -> Iterator[_State]:
        if expected in state.choices:
            yield from self._rebind(name, state.choices[expected], actual, node, state)
            return
        for alternative in expected.args:
            for matched in self._match_argument(name, alternative, actual, node, state):
                yield replace(matched, choices={**matched.choices, expected: actual})

    def _rebind(self, name: str, known: Any, actual: Any, node: fx.Node, state: _State) -> Iterator[_State]:
        if same_value(known, actual):
            yield state
        else:
            self._note_argument(name, actual, _describe(known), node, state)

    def _bind_wildcard(
        self, name: str, expected: fx.Node, actual: Any, node: fx.Node, state: _State
    ) -> Iterator[_State]:
        if expected in state.bound:
            yield from self._rebind(name, state.bound[expected], actual, node, state)
            return
        kind = self.pattern.kinds[expected]
        if _is_kind(actual, kind):
            yield replace(state, bound={**state.bound, expected: actual})
        else:
            self._note_argument(name, actual, getattr(kind, "__name__", str(kind)), node, state)

    def rest(self, state: _State) -> Iterator[_State]:
        """Match the outputs that the anchor does not reach, among the readers of matched nodes."""
        matched = state.calls.keys() | state.choices.keys()
        missing = next((output for output in self.pattern.outputs if output not in matched), None)
        if missing is None:
            yield state
            return
        for node in self._candidates(missing, state):
            for extended in self.call(missing, node, state):
                yield from self.rest(extended)
        self.note_mismatch(
            state.num_matched, f"output {_name(self.pattern.targets[missing])} of {self.pattern.name} is missing"
        )

    def _candidates(self, missing: fx.Node, state: _State) -> list[fx.Node]:
        for argument in missing.all_input_nodes:
            source = state.calls.get(argument, state.bound.get(argument))
            if isinstance(source, fx.Node):
                return list(source.users)
        return list(next(iter(state.calls.values())).graph.nodes)


def _arguments(call: fx.Node, node: fx.Node) -> Iterator[list[tuple[str, Any, Any]]]:
    """(name, expected, actual) of every argument with defaults filled in; for a commutative op in both orders."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        yield from _plain_arguments(call, node)
        return
    names = [argument.name for argument in target._schema.arguments]
    if len(call.args) > len(names) or not set(call.kwargs) <= set(names):
        return  # the pattern names a packet, and its arguments fit another overload
    expected, actual = (_by_name(target, each) for each in (call, node))
    pairs = [(name, expected.get(name), actual.get(name)) for name in names]
    yield pairs
    if target in _COMMUTATIVE and actual.get("alpha", 1) == 1:
        (one, first, _), (two, second, _), *others = pairs
        yield [(two, first, actual[two]), (one, second, actual[one]), *others]


def _plain_arguments(call: fx.Node, node: fx.Node) -> Iterator[list[tuple[str, Any, Any]]]:
    """`_arguments` of a function or method without a schema: equal positional counts and equal keywords."""
    if len(call.args) != len(node.args) or set(call.kwargs) != set(node.kwargs):
        return
    pairs = [(str(i), *pair) for i, pair in enumerate(zip(call.args, node.args, strict=True))]
    pairs += [(key, call.kwargs[key], node.kwargs[key]) for key in call.kwargs]
    yield pairs
    if node.target in (operator.add, operator.mul):
        (one, first, left), (two, second, right) = pairs
        yield [(two, first, right), (one, second, left)]


def _by_name(op: torch._ops.OpOverload, node: fx.Node) -> dict[str, Any]:
    args, kwargs = normalize_call(op, node.args, node.kwargs)
    positional = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    return {**dict(zip(positional, args, strict=True)), **kwargs}


def _is_kind(actual: Any, kind: Any) -> bool:
    """Whether the annotation of a wildcard allows a value."""
    fake = value(actual) if isinstance(actual, fx.Node) else actual
    if kind is Any:
        return True
    if options := typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, _UNION) else ():
        return any(_is_kind(actual, option) for option in options)
    origin = typing.get_origin(kind) or kind
    if origin in (None, type(None)):
        return actual is None
    if origin is Tensor:
        return isinstance(actual, fx.Node) and isinstance(fake, Tensor)
    return isinstance(fake, _KINDS.get(origin, origin)) and (origin is bool or not isinstance(fake, bool))


_UNION = type(int | None)
_KINDS = {int: (int, torch.SymInt), float: (int, float, torch.SymFloat), list: (list, tuple), tuple: (list, tuple)}


def same_value(one: Any, other: Any) -> bool:
    """Whether two arguments are equal, or separate `unsqueeze` calls that make the same view."""
    if _equal(one, other):
        return True
    if not (isinstance(one, fx.Node) and isinstance(other, fx.Node)):
        return False
    same_view = one.op == other.op and one.target == other.target and one.target in _UNSQUEEZE
    return same_view and _equal(one.args, other.args) and one.kwargs == other.kwargs


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, fx.Node) or isinstance(other, fx.Node):
        return one is other
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    try:
        return bool(one == other)
    except Exception:  # a symbolic comparison that cannot be decided
        return False


def _same_dims(name: str, expected: Any, actual: Any, node: fx.Node) -> bool:
    """Whether two `dim` arguments name the same dimensions, counted from the front or from the back."""
    if not name.startswith("dim"):
        return False
    first = node.args[0] if node.args else None
    fake = value(first) if isinstance(first, fx.Node) else None
    if not isinstance(fake, Tensor):
        return False
    one, other = ([item] if isinstance(item, int) else item for item in (expected, actual))
    if not all(isinstance(each, (list, tuple)) and all(type(item) is int for item in each) for each in (one, other)):
        return False
    return [item % fake.dim() for item in one] == [item % fake.dim() for item in other]


def _has_calls(items: Any) -> bool:
    return any(isinstance(item, fx.Node) or (isinstance(item, (tuple, list)) and _has_calls(item)) for item in items)


def _name(target: Any) -> str:
    if isinstance(target, str):
        return "an input"
    return str(target) if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) else target.__name__


def _describe(thing: Any) -> str:
    return thing.name if isinstance(thing, fx.Node) else repr(thing)
