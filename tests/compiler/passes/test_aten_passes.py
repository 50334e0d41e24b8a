"""The ATen stage in the backend: where it runs, what it reports, cold and warm; variants by token count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import torchweave.compiler.codegen.lower as lower_module
from tests.compiler.passes.test_fusion import FUSION, alone, first
from tests.compiler.toy import BOUNDARY, DYNAMIC, SIZES, example, step, toy
from torchweave.compiler import compile_graph
from torchweave.compiler.cache.store import CompileCache
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.passes.base import GraphPass, PassResult
from torchweave.compiler.passes.manager import PassManager, default_passes, run_pass
from torchweave.compiler.passes.pattern import Fusion
from torchweave.compiler.passes.testing import T, graph_of
from torchweave.compiler.piece_builder import PieceBuilder, PieceJob, passes_for_range, token_ranges
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

aten = torch.ops.aten
FX = TorchCompileConfig(enable_inductor=False)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return aten.mul.Tensor(aten.silu.default(gate), up)


def same(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def gate(name: str = "gate", low: int | None = None, high: int | None = None, **facts: Any) -> Fusion:
    return Fusion(name, gated, same, token_range=(low, high), **facts)


def matched(report: Report) -> list[dict[str, Any]]:
    return [event for event in report.select("pass") if event["stage"] == "aten" and event.get("matches")]


class Small(nn.Module):
    """y = exp((x + x * w) * 3), and a constant size."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp((x + x * self.w) * 3.0)


def compile_small(config: TorchCompileConfig, report: Report, cache: CompileCache | None = None, **options: Any) -> Any:
    torch.manual_seed(1)
    return compile_graph(
        Small(), {"x": torch.zeros(5, 8)}, {"x": {0: "T"}}, config=config, report=report, cache=cache, **options
    )


def test_the_aten_stage_runs_once_for_each_distinct_piece() -> None:
    module, report = toy(), Report(show=False)
    compiled_graph = compile_graph(
        module, example(), DYNAMIC, boundary_ops=BOUNDARY, config=FX, report=report, passes=[gate()]
    )
    events = matched(report)
    assert [(event["shared_by"], event["matches"]) for event in events] == [(2, 1), (1, 1)], (
        "three layers, two kinds of piece"
    )
    event = events[0]
    assert event["stage"] == "aten" and event["piece"] in {piece.digest for piece in compiled_graph.pieces}
    assert event["ops_before"] == event["ops_after"] and event["diff"] == {} and event["near_misses"] == []
    for size in SIZES:
        assert torch.equal(compiled_graph(call_op, *step(*size)), module(*step(*size)))


def test_no_aten_pass_no_lowering() -> None:
    report = Report(show=False)
    compiled_graph = compile_graph(
        toy(), example(), DYNAMIC, boundary_ops=BOUNDARY, config=FX, report=report, passes=[]
    )
    assert not report.select("pass") and "linear_default" not in compiled_graph.code
    assert all("torch.ops.aten" not in piece.module.code for piece in compiled_graph.pieces)


@pytest.mark.parametrize(
    ("facts", "config", "why"),
    [
        ({}, TorchCompileConfig(disabled_passes=("gate",)), "disabled_passes"),
        ({"numerics": "tolerance"}, TorchCompileConfig(), "pass_numerics is exact"),
        ({"numerics": "tolerance"}, TorchCompileConfig(pass_numerics="tolerance"), None),
        ({"gated": True}, TorchCompileConfig(), "no measurement"),
        ({"gated": True, "numerics": "tolerance"}, TorchCompileConfig(enabled_passes=("gate",)), None),
        ({"builds": ("inductor",)}, FX, "runs only in inductor builds"),
    ],
)
def test_the_config_enables_passes_and_gives_the_reason(
    facts: dict[str, Any], config: TorchCompileConfig, why: str
) -> None:
    manager = PassManager([gate(**facts)], config)
    assert len(manager.passes("aten")) == (why is None)
    assert (f"off: {manager.settings[0].why}" if why else " on") in str(manager)
    assert why is None or why in manager.settings[0].why


def test_a_start_from_the_cache_reports_the_same_matches(tmp_path: Path) -> None:
    reports, outputs = [], []
    x = torch.randn(7, 8)
    for _ in range(2):
        report = Report(show=False)
        cache = CompileCache(tmp_path / "cache", report)
        compiled_graph = compile_small(TorchCompileConfig(), report, cache, passes=[FUSION])
        reports.append(report)
        outputs.append(compiled_graph(call_op, x))
    cold, warm = (matched(report)[0] for report in reports)
    assert (cold["cached"], warm["cached"]) == (False, True)
    assert {**cold, "cached": None, "at": 0} == {**warm, "cached": None, "at": 0} and warm["matches"] == 1
    assert reports[1].select("piece")[0]["built"] == "cache"
    assert torch.equal(*outputs)
    other = Fusion("scaled_add", alone, first, extra_check=lambda match: "never")
    for passes in ([other], []):
        report = Report(show=False)
        compile_small(TorchCompileConfig(), report, CompileCache(tmp_path / "cache", report), passes=passes)
        assert report.select("piece")[0]["built"] == "inductor", "a pass is a factor of the key"


def test_token_ranges_cover_every_count_once() -> None:
    passes = [gate("a", 1, 8), gate("b", None, 512), gate("c", 9, None)]
    assert token_ranges(passes) == [(1, 8), (9, 512), (513, None)]
    names = [[each.name for each in passes_for_range(passes, low, high)] for low, high in token_ranges(passes)]
    assert names == [["a", "b"], ["b", "c"], ["c"]]
    assert token_ranges([gate()]) == [(1, None)]


def test_a_pass_that_pays_in_a_range_makes_variants_where_it_matches() -> None:
    module, report = toy(), Report(show=False)
    fusion = Fusion("small", gated, lambda gate, up: torch.nn.functional.silu(gate) * up + 1.0, token_range=(None, 7))
    compiled_graph = compile_graph(
        module, example(), DYNAMIC, boundary_ops=BOUNDARY, config=FX, report=report, passes=[fusion]
    )
    variants = {event["index"]: event["variants"] for event in report.select("piece")}
    assert variants == {0: [], 1: [{"tokens": [1, 7], "built": "fx", "seconds": variants[1][0]["seconds"]}],
                        3: [{"tokens": [1, 7], "built": "fx", "seconds": variants[3][0]["seconds"]}]}  # fmt: skip
    assert [event["tokens"] for event in matched(report)] == [[1, 7], [1, 7]]
    assert "if T <= 7 else" in compiled_graph.code
    for tokens, rows in SIZES:
        equal = torch.equal(compiled_graph(call_op, *step(tokens, rows)), module(*step(tokens, rows)))
        assert equal == (tokens > 7), "the variant adds one, so that it can be told apart"


def test_the_default_start_has_one_variant_on_a_cpu_and_two_on_a_gpu() -> None:
    assert token_ranges(PassManager().passes("aten")) == [(1, 32), (33, None)], "fused_linears, which is for GPUs"
    compiled_graph = compile_graph(toy(), example(), DYNAMIC, boundary_ops=BOUNDARY, config=FX)
    assert all(not built.variants for built in compiled_graph.built.values()) and " if T" not in compiled_graph.code


class Rows(nn.Module):
    """Rows `index` [N] of a linear of x [T, 16]: two dynamic sizes, one of them fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)
        self.requires_grad_(False)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return torch.relu(self.linear(x[: x.shape[0]]))[index]


def test_sizes_are_built_static_and_tuned(tmp_path: Path) -> None:
    module, config = Rows(), TorchCompileConfig(compile_sizes=(7,))
    inputs = {"x": torch.zeros(5, 16), "index": torch.zeros(3, dtype=torch.int64)}
    for built in ("inductor", "cache"):
        report = Report(show=False)
        cache = CompileCache(tmp_path / "cache", report)
        compiled_graph = compile_graph(
            module, inputs, {"x": {0: "T"}, "index": {0: "N"}}, config=config, cache=cache, report=report
        )
        (event,) = report.select("piece")
        assert [each["tokens"] for each in event["variants"]] == [[7, 7]] and event["variants"][0]["built"] == built
        assert "T7 if T == 7 else" in compiled_graph.code
        for tokens, rows in ((7, 3), (7, 1), (8, 3), (1, 1)):
            x, index = torch.randn(tokens, 16), torch.arange(rows)
            torch.testing.assert_close(compiled_graph(call_op, x, index), module(x, index))
    general = compiled_graph.built[compiled_graph.pieces[0].digest]
    assert "empty_strided_cpu((7, 32)" in general.variants[0].built.code
    assert "empty_strided_cpu((s" in general.code


def test_fixpoint_pass_runs_until_no_match() -> None:
    def sine(x: Tensor) -> Tensor:
        return aten.sin.default(x)

    def cosine(x: Tensor) -> Tensor:
        return aten.cos.default(x)

    def once(x: Tensor) -> Tensor:
        return aten.neg.default(x)

    def chain(fixpoint: bool) -> int:
        patterns, replacements = (sine, cosine), (lambda x: torch.cos(x), lambda x: torch.tan(x))
        fusion = Fusion("chain", patterns, replacements, fixpoint=fixpoint)
        return run_pass(fusion, graph_of(torch.sin, [torch.randn(T, 4)])).matches

    assert (chain(False), chain(True)) == (1, 2), "what a round puts in is looked at by the next one"
    forever = Fusion("forever", once, lambda x: torch.neg(x), fixpoint=True)
    with pytest.raises(RuntimeError, match="pass forever still matches after 16 rounds"):
        run_pass(forever, graph_of(torch.neg, [torch.randn(T, 4)]))


def test_debug_finds_fake_values_that_are_wrong() -> None:
    class Lies(GraphPass):
        name, stage = "lies", "aten"

        def run(self, graph: Any) -> PassResult:
            node = next(node for node in graph.graph.nodes if node.op == "call_function")
            node.meta["val"] = graph.fake_mode.from_tensor(torch.zeros(3))
            return PassResult(1, 1)

    graph = graph_of(lambda x: torch.exp(x).neg(), [torch.randn(T, 4)])
    run_pass(Lies(), graph)  # without `debug` only the outputs are checked
    with pytest.raises(RuntimeError, match="pass lies left an invalid graph: the fake value of exp"):
        run_pass(Lies(), graph, debug=True)


def test_debug_ignores_strides_of_size_one_dimensions() -> None:
    """A model with one key head: a fused op returns other strides for the heads, without changing any address."""

    class Strides(GraphPass):
        name, stage = "strides", "aten"

        def __init__(self, stride: int) -> None:
            self.stride = stride

        def run(self, graph: Any) -> PassResult:
            node = next(node for node in graph.graph.nodes if node.op == "call_function")
            with graph.fake_mode:
                node.meta["val"] = torch.empty_strided((3, 1, 4), (4, self.stride, 1))
            return PassResult(1, 1)

    graph = graph_of(torch.exp, [torch.randn(3, 1, 4)])
    run_pass(Strides(12), graph, debug=True)
    graph = graph_of(torch.exp, [torch.randn(3, 2, 4)])
    with pytest.raises(RuntimeError, match="pass strides left an invalid graph"):
        run_pass(Strides(12), graph, debug=True)


def test_most_shared_pieces_are_built_first_and_reported_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    order, build, report = [], PieceBuilder.build, Report(show=False)
    monkeypatch.setattr(PieceBuilder, "build", lambda self, piece: order.append(piece.index) or build(self, piece))
    compile_graph(toy(), example(), DYNAMIC, boundary_ops=BOUNDARY, config=FX, report=report)
    told = {event["index"]: event["shared_by"] for event in report.select("piece")}
    assert [told[index] for index in order] == [2, 1, 1] and order == [1, 0, 3] and list(told) == [0, 1, 3]


def test_ranges_come_from_the_cache_without_lowering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fusion = Fusion("scaled_add", alone, first, token_range=(None, 7))
    report = Report(show=False)
    compile_small(TorchCompileConfig(), report, CompileCache(tmp_path / "cache", report), passes=[fusion])
    monkeypatch.setattr("torchweave.compiler.piece_builder.cached_lowering", None)
    warm = Report(show=False)
    compiled_graph = compile_small(TorchCompileConfig(), warm, CompileCache(tmp_path / "cache", warm), passes=[fusion])
    assert [each["tokens"] for each in matched(warm)] == [each["tokens"] for each in matched(report)] == [[1, 7]]
    assert warm.select("piece")[0]["variants"][0]["built"] == "cache"
    for tokens in (1, 7, 8):
        x = torch.randn(tokens, 8)
        torch.testing.assert_close(compiled_graph(call_op, x), _small(x))


def test_piece_is_traced_once_and_variants_share_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    traced, trace_once = [], lower_module.trace

    def trace(*args: Any) -> fx.GraphModule:
        traced.append(trace_once(*args))
        return traced[-1]

    monkeypatch.setattr("torchweave.compiler.codegen.lower.trace", trace)
    fusion, report = Fusion("scaled_add", alone, first, token_range=(None, 7)), Report(show=False)
    compiled_graph = compile_small(FX, report, passes=[fusion])
    assert report.select("piece")[0]["variants"][0]["tokens"] == [1, 7]
    assert len(traced) == 1
    for tokens in (7, 8):
        x = torch.randn(tokens, 8)
        torch.testing.assert_close(compiled_graph(call_op, x), _small(x))


def _small(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return Small()(x)


def test_a_piece_that_cannot_be_lowered_is_built_as_it_is() -> None:
    class Aliased(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2
            q = y[:, None]
            out = torch.empty_like(q)
            torch.ops.toy.attention(q, q, q, out, 0, 1.0)
            y.add_(out[:, 0])
            return y, y[:, :2]

    report = Report(show=False)
    compiled_graph = compile_graph(Aliased(), {"x": torch.zeros(5, 8)}, {"x": {0: "T"}}, boundary_ops=BOUNDARY,
    config=FX, report=report,
                  passes=[gate()])  # fmt: skip
    (event,) = report.select("lowering")
    assert "returns a view of it" in event["why"]
    x = torch.randn(6, 8)
    assert all(map(torch.equal, compiled_graph(call_op, x), Aliased()(x)))
    graph = capture(Aliased(), {"x": torch.zeros(5, 8)}, {"x": {0: "T"}}, "backed_size_oblivious")
    manager = PassManager([], TorchCompileConfig())
    builder = PieceBuilder(graph, manager, None, torch.device("cpu"), report)
    job, rewrite = PieceJob(compiled_graph.pieces[-1], 0), lambda job: builder.aten_passes(job, lambda _: None)
    assert builder._build_for_size(job, 7, rewrite) is None and len(report.select("lowering")) == 2, (
        "nor has it a fixed size"
    )


def test_facts_of_passes_are_plain_data() -> None:
    report = Report(show=False)
    compile_small(FX, report, passes=[*default_passes(), FUSION])
    json.dumps(report.select("pass"))
