"""Build a piece as runs on several streams, each run as its own piece, where that is predicted to be faster."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from torchweave.compiler.codegen.pieces import Boxed, BuiltPiece
from torchweave.compiler.ir.aliasing import AliasAnalysisError
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import Piece, extract_subgraph
from torchweave.compiler.streams.backends import Streams
from torchweave.compiler.streams.schedule import Program, Timeline, program, schedule, simulate
from torchweave.compiler.streams.tasks import EVENT, Costs, TaskGraph, key_of, task_graph
from torchweave.compiler.tuning.linears import called_shape
from torchweave.compiler.tuning.table import STREAMS, Table
from torchweave.report import Report

Build = Callable[[Piece], BuiltPiece]
_DECODE_TOKENS = 8  # streams are for decode steps; linears cost nearly the same at 1 to 32 tokens


@dataclass(frozen=True)
class Split:
    """A piece divided into runs.

    Attributes:
        parts: the piece of each run; its inputs, constants and outputs are nodes of the whole piece.
        written: for each run, the positions of mutated arguments.
    """

    piece: Piece
    graph: TaskGraph
    program: Program
    timeline: Timeline
    parts: tuple[Piece, ...]
    written: tuple[tuple[int, ...], ...]

    def nodes(self, run: int) -> list[fx.Node]:
        return [node for task in self.program.runs[run].tasks for node in self.graph.tasks[task].nodes]


class StreamBuilder:
    """Builds pieces, split over streams where the prediction, and a measurement if there was one, is a gain.

    Args:
        streams: `max_num_streams` streams, shared by all pieces.
        built_by: compiler of the runs; the cost model counts operations that Inductor fuses as one kernel.
        table: measured costs of linears, and measured gains of splitting pieces.
    """

    def __init__(
        self,
        streams: Streams,
        max_num_streams: int,
        report: Report,
        built_by: Literal["inductor", "fx"],
        table: Table,
    ) -> None:
        self._streams, self._max_num_streams, self._report = streams, max_num_streams, report
        self._fused, self._table = built_by == "inductor", table

    def build(self, piece: Piece, build_piece: Build) -> BuiltPiece:
        """Build a piece with `build_piece`, whole or run by run."""
        measured = linear_costs(piece, self._table)
        try:
            split = plan_split(piece, self._max_num_streams, Costs(self._fused, measured))
            if self._fused:
                _reject_aliases(split)
        except AliasAnalysisError as error:
            self._report.event("streams", piece=piece.digest, lanes=[], kept=False, why=str(error))
            return build_piece(piece)
        pays, why = self._decide(split)
        names = [[node.name for node in split.nodes(run)] for run in range(len(split.parts))]
        self._report.event(
            "streams",
            piece=piece.digest,
            lanes=split.timeline.span_rows(names),
            serial=split.timeline.serial,
            makespan=split.timeline.makespan,
            kept=pays,
            why=why,
            measured=len(measured),
        )
        return self._build(split, build_piece) if pays else build_piece(piece)

    def _decide(self, split: Split) -> tuple[bool, str]:
        if split.program.num_streams < 2:
            return False, "its operations form one chain"
        pays, why = split.timeline.decision()
        if not pays:
            return False, why
        measured_saving = self._table.measured_saving_us(STREAMS, split.piece.digest)
        if measured_saving is None:
            return True, f"{why}; not measured"
        return measured_saving > 0, f"{why}; measured to save {measured_saving:.3g} us"

    def _build(self, split: Split, build_piece: Build) -> BuiltPiece:
        begin = time.monotonic()
        built = [build_piece(part) for part in split.parts]
        call, code = join(split, [each.call for each in built], self._streams)
        self._report.artifact(f"pieces/{split.piece.digest}/streams.py", code)
        kind = "cache" if all(each.built == "cache" for each in built) else built[0].built
        max_size = min(each.max_size for each in built)
        return BuiltPiece(split.piece.digest, call, kind, time.monotonic() - begin, max_size=max_size)


def linear_costs(piece: Piece, table: Table) -> dict[str, float]:
    """Measured microseconds of the linears of a piece, by `key_of`: a small weight costs less than a large one."""
    costs: dict[str, float] = {}
    ops = torch.ops.torchweave
    for node in piece.module.graph.nodes:
        if node.target not in (ops.linear.default, ops.fused_linear.default):
            continue
        shape = called_shape(node.args, value(node.args[1]))
        entries = table.matching_entries(shape.subject, shape.key)
        if entries:
            entry = next((each for each in entries if each.tokens >= _DECODE_TOKENS), entries[-1])
            costs[key_of(node)] = entry.microseconds
    return costs


def plan_split(piece: Piece, max_num_streams: int, costs: Costs) -> Split:
    """Split a piece by list scheduling.

    Raises:
        AliasAnalysisError: the piece cannot be split safely.
    """
    graph = task_graph(piece.module.graph, costs)
    each = [task.cost for task in graph.tasks]
    pinned = {index for index, task in enumerate(graph.tasks) if task.has_collective}
    scheduled_tasks = schedule(each, graph.dependencies, max_num_streams, EVENT, pinned)
    runs = program(scheduled_tasks, graph.dependencies)
    placeholders = [node for node in piece.module.graph.nodes if node.op == "placeholder"]
    constants = frozenset(placeholders[len(piece.inputs) :])
    parts, written = [], []
    for index, run in enumerate(runs.runs):
        body = {node for task in run.tasks for node in graph.tasks[task].nodes}
        ordered = [node for node in piece.module.graph.nodes if node in body]
        part = extract_subgraph(
            piece.module, ordered, index, is_constant=constants.__contains__, is_free=graph.recomputable.__contains__
        )
        parts.append(part)
        written.append(_written(part, ordered, graph))
    return Split(piece, graph, runs, simulate(runs, each), tuple(parts), tuple(written))


def _reject_aliases(split: Split) -> None:
    """Reject runs that mutate possibly aliased inputs: Inductor needs the aliases of mutated inputs, which runs do not record.

    Raises:
        AliasAnalysisError: a run writes to an input, and another input may be a view of it.
    """
    for part, written in zip(split.parts, split.written, strict=True):
        if len(written) > 1:
            node = [*part.inputs, *part.constants][written[0]]
            raise AliasAnalysisError(f"a run would write to {node.name}, of which another input may be a view")


def _written(part: Piece, body: list[fx.Node], graph: TaskGraph) -> tuple[int, ...]:
    writes = frozenset(group for node in body for group in graph.memory.access[node].writes)
    arguments = [*part.inputs, *part.constants]
    return tuple(index for index, node in enumerate(arguments) if graph.memory.holds[node] & writes)


def join(split: Split, calls: list[Boxed], streams: Streams) -> tuple[Boxed, str]:
    """The callable of a split piece, and its code."""
    namespace: dict[str, Any] = {"streams": streams}
    for index, (call, written) in enumerate(zip(calls, split.written, strict=True)):
        namespace[f"run_{index}"] = streams.with_race_checks(call, written)
    for stream in sorted({run.stream for run in split.program.runs} - {0}):
        namespace[f"stream_{stream}"] = streams[stream]
    code = _Writer(split).text()
    for name in set(re.findall(r"\b(?:event_\d+|fork)\b", code)):
        namespace[name] = streams.event()
    exec(compile(code, f"<torchweave streams {split.piece.digest}>", "exec"), namespace)
    return namespace["call"], code


class _Writer:
    """Writes the code of a split piece: runs in launch order, events, and deletion of dead tensors."""

    def __init__(self, split: Split) -> None:
        self.split, self.program = split, split.program
        graph = split.piece.module.graph
        self.placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.output: Any = graph.output_node()
        self.names = {
            node: node.name for part in split.parts for node in (*part.inputs, *part.constants, *part.outputs)
        }
        self.names |= {node: node.name for node in (*self.placeholders, *self.output.all_input_nodes)}

    def text(self) -> str:
        lines = [
            f"{''.join(f'{self.names[node]}, ' for node in self.placeholders)}= args",
            "args.clear()",
            "streams.begin()",
        ]
        if self.program.forks:
            lines.append("fork.record()")
        dropped = self._last_uses()
        started: set[int] = set()
        for index, run in enumerate(self.program.runs):
            body = ["fork.wait()"] if run.stream in self.program.forks and run.stream not in started else []
            started.add(run.stream)
            body += [f"event_{each}.wait()" for each in run.waits]
            body.append(self._call(index))
            body += [f"event_{index}.record()"] if run.signals else []
            dead = ", ".join(self.names[node] for node in dropped.get(index, ()))
            body += [f"del {dead}"] if dead else []
            lines += [f"with stream_{run.stream}:", *(f"    {line}" for line in body)] if run.stream else body
        lines += [f"event_{each}.wait()" for each in self.program.joins]
        lines += ["streams.end()", f"return ({self._results()})"]
        return "def call(args):\n" + "".join(f"    {line}\n" for line in lines)

    def _call(self, index: int) -> str:
        part = self.split.parts[index]
        arguments = ", ".join(self.names[node] for node in (*part.inputs, *part.constants))
        results = "".join(f"{self.names[node]}, " for node in part.outputs)
        return f"{results}{'= ' if results else ''}run_{index}([{arguments}])"

    def _results(self) -> str:
        return "".join(f"{self.names[x] if isinstance(x, fx.Node) else repr(x)}, " for x in self.output.args[0])

    def _last_uses(self) -> dict[int, list[fx.Node]]:
        """Tensors to delete after each run: those produced and read on one stream only.

        Tensors that cross streams live until the end, so that their memory is not reused while another stream may read them. So
        do the caller's tensors, which another piece may have produced on any stream.
        """
        streams: dict[fx.Node, set[int]] = {}
        last: dict[fx.Node, int] = {}
        for index, (run, part) in enumerate(zip(self.program.runs, self.split.parts, strict=True)):
            for node in (*part.inputs, *part.constants, *part.outputs):
                streams.setdefault(node, set()).add(run.stream)
                last[node] = index
        dead: dict[int, list[fx.Node]] = {}
        for node, index in last.items():
            live = node.op == "placeholder" or node in self.output.all_input_nodes or len(streams[node]) > 1
            if not live and isinstance(value(node), torch.Tensor):
                dead.setdefault(index, []).append(node)
        return dead
