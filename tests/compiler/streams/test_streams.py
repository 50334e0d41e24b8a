"""Streams: required order on any interleaving, predicted gains, equal results of split pieces."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from tests.compiler.streams.stream_cases import DYNAMIC, captured_piece, example, random_piece, shared_experts
from tests.compiler.toy import BOUNDARY, SIZES, step, toy
from tests.compiler.toy import DYNAMIC as TOY_DYNAMIC
from tests.compiler.toy import example as toy_example
from tests.ops.collectives.collective_cases import mirrored
from torchweave.compiler import CompileCache, compile_graph
from torchweave.compiler.codegen.pieces import build_fx
from torchweave.compiler.ir.aliasing import AliasAnalysisError, analyze_aliasing, op_name
from torchweave.compiler.ir.collectives import collective_group
from torchweave.compiler.partition.split import Piece
from torchweave.compiler.runtime.forward import call_op
from torchweave.compiler.streams import build
from torchweave.compiler.streams.backends import CheckedStreams, DataRace
from torchweave.compiler.streams.build import Split, StreamBuilder, join, linear_costs, plan_split
from torchweave.compiler.streams.schedule import priorities, program, schedule, simulate
from torchweave.compiler.streams.tasks import Costs, hazards, key_of
from torchweave.compiler.tuning.table import Entry, Table
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

ADD, VIEW, ADD_IN_PLACE, ACCUMULATE = 0, 5, 7, 10  # of `stream_cases.OPERATIONS`
FX2 = TorchCompileConfig(enable_inductor=False, max_num_streams=2)


# -- hazards -----------------------------------------------------------------------------------------------------------


def order(piece: Piece) -> set[tuple[str, str]]:
    graph = piece.module.graph
    return {(a.name, b.name) for a, b in hazards(graph, analyze_aliasing(graph))}


def test_reads_and_writes_of_one_storage_are_ordered_through_its_views() -> None:
    # add = a + b; view = add.view(); tanh = tanh(add); view.add_(b); relu-like read of add afterwards
    piece = random_piece([(ADD, 0, 1), (VIEW, 2, 0), (2, 2, 0), (ADD_IN_PLACE, 3, 1), (2, 2, 0), (8, 3, 0)], [2, 4])
    found = order(piece)
    assert {
        ("tanh", "add_"),
        ("add_", "tanh_1"),
        ("add_", "mul_"),
        ("tanh_1", "mul_"),
    } <= found
    assert not any({a, b} == {"tanh", "tanh_1"} for a, b in found), "two reads are in no order"


def test_mutated_arguments_come_from_the_schema() -> None:
    found = order(random_piece([(ADD, 0, 1), (2, 2, 0), (ACCUMULATE, 0, 2), (2, 2, 0)], [1, 2]))
    assert {("tanh", "accumulate_default"), ("accumulate_default", "tanh_1")} <= found


def test_inputs_may_be_views_of_each_other() -> None:
    found = order(random_piece([(2, 0, 0), (ADD_IN_PLACE, 1, 1), (2, 0, 0)], [0, 2]))
    assert {("tanh", "add_"), ("add_", "tanh_1")} <= found


def test_views_are_found_without_alias_annotations() -> None:
    """As one from the cache has: there, every fake tensor has a storage of its own."""
    piece = random_piece([(ADD, 0, 1), (VIEW, 2, 0), (2, 2, 0), (ADD_IN_PLACE, 3, 1), (2, 2, 0)], [1, 3])
    known = order(piece)
    for node in piece.module.graph.nodes:
        if isinstance(fake := node.meta.get("example_value"), Tensor):
            with fake.fake_mode:
                node.meta["example_value"] = torch.empty_strided(fake.shape, fake.stride())
    assert order(piece) == known


# -- schedule ----------------------------------------------------------------------------------------------------------


def test_critical_path_is_scheduled_first() -> None:
    costs, dependencies = [1.0, 10.0, 2.0, 3.0, 1.0], [(), (0,), (0,), (2,), (1, 3)]
    assert priorities(costs, dependencies) == [12, 11, 6, 4, 1]
    scheduled_tasks = {slot.task: slot for slot in schedule(costs, dependencies, 2)}
    assert [scheduled_tasks[task].stream for task in range(5)] == [0, 0, 1, 1, 0]
    runs = program(list(scheduled_tasks.values()), dependencies)
    assert [(run.stream, run.tasks, run.waits, run.signals) for run in runs.runs] == [
        (0, (0,), (), True), (0, (1,), (), False), (1, (2, 3), (0,), True), (0, (4,), (2,), False)
    ]  # fmt: skip
    timeline = simulate(runs, costs, event=0.5)
    assert (timeline.makespan, timeline.serial) == (12, 17) and timeline.decision()[0]


def test_an_event_is_recorded_once_and_only_for_another_stream() -> None:
    dependencies = [(), (0,), (0,), (0,), (1, 2, 3)]
    runs = program(schedule([1, 5, 5, 5, 1], dependencies, 3), dependencies)
    assert runs.num_streams == 3 and not runs.joins
    assert sum(run.signals for run in runs.runs) == 3, "one for the fork, one for each of the other streams"
    (only,) = program(schedule([1, 5, 5, 5, 1], dependencies, 1), dependencies).runs
    assert only.tasks == (0, 1, 2, 3, 4) and not only.signals


graphs_of_tasks = st.integers(1, 14).flatmap(
    lambda count: st.tuples(
        st.lists(st.floats(0, 20), min_size=count, max_size=count),
        st.tuples(*(st.sets(st.integers(0, max(index - 1, 0)), max_size=3) for index in range(count))),
        st.integers(1, 4),
    )
)


@settings(max_examples=150, deadline=None)
@given(graphs_of_tasks)
def test_program_keeps_every_dependency_without_redundant_waits(drawn: Any) -> None:
    costs, sets, num_streams = drawn
    dependencies = [[earlier for earlier in sorted(found) if earlier < index] for index, found in enumerate(sets)]
    scheduled_tasks = schedule(costs, dependencies, num_streams)
    runs = program(scheduled_tasks, dependencies)
    assert sorted(task for run in runs.runs for task in run.tasks) == list(range(len(costs)))
    place = {task: (index, at) for index, run in enumerate(runs.runs) for at, task in enumerate(run.tasks)}
    over = _over(runs.runs)
    for task, earlier in enumerate(dependencies):
        for each in earlier:
            assert place[each][0] in over[place[task][0]] or (
                place[each][0] == place[task][0] and place[each] < place[task]
            )
    for index, run in enumerate(runs.runs):
        for wait in run.waits:
            fewer = replace(run, waits=tuple(set(run.waits) - {wait}))
            others = [fewer if each is run else each for each in runs.runs]
            assert wait not in _over(others)[index], "a wait that follows from others"
    assert simulate(runs, costs, event=0).makespan <= sum(costs) + 1e-6
    assert simulate(runs, costs, event=0).makespan >= max(priorities(costs, dependencies)) - 1e-6


def _over(runs: Sequence[Any]) -> list[set[int]]:
    """For each run, the runs that are over when it begins."""
    over: list[set[int]] = []
    last: dict[int, int] = {}
    for index, run in enumerate(runs):
        direct = {*run.waits, *([last[run.stream]] if run.stream in last else [])}
        over.append(direct.union(*(over[each] for each in direct)))
        last[run.stream] = index
    return over


# -- tasks -------------------------------------------------------------------------------------------------------------


def test_fusable_nodes_stay_on_one_stream() -> None:
    _, piece = captured_piece(shared_experts())
    split = plan_split(piece, 2, Costs(fused=True))
    chains = [[node.name for node in split.nodes(run)] for run in range(len(split.parts))]
    (routed,) = (chain for chain in chains if "routed" in chain)
    (shared,) = (chain for chain in chains if any("silu" in name for name in chain))
    assert {"topk", "routed"} <= set(routed) and "routed" not in shared
    assert split.program.num_streams == 2 and len(chains) == 4
    assert chains[0][0] == "linear" and "rsqrt" in chains[0], "the norm stays with the residual add before it"
    assert any("mean" in name for name in chains[-1]), "and the next one with the sum of both experts"


def test_measured_costs_override_estimates() -> None:
    _, piece = captured_piece(shared_experts())
    (experts,) = (node for node in piece.module.graph.nodes if op_name(node)[1] == "experts")
    assert Costs().of((experts,), frozenset()) == 20
    assert Costs(measured={key_of(experts): 3.5}).of((experts,), frozenset()) == 3.5
    assert key_of(experts).startswith("torchweave::experts(float32[T,32], ")
    measured = {key_of(node): 0.1 for node in piece.module.graph.nodes if node.op.startswith("call")}
    cheap = plan_split(piece, 2, Costs(fused=True, measured=measured))
    assert not cheap.timeline.decision()[0], "where everything is short, events cost more than they bring"


def test_linears_of_the_table_cost_their_measured_time() -> None:
    graph = fx.Graph()
    fakes = {"x": torch.empty(3, 64), "w": torch.empty(256, 64), "v": torch.empty(32, 64)}
    x, w, v = (graph.placeholder(name) for name in fakes)
    for node in (x, w, v):
        node.meta["val"] = fakes[node.name]
    ops = torch.ops.torchweave
    large = graph.call_function(ops.linear.default, (x, w, None, ""))
    fused = graph.call_function(ops.fused_linear.default, (x, w, None, v, 1e-6, 0.0, False, None, "silu", ""))
    small = graph.call_function(ops.linear.default, (x, v))
    graph.output((large, fused, small))
    entries = [Entry("small_linears", "256x64", tokens, "", tokens + 0.5, 9.0, 0.1) for tokens in (1, 8, 32)]
    entries.append(Entry("fused_linears", "256x64/ng", 1, "row", 4.0, 9.0, 0.1))
    piece = replace(captured_piece(shared_experts())[1], module=fx.GraphModule(torch.nn.Module(), graph))
    costs = linear_costs(piece, Table("gpu", tuple(entries)))
    assert costs == {key_of(large): 8.5, key_of(fused): 4.0}, (
        "at 8 tokens, else at the most measured; the rest keeps weights"
    )


def test_measured_costs_decide_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    _, piece = captured_piece(shared_experts())
    cheap = {key_of(node): 0.1 for node in piece.module.graph.nodes if node.op.startswith("call")}
    kept = []
    for costs in ({}, cheap):
        report = Report(show=False)
        monkeypatch.setattr(build, "linear_costs", lambda *_, costs=costs: costs)
        StreamBuilder(CheckedStreams(2), 2, report, "fx", Table("cpu")).build(piece, build_fx)
        kept.append(report.select("streams")[0]["kept"])
    assert kept == [True, False]


# -- what is built -----------------------------------------------------------------------------------------------------


def placeholders(piece: Piece) -> list[fx.Node]:
    return [node for node in piece.module.graph.nodes if node.op == "placeholder"]


def run_interleaved(split: Split, inputs: Sequence[Tensor], choose: Iterator[int]) -> list[Tensor]:
    """Run the streams node by node, `choose` picking each time which of those that can go on does."""
    env: dict[fx.Node, Any] = dict(zip(placeholders(split.piece), inputs, strict=True))
    done: set[int] = set()

    def stream(number: int) -> Iterator[set[int]]:
        for index, run in enumerate(split.program.runs):
            if run.stream != number:
                continue
            yield set(run.waits)
            part = split.parts[index]
            taken = dict(zip(placeholders(part), (*part.inputs, *part.constants), strict=True))
            interpreter = fx.Interpreter(part.module)
            for node in part.module.graph.nodes:
                if node.op == "output":
                    made = interpreter.map_nodes_to_values(node.args[0], node)
                    env.update(zip(part.outputs, made, strict=True))
                elif node.op == "placeholder":
                    interpreter.env[node] = env[taken[node]]
                else:
                    yield set()
                    interpreter.env[node] = interpreter.run_node(node)
            done.add(index)

    streams = {number: stream(number) for number in sorted({run.stream for run in split.program.runs})}
    waiting = {number: next(each) for number, each in streams.items()}
    while waiting:
        able = [number for number, needed in waiting.items() if needed <= done]
        assert able, "streams wait for each other"
        number = able[next(choose) % len(able)]
        needed = next(streams[number], None)
        if needed is None:
            del waiting[number]
        else:
            waiting[number] = needed
    (output,) = (node for node in split.piece.module.graph.nodes if node.op == "output")
    return [env[node] for node in output.args[0]]


def fresh(seed: int, count: int = 2) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 8, generator=draw) for _ in range(count)]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    torch.testing.assert_close(list(one), list(other), rtol=0, atol=0, equal_nan=True)


random_graphs = st.tuples(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=14),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
)


@settings(max_examples=120, deadline=None)
@given(random_graphs, st.integers(2, 4), st.randoms(use_true_random=False))
def test_any_legal_interleaving_gives_the_serial_result(drawn: Any, num_streams: int, random: Any) -> None:
    piece = random_piece(*drawn)
    calls = [node for node in piece.module.graph.nodes if node.op.startswith("call")]
    split = plan_split(
        piece, num_streams, Costs(measured={key_of(node): random.choice([0, 1, 5, 20]) for node in calls})
    )
    plain, checked, mixed = fresh(0), fresh(0), fresh(0)
    want = piece.module(*plain)
    call, _ = join(split, [build_fx(part).call for part in split.parts], CheckedStreams(num_streams))
    same(call(list(checked)), want)
    same(checked, plain)
    for _ in range(3):
        mixed = fresh(0)
        same(run_interleaved(split, mixed, iter(lambda: random.randrange(60), None)), want)
        same(mixed, plain)


def one_wait_less(split: Split) -> Iterator[Split]:
    runs = split.program.runs
    for index, run in enumerate(runs):
        for wait in run.waits:
            fewer = replace(run, waits=tuple(each for each in run.waits if each != wait))
            yield replace(split, program=replace(split.program, runs=(*runs[:index], fewer, *runs[index + 1 :])))
    for wait in split.program.joins:
        yield replace(split, program=replace(split.program, joins=tuple(e for e in split.program.joins if e != wait)))


IN_PLACE = random_piece(
    [(ADD, 0, 1), (1, 2, 0), (VIEW, 2, 0), (1, 1, 2), (ACCUMULATE, 1, 2), (1, 2, 3), (1, 2, 1)], [0, 1, 3, 4, 5]
)


@pytest.mark.parametrize("case", ["experts", "in place"])
def test_a_missing_event_is_caught(case: str) -> None:
    graph, piece = captured_piece(shared_experts()) if case == "experts" else (None, IN_PLACE)
    split = plan_split(piece, 2, Costs(fused=True))
    inputs = fresh(0) if graph is None else [example()[node.name] for node in map(_source(graph), piece.inputs)]
    inputs += [] if graph is None else [graph.constant(node) for node in piece.constants]
    lesser = list(one_wait_less(split))
    assert len(lesser) >= 2
    for each in lesser:
        call, _ = join(each, [build_fx(part).call for part in each.parts], CheckedStreams(2))
        with pytest.raises(DataRace, match="stream"):
            call(list(inputs))


def _source(graph: Any) -> Any:
    return lambda node: graph.bindings[node.name]


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_interleavings_expose_a_missing_event(random: Any) -> None:
    """The simulated streams are no proof by luck: without its waits, some order of this piece gives something else."""
    split = plan_split(IN_PLACE, 2, Costs())
    bare = replace(
        split, program=replace(split.program, runs=tuple(replace(run, waits=()) for run in split.program.runs))
    )
    want = IN_PLACE.module(*fresh(0))
    differs = 0
    for _ in range(20):
        try:
            got = run_interleaved(bare, fresh(0), iter(lambda: random.randrange(60), None))
        except KeyError:  # a value is read before it is made
            differs += 1
            continue
        differs += not all(map(torch.equal, got, want))
    assert differs


def test_generated_code_keeps_tensors_that_cross_streams() -> None:
    _, piece = captured_piece(shared_experts())
    split = plan_split(piece, 2, Costs(fused=True))
    _, code = join(split, [build_fx(part).call for part in split.parts], CheckedStreams(2))
    assert code.count(".record()") == code.count(".wait()") == 2 and code.count("with stream_1:") == 1
    crossing = next(line for line in code.splitlines() if "run_2(" in line).split("([")[1].split(",")[0]
    assert not re.search(rf"del .*\b{crossing}\b", code), "another stream may still read it"
    assert not re.search(r"del .*\binput_", code), "the piece before may have made it on another stream"


@pytest.mark.parametrize("inductor", [False, True])
def test_a_split_piece_computes_the_same_with_and_without_inductor(inductor: bool, tmp_path: Any) -> None:
    module, report = shared_experts(), Report(show=False)
    cache = CompileCache(tmp_path / "cache", report) if inductor else None
    config = TorchCompileConfig(enable_inductor=inductor)
    plain = compile_graph(module, example(), DYNAMIC, config=TorchCompileConfig(enable_inductor=False))
    config = replace(config, max_num_streams=2)
    compiled_graph = compile_graph(module, example(), DYNAMIC, config=config, cache=cache, report=report)
    for tokens in (1, 2, 7, 64):
        inputs = example(tokens, seed=tokens).values()
        for got, want in zip(compiled_graph(call_op, *inputs), plain(call_op, *inputs), strict=True):
            torch.testing.assert_close(
                got, want, **({"rtol": 1e-5, "atol": 1e-5} if inductor else {"rtol": 0, "atol": 0})
            )
    (event,) = report.select("streams")
    assert event["kept"] and event["makespan"] < event["serial"]
    assert {"stream", "start", "end", "nodes"} == set(event["lanes"][0]) and len(event["lanes"]) == 4
    if inductor:
        again = Report(show=False)
        assert cache is not None
        compile_graph(module, example(), DYNAMIC, config=config, cache=CompileCache(cache.folder, again), report=again)
        assert again.select("piece")[0]["built"] == "cache", "runs are kept as pieces are"


def test_pieces_without_parallelism_are_built_serially() -> None:
    module, report = toy(), Report(show=False)
    compiled_graph = compile_graph(module, toy_example(), TOY_DYNAMIC, boundary_ops=BOUNDARY, config=FX2, report=report)
    *rest, last = report.select("streams")
    assert len(rest) == 2 and all(event["kept"] for event in rest), "q beside k, launch by launch"
    assert not last["kept"] and "one chain" in last["why"]
    assert torch.equal(compiled_graph(call_op, *step(*SIZES[2])), module(*step(*SIZES[2])))


def test_a_split_that_measured_slower_is_not_made() -> None:
    _, piece = captured_piece(shared_experts())
    for measured_saving, kept in ((-0.4, False), (1.5, True), (None, True)):
        report, entries = Report(show=False), ()
        if measured_saving is not None:
            entries = (Entry("streams", piece.digest, 1, "on", 5 - measured_saving, 5.0, 0.0),)
        StreamBuilder(CheckedStreams(2), 2, report, "fx", Table("cpu", entries)).build(piece, build_fx)
        (event,) = report.select("streams")
        assert event["kept"] is kept
        assert (
            "not measured" in event["why"]
            if measured_saving is None
            else f"measured to save {measured_saving:.3g} us" in event["why"]
        )


def test_unsupported_graph_is_left_alone() -> None:
    piece = random_piece([(ADD, 0, 1), (2, 2, 0)], [1])
    piece.module.graph.find_nodes(op="call_function", target=torch.tanh)[0].target = lambda x: object()
    with pytest.raises(AliasAnalysisError, match="neither a tensor nor a size"):
        plan_split(piece, 2, Costs())


# -- several ranks -----------------------------------------------------------------------------------------------------


class TwoSums(torch.nn.Module):
    """Two branches that know nothing of each other, each with sums over ranks: any order of the two would be right alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = torch.nn.ParameterList(torch.randn(32, 32) for _ in range(4))
        self.requires_grad_(False)

    def forward(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        a, b, c, d = self.weights
        reduce = torch.ops.torchweave.all_reduce
        left, right = reduce(attended @ a, "tp"), reduce(residual @ b, "tp")
        return reduce(right.tanh() @ c, "tp"), reduce(left @ d, "tp").sin()


def test_collectives_stay_in_order_on_the_callers_stream() -> None:
    with mirrored():
        _, piece = captured_piece(TwoSums())
        names = [node.name for node in piece.module.graph.nodes if collective_group(node) is not None]
        assert len(names) == 4
        found = order(piece)
        assert set(pairwise(names)) <= found
        calls = [node for node in piece.module.graph.nodes if node.op.startswith("call")]
        for seed in range(6):
            draw = Random(seed)
            costs = Costs(measured={key_of(node): draw.choice([0, 1, 5, 20]) for node in calls})
            split = plan_split(piece, 3, costs)
            launched = [
                (node.name, run.stream) for index, run in enumerate(split.program.runs) for node in split.nodes(index)
            ]
            assert [(name, stream) for name, stream in launched if name in names] == [(name, 0) for name in names]
        assert split.program.num_streams > 1, "what is no collective may still run beside them"
        call, _ = join(split, [build_fx(part).call for part in split.parts], CheckedStreams(3))
        inputs = [example()[name] for name in ("attended", "residual")]
        same(call([*inputs, *TwoSums().weights]), piece.module(*inputs, *TwoSums().weights))
