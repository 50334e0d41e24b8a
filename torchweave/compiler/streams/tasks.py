"""Tasks: groups of nodes that stay on one stream, and the hazards that order them.

Operations that Inductor would fuse stay together: connected pointwise operations and reductions below equally many matmuls or
opaque ops are one task. A matmul or opaque op is its own task. Then chains of tasks are joined, since a chain runs in order on
any stream, and pointwise tasks whose only reader is another pointwise task.

Views and sizes belong to no task; each reader recomputes them.

Hazards: two nodes are ordered if the second reads the first's value, or if both access one storage, under any alias, and at
least one writes: read after write, write after read, write after write. A collective counts as a write to one shared storage,
so that collectives keep the graph's order, which is equal on all ranks.

A node costs its measured microseconds, else a weight by its kind of operation. The weights are TensorRT-LLM's: 0 for a view, 10
for a matmul, 20 for a fused mixture of experts, 1 for all else. Next to measured costs, a weight counts as microseconds.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import islice

import torch
from torch import Tensor, fx

from torchweave.compiler.ir.aliasing import AliasAnalysisError, AliasInfo, analyze_aliasing, computes_sizes, op_name
from torchweave.compiler.ir.collectives import collective_group
from torchweave.compiler.ir.symbols import value

SHAPE, DEFAULT, MATMUL, EXPERTS = 0.0, 1.0, 10.0, 20.0
EVENT = 1.0
"""Cost of a wait for another stream, besides the waiting time."""

ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
_ZERO_COST_OPS = ALLOCATIONS | frozenset({
    "getitem", "size", "shape", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose",
    "permute", "t", "expand", "expand_as", "slice", "select", "split", "split_with_sizes", "chunk", "unbind",
    "detach", "alias", "as_strided",
})  # fmt: skip
_MATMULS = frozenset({
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "convolution", "scaled_mm",
    "_scaled_mm", "grouped_mm", "_grouped_mm", "_scaled_grouped_mm", "scaled_dot_product_attention", "__matmul__",
})  # fmt: skip


def is_opaque(node: fx.Node) -> bool:
    """Whether Inductor runs the node as a separate kernel: a matmul or a custom op."""
    namespace, name = op_name(node)
    return name in _MATMULS or namespace not in ("", "aten", "prims")


def weight_of(node: fx.Node, is_view: bool) -> float:
    """TensorRT-LLM's weight of a node."""
    namespace, name = op_name(node)
    if is_view or name in _ZERO_COST_OPS:
        return SHAPE
    words = set(name.split("_")) if namespace else set()
    if words & {"experts", "moe"}:
        return EXPERTS
    return MATMUL if name in _MATMULS or words & {"linear", "mm", "gemm", "attention"} else DEFAULT


def key_of(node: fx.Node) -> str:
    """Key of a measured cost: the op, and dtype and shape of each tensor argument, with dynamic sizes as T."""
    return f"{'::'.join(filter(None, op_name(node)))}({', '.join(map(_kind, map(value, node.all_input_nodes)))})"


def _kind(thing: object) -> str:
    if not isinstance(thing, Tensor):
        return type(thing).__name__
    sizes = ",".join("T" if isinstance(size, torch.SymInt) else str(size) for size in thing.shape)
    return f"{str(thing.dtype).removeprefix('torch.')}[{sizes}]"


@dataclass(frozen=True)
class Costs:
    """Costs of nodes and of tasks.

    Attributes:
        fused: count the pointwise operations of a task as one kernel, as Inductor fuses them.
        measured: microseconds by `key_of`; other nodes cost their weight.
    """

    fused: bool = False
    measured: Mapping[str, float] = field(default_factory=dict)

    def of(self, nodes: tuple[fx.Node, ...], views: frozenset[fx.Node]) -> float:
        """Total cost of the nodes."""
        total, fusible = 0.0, 0.0
        for node in nodes:
            cost = self.measured.get(key_of(node)) if self.measured else None
            cost = weight_of(node, node in views) if cost is None else cost
            if self.fused and not is_opaque(node):
                fusible = max(fusible, cost)
            else:
                total += cost
        return total + fusible


Edges = set[tuple[fx.Node, fx.Node]]
"""Pairs of nodes that must stay in order."""


@dataclass(frozen=True)
class Task:
    """Nodes that run in graph order on one stream."""

    nodes: tuple[fx.Node, ...]
    cost: float

    @property
    def has_collective(self) -> bool:
        """Whether the task contains a collective."""
        return any(collective_group(node) is not None for node in self.nodes)


@dataclass(frozen=True)
class TaskGraph:
    """Tasks in a topological order, with their dependencies.

    Attributes:
        dependencies: for each task, the indices of earlier tasks that it waits for.
        recomputable: views and sizes, recomputed by each reader.
        memory: memory accesses of the nodes.
    """

    tasks: tuple[Task, ...]
    dependencies: tuple[tuple[int, ...], ...]
    recomputable: frozenset[fx.Node]
    memory: AliasInfo


def task_graph(graph: fx.Graph, costs: Costs) -> TaskGraph:
    """The tasks of a piece.

    Raises:
        AliasAnalysisError: the aliases of a value are unknown.
    """
    memory = analyze_aliasing(graph)
    recomputable = _recomputable_views(graph, memory)
    edges = _contract_views(hazards(graph, memory), recomputable)
    live = _live(graph, memory)
    nodes = [node for node in graph.nodes if node in live and node not in recomputable]
    edges = {pair for pair in edges if live.issuperset(pair)}
    sets = _DisjointSets(nodes)
    for first, second in _inseparable_pairs(nodes, memory):
        sets.join(sets[first], sets[second])
    _join_fusible(edges, sets)
    _join_chains(edges, sets, memory)
    return TaskGraph(*_assemble(nodes, edges, sets, costs, memory), recomputable, memory)


def hazards(graph: fx.Graph, memory: AliasInfo) -> Edges:
    """Every pair of nodes that must stay in order.

    Views access no memory; a returned view counts as a read, on behalf of the caller.
    """
    edges: Edges = set()
    last_write: dict[int, fx.Node] = {}
    readers: dict[int, list[fx.Node]] = {}

    def add(first: fx.Node | None, second: fx.Node) -> None:
        if first is not None and first is not second:
            edges.add((first, second))

    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        for argument in node.all_input_nodes:
            if argument.op != "placeholder":
                add(argument, node)
        returned = any(user.op == "output" for user in node.users)
        if (node in memory.views and not returned) or computes_sizes(node):
            continue
        access = memory.access[node]
        for group in access.reads | access.writes:  # read after write, write after write
            add(last_write.get(group), node)
        for group in access.writes:
            for reader in readers.get(group, ()):  # write after read
                add(reader, node)
            last_write[group], readers[group] = node, []
        for group in access.reads - access.writes:
            readers.setdefault(group, []).append(node)
    return edges


def _recomputable_views(graph: fx.Graph, memory: AliasInfo) -> frozenset[fx.Node]:
    """Views and sizes that a reader can recompute from tensors. A returned view is computed once, by a task."""
    output = graph.output_node()
    returned = set(output.all_input_nodes)
    recomputable: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or not (computes_sizes(node) or node in memory.views):
            continue
        reachable = all(
            isinstance(value(each), Tensor) or computes_sizes(each) or each in recomputable
            for each in node.all_input_nodes
        )
        if reachable and node not in returned:
            recomputable.add(node)
    return frozenset(recomputable)


def _live(graph: fx.Graph, memory: AliasInfo) -> frozenset[fx.Node]:
    """Operations with a used result or a write."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        read = any(user in live or user.op == "output" for user in node.users)
        if node.op not in ("placeholder", "output") and (read or memory.access[node].writes):
            live.add(node)
    return frozenset(live)


def _contract_views(edges: Edges, recomputable: frozenset[fx.Node]) -> Edges:
    """Edges between non-view nodes: an edge from a view becomes edges from its sources."""
    sources: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for first, second in edges:
        if second in recomputable:
            sources[second].append(first)

    def origins(node: fx.Node) -> set[fx.Node]:
        return {node} if node not in recomputable else {origin for each in sources[node] for origin in origins(each)}

    return {
        (origin, second)
        for first, second in edges
        if second not in recomputable
        for origin in origins(first)
        if origin is not second
    }


class _DisjointSets:
    """A partition of nodes. The key of a set is the position of its first node, which is deterministic."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        self._key = {node: index for index, node in enumerate(nodes)}
        self.members = {index: [node] for index, node in enumerate(nodes)}

    def __getitem__(self, node: fx.Node) -> int:
        return self._key[node]

    def join(self, one: int, other: int) -> None:
        first, second = sorted((one, other))
        if first == second:
            return
        moved = self.members.pop(second)
        self.members[first] += moved
        self._key.update(dict.fromkeys(moved, first))

    def is_opaque(self, key: int) -> bool:
        return any(map(is_opaque, self.members[key]))


def _inseparable_pairs(nodes: list[fx.Node], memory: AliasInfo) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs that must share a task: a multi-output node and its getitems, an allocation and its first access."""
    candidates = set(nodes)
    for node in nodes:
        if not isinstance(value(node), Tensor):
            yield from ((node, user) for user in node.users if user in candidates and user.target is operator.getitem)
        elif op_name(node)[1] in ALLOCATIONS:
            touching = (each for each in nodes if each is not node and memory.holds[node] & memory.access[each].reads)
            yield from ((node, each) for each in islice(touching, 1))


def _predecessors(edges: Edges, sets: _DisjointSets) -> dict[int, set[int]]:
    """The sets that each set depends on."""
    predecessors: dict[int, set[int]] = {key: set() for key in sets.members}
    for first, second in edges:
        if sets[first] != sets[second]:
            predecessors[sets[second]].add(sets[first])
    return predecessors


def _topological_order(dependencies: Mapping[int, set[int]]) -> list[int]:
    """Topological order, ties in graph order."""
    graph = TopologicalSorter(dependencies)
    try:
        graph.prepare()
    except CycleError:
        why = "operations that must share a task depend on each other through another task"
        raise AliasAnalysisError(why) from None
    ready, order = sorted(graph.get_ready()), list[int]()
    while ready:
        order.append(heappop(ready))
        graph.done(order[-1])
        for each in graph.get_ready():
            heappush(ready, each)
    return order


def _inverse(dependencies: Mapping[int, set[int]]) -> dict[int, set[int]]:
    after: dict[int, set[int]] = {each: set() for each in dependencies}
    for each, earlier in dependencies.items():
        for one in earlier:
            after[one].add(each)
    return after


def _join_fusible(edges: Edges, sets: _DisjointSets) -> None:
    """Join connected fusible operations below equally many opaque ones."""
    dependencies = _predecessors(edges, sets)
    opaque = {key: sets.is_opaque(key) for key in dependencies}
    first = {key: members[0] for key, members in sets.members.items()}
    depth: dict[int, int] = {}
    for key in _topological_order(dependencies):
        depth[key] = max((depth[earlier] + opaque[earlier] for earlier in dependencies[key]), default=0)
    for key, earlier in dependencies.items():
        for one in earlier:
            if depth[one] == depth[key] and not opaque[one] and not opaque[key]:
                sets.join(sets[first[one]], sets[first[key]])


def _join_chains(edges: Edges, sets: _DisjointSets, memory: AliasInfo) -> None:
    """Join a set with its only follower if that one has no other predecessor, or if both are fusible; and returned views with
    their only predecessor.

    No combination of these joins closes a cycle: no other path connects the two sets of a pair.
    """
    while pairs := list(_joinable_chains(_transitive_reduction(_predecessors(edges, sets)), sets, memory)):
        for one, other in pairs:
            sets.join(sets[one], sets[other])


def _joinable_chains(
    dependencies: dict[int, set[int]], sets: _DisjointSets, memory: AliasInfo
) -> Iterator[tuple[fx.Node, fx.Node]]:
    for key, followers in _inverse(dependencies).items():
        if len(followers) == 1:
            (other,) = followers
            joined = len(dependencies[other]) == 1 or not (sets.is_opaque(key) or sets.is_opaque(other))
        else:
            (other, *more) = dependencies[key] or [key]
            joined = not (followers or more) and other != key and memory.views.issuperset(sets.members[key])
        if joined:
            yield sets.members[key][0], sets.members[other][0]


def _transitive_reduction(dependencies: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """The dependencies without those that others imply."""
    ancestors: dict[int, int] = {}  # bit sets
    reduced: dict[int, set[int]] = {}
    for each in _topological_order(dependencies):
        implied = 0
        for earlier in dependencies[each]:
            implied |= ancestors[earlier]
        reduced[each] = {earlier for earlier in dependencies[each] if not implied >> earlier & 1}
        ancestors[each] = implied | sum(1 << earlier for earlier in reduced[each])
    return reduced


def _assemble(
    nodes: list[fx.Node], edges: Edges, sets: _DisjointSets, costs: Costs, memory: AliasInfo
) -> tuple[tuple[Task, ...], tuple[tuple[int, ...], ...]]:
    """Tasks in topological order, and the dependencies of each."""
    place = {node: index for index, node in enumerate(nodes)}
    tasks: list[Task] = []
    index_of: dict[fx.Node, int] = {}
    for index, key in enumerate(_topological_order(_predecessors(edges, sets))):
        chosen = tuple(sorted(sets.members[key], key=place.__getitem__))
        tasks.append(Task(chosen, costs.of(chosen, memory.views)))
        index_of.update(dict.fromkeys(chosen, index))
    dependencies: list[set[int]] = [set() for _ in tasks]
    for first, second in edges:
        dependencies[index_of[second]].add(index_of[first])
    return tuple(tasks), tuple(tuple(sorted(each - {task})) for task, each in enumerate(dependencies))
