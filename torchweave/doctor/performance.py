"""Performance findings: obstacles to splitting, sharing pieces, fusions, and CUDA graphs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from torchweave.compiler.errors import InvariantError, source_location
from torchweave.compiler.ir.mutation import mutated_args, storage_id
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import Piece, boundary_op, structure
from torchweave.doctor.compile_run import CompileResult
from torchweave.doctor.finding import Finding, Rules
from torchweave.doctor.source_reader import source_line
from torchweave.doctor.subject import Subject
from torchweave.doctor.tracing import TraceResult

_NARROW = (torch.float16, torch.bfloat16)
_MATMULS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention")


_RULES = Rules("performance", {
    "invariant": ("{cause}", "follow the rules of pieces in docs/how-to/diagnose.md"),
    "boundary_output": (
        "the boundary op {op} has an output, whose address differs at each call",
        "write to an argument instead: allocate it with torch.empty before, and name it in mutates_args",
    ),
    "mutated_constant": (
        "forward writes to a parameter or buffer, but pieces bind constants when they are built",
        "pass the tensor as an input, or write to it in a boundary op",
    ),
    "host_synchronisation": (
        "the forward copies a tensor to the host, which makes the host wait and cannot be in a CUDA graph",
        "keep the computation on the device, or copy after the forward",
        "warning",
    ),
    "upcast_matmul": (
        "a matmul runs in float32 because its operand was cast from {dtype}",
        "multiply in the narrow dtype, which accumulates in float32 anyway, and cast the result if needed",
        "warning",
    ),
    "near_miss": (
        "the pass {name} does not match {node}: {why}",
        "write the line in the form that the pass matches (docs/reference/passes.md), or leave it; results are correct anyway",
        "note",
    ),
    "unshared_pieces": (
        "pieces {one} and {other} have the same operations but are built twice: {difference}",
        "pass the difference as a tensor, or make it equal (a layer's index, a number in its config)",
        "note",
    ),
})  # fmt: skip


def find(subject: Subject, trace_result: TraceResult, compile_result: CompileResult | None) -> Iterator[Finding]:
    broken = [
        finding
        for gm in trace_result.graphs
        for finding in (*_boundary_outputs(gm, subject.boundary_ops), *_mutated_constants(gm))
    ]
    yield from broken
    for gm in trace_result.graphs:
        yield from _host_copies(gm)
        yield from _upcasts(gm)
    if compile_result is None:
        return
    if isinstance(compile_result.error, InvariantError) and not broken:
        yield _RULES.finding("invariant", compile_result.error.where, cause=compile_result.error.cause)
    yield from _near_misses(compile_result, trace_result.graphs)
    if compile_result.compiled_graph is not None:
        yield from _unshared_pieces(compile_result.compiled_graph.pieces)


def _boundary_outputs(gm: fx.GraphModule, names: frozenset[str]) -> Iterator[Finding]:
    for node in gm.graph.nodes:
        op = boundary_op(node.target, names) if node.op == "call_function" else None
        if op is not None and op._schema.returns:
            yield _RULES.finding("boundary_output", source_location(node), op=op._schema.name)


def _mutated_constants(gm: fx.GraphModule) -> Iterator[Finding]:
    owners = {
        storage_id(node): node.name
        for node in gm.graph.nodes
        if node.op == "placeholder" and node.meta["is_module_constant"]
    }
    owners.pop(None, None)
    for node in gm.graph.nodes:
        if any(storage_id(argument) in owners for argument in mutated_args(node)):
            yield _RULES.finding("mutated_constant", source_location(node))


def _host_copies(gm: fx.GraphModule) -> Iterator[Finding]:
    for node in gm.graph.nodes:
        if node.op == "call_method" and (node.target in ("cpu", "numpy") or _names_cpu(node)):
            yield _RULES.finding("host_synchronisation", source_location(node))


def _names_cpu(node: fx.Node) -> bool:
    """Whether a `.to` names the CPU literally, not through the device of another tensor."""
    return node.target == "to" and re.search(r"""["']cpu["']""", source_line(source_location(node))) is not None


def _upcasts(gm: fx.GraphModule) -> Iterator[Finding]:
    """Matmuls in float32 with an operand cast from a narrower dtype; norms and RoPE need float32, matmuls do not."""
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        if not node.op.startswith("call") or name not in _MATMULS:
            continue
        for operand in node.all_input_nodes:
            cast = _upcast_behind(operand)
            if cast is not None:
                yield _RULES.finding("upcast_matmul", source_location(cast), dtype=cast_from(cast))
                break


def _upcast_behind(node: fx.Node) -> fx.Node | None:
    """The cast from a narrow dtype to float32 that a node reads, through views."""
    for _ in range(6):
        out = value(node)
        if not isinstance(out, Tensor) or out.dtype != torch.float32 or not node.all_input_nodes:
            return None
        source = node.all_input_nodes[0]
        before = value(source)
        if isinstance(before, Tensor) and before.dtype in _NARROW:
            return node
        if not isinstance(before, Tensor) or storage_id(source) != storage_id(node):
            return None
        node = source
    return None


def cast_from(node: fx.Node) -> str:
    before: Any = value(node.all_input_nodes[0])
    return str(before.dtype).removeprefix("torch.")


def _near_misses(compile_result: CompileResult, graphs: Iterable[fx.GraphModule]) -> Iterator[Finding]:
    places = {node.name: source_location(node) for gm in graphs for node in gm.graph.nodes}
    for event in compile_result.report.select("pass"):
        for miss in event.get("near_misses", ()):
            node, _, why = str(miss).partition(": ")
            where = places.get(node.partition(",")[0], "")
            yield _RULES.finding("near_miss", where, name=event["name"], node=node, why=why)


def _unshared_pieces(pieces: Iterable[Piece]) -> Iterator[Finding]:
    """Pieces with the same sequence of operations but different digests, which are built separately."""
    first: dict[str, Piece] = {}
    reported: set[tuple[str, str]] = set()
    for piece in pieces:
        nodes = [node for node in piece.module.graph.nodes if node.op.startswith("call")]
        same = first.setdefault(" ".join(str(node.target) for node in nodes), piece)
        pair = (same.digest, piece.digest)
        if len(nodes) < 2 or same.digest == piece.digest or pair in reported:
            continue
        reported.add(pair)
        where, difference = _difference(same, piece)
        yield _RULES.finding("unshared_pieces", where, one=same.index, other=piece.index, difference=difference)


def _difference(one: Piece, other: Piece) -> tuple[str, str]:
    """(line, first difference) between two pieces of equal operations."""
    left, right = (structure(piece.module, len(piece.inputs)).splitlines()[1:] for piece in (one, other))
    for node, a, b in zip(other.module.graph.nodes, left, right, strict=False):
        if a != b:
            return source_location(node), f"`{_short(a)}` against `{_short(b)}`"
    return "", "they read a different number of inputs"


def _short(text: str) -> str:
    return text if len(text) <= 90 else text[:87] + "..."
