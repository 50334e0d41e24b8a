"""Pass manager: order, settings, reports, graph checks. merge_linears: merges and near-misses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.toy import BOUNDARY, DYNAMIC, SIZES, attention, example, step, toy
from torchweave.compiler import GraphPass, PassResult, compile_graph
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.passes.base import Pass, Stage, TokenRange
from torchweave.compiler.passes.manager import PassManager, default_passes
from torchweave.compiler.passes.torch_ir.merge_linears import LINEAR, MergeLinears
from torchweave.compiler.runtime.forward import call_op
from torchweave.compiler.tuning.table import Entry, Table
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

FX = TorchCompileConfig(enable_inductor=False)


def graph_of(module: nn.Module, *shape: int) -> CapturedGraph:
    return capture(module, {"x": torch.zeros(*shape)}, {"x": {0: "T"}}, "backed_size_oblivious")


def merged(report: Report) -> dict[str, Any]:
    """The event of merge_linears."""
    return next(event for event in report.select("pass") if event["name"] == "merge_linears")


def num_linears(graph: CapturedGraph) -> int:
    return sum(node.target is LINEAR for node in graph.graph.nodes)


class Scale(nn.Module):
    """The five-line graph of the example passes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, x, alpha=2) + torch.add(x, x)


class Double(GraphPass):
    name = "double"

    def run(self, graph: CapturedGraph) -> PassResult:
        matches = 0
        for node, (x, y) in self.calls(graph, torch.add, "input", "other"):
            if x is y:
                with graph.graph.inserting_before(node):
                    new = graph.graph.call_function(torch.mul, (x, 2))
                new.meta = dict(node.meta)
                node.replace_all_uses_with(new)
                graph.graph.erase_node(node)
                matches += 1
        return PassResult(matches, matches)


def test_user_pass_matches_and_unexpected_argument_does_not() -> None:
    report = Report(show=False)
    x = torch.randn(5)
    compiled_graph = compile_graph(
        Scale(), {"x": torch.zeros(3)}, {"x": {0: "T"}}, config=FX, report=report, passes=[Double()]
    )
    event = report.select("pass")[0]
    assert (event["name"], event["matches"], event["ops_before"], event["ops_after"]) == ("double", 1, 3, 3)
    assert torch.equal(compiled_graph(call_op, x), Scale()(x)), "alpha=2 was matched away"


def test_pass_order_switches_and_printed_graphs() -> None:
    seen: list[str] = []

    class Note(GraphPass):
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, graph: CapturedGraph) -> PassResult:
            seen.append(self.name)
            return PassResult()

    report = Report(show=False)
    config = TorchCompileConfig(disabled_passes=("second",))
    manager = PassManager([Note("first"), Note("second"), Note("third")], config)
    manager.run(graph_of(Scale(), 3), report)
    assert seen == ["first", "third"]
    assert [(event["name"], event["enabled"]) for event in report.select("pass")][1] == ("second", False)
    assert str(manager).splitlines()[1].split()[:7] == ["1", "second", "torch_ir", "exact", "T", "..", "off:"]
    with pytest.raises(ValueError, match="unknown pass fourth; available: first"):
        PassManager([Note("first")], TorchCompileConfig(disabled_passes=("fourth",)))
    with pytest.raises(ValueError, match=r"unknown pass merge_linear; did you mean merge_linears\?"):
        PassManager([Note("first")], TorchCompileConfig(enabled_passes=("merge_linear",)))
    with pytest.raises(ValueError, match="pass names must be unique"):
        PassManager([Note("first"), Note("first")])


def whole_steps(subject: str, gains: dict[int, float], model: str = "steps/m") -> list[Entry]:
    """Entries of steps that take 100 us without the pass, and as much less as `gains` says."""
    return [
        Entry(subject, model, tokens, "on" if gain > 1 else "", 100 - gain, 100.0, 1.0)
        for tokens, gain in gains.items()
    ]


def test_a_pass_runs_where_whole_steps_gained():
    entries = [
        *whole_steps("rotary_attention", {1: 0.5, 8: -2}),
        *whole_steps("merge_linears", {1: -2, 8: 4}),
        *whole_steps("raise_rms_norm", {1: 3, 8: 3}),
        *whole_steps("add_rms_norm", {1: -1, 8: 3, 32: 5, 512: 0}),
        *whole_steps("gated_activation", {1: 3, 8: 0}),
        *whole_steps("gated_activation", {1: 0, 8: 3}, "steps/another"),
        *whole_steps("fused_linears", {1: 3, 8: 3, 48: -1}),
        *whole_steps("fp8_norm", {48: 9, 1: -1}),
        Entry("rope", "a shape of the op", 8, "", 9.0, 9.0, 0.1),
    ]
    manager = PassManager(table=Table("gpu", tuple(entries)))
    settings = {each.each.name: each for each in manager.settings}

    assert not settings["rotary_attention"].enabled
    assert settings["rotary_attention"].why == "whole steps of 1, 8 tokens do not gain beyond noise"
    assert settings["merge_linears"].enabled and settings["merge_linears"].each.token_range == (None, None)
    ranges = {name: settings[name].each.token_range for name in settings if settings[name].enabled}
    assert ranges["raise_rms_norm"] == ranges["gated_activation"] == ranges["rope"] == (None, None)
    assert ranges["add_rms_norm"] == (8, 32) and ranges["fp8_norm"] == (48, None)
    assert ranges["fused_linears"] == (1, 8), "its own range ends at 32"
    chosen = PassManager(config=TorchCompileConfig(enabled_passes=("rotary_attention",)), table=manager.table)
    assert next(each for each in chosen.settings if each.each.name == "rotary_attention").enabled
    assert "add_rms_norm" in str(manager) and "T 8..32" in str(manager)
    assert all(
        each.each.token_range == (None, None) for each in PassManager().settings if each.each.name == "add_rms_norm"
    )


def test_a_pass_without_a_common_token_count_is_off():
    class Few(GraphPass):
        name = "few"
        stage: Stage = "aten"
        token_range: TokenRange = (1, 4)

        def run(self, graph: CapturedGraph) -> PassResult:
            return PassResult()

    table = Table("gpu", tuple(whole_steps("few", {1: 0, 8: 5})))
    (setting,) = PassManager([Few()], table=table).settings
    assert not setting.enabled and "at 8 tokens only" in setting.why


def test_error_names_the_pass_that_broke_the_graph() -> None:
    class Breaks(GraphPass):
        name = "breaks"

        def run(self, graph: CapturedGraph) -> PassResult:
            *_, last, _ = graph.graph.nodes
            first = next(node for node in graph.graph.nodes if node.op != "placeholder")
            first.append(first.prev) if first is last else first.prepend(last)
            return PassResult(1, 1)

    with pytest.raises(RuntimeError, match="pass breaks left an invalid graph"):
        PassManager([Breaks()]).run(graph_of(Scale(), 3), Report(show=False))


def test_built_in_passes_follow_the_protocol() -> None:
    for each in default_passes():
        assert isinstance(each, Pass) and each.name and type(each).__doc__


# -- merge_linears -----------------------------------------------------------------------------------------------------


def test_merging_is_exact_for_every_size_and_takes_no_memory() -> None:
    module = toy(bias=True)
    want = {size: module(*step(*size)) for size in SIZES}
    before = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in module.parameters()}
    report = Report(show=False)
    compiled_graph = compile_graph(module, example(), DYNAMIC, boundary_ops=BOUNDARY, config=FX, report=report)
    after = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in module.parameters()}
    assert sum(before.values()) == sum(after.values())
    assert merged(report)["matches"] == 6 and merged(report)["rewritten"] == 15
    for size in SIZES:
        assert torch.equal(compiled_graph(call_op, *step(*size)), want[size])
        assert torch.equal(module(*step(*size)), want[size]), "the module itself works on in its views"


def test_a_module_can_be_compiled_twice() -> None:
    module = toy()
    want = module(*step(7, 3))
    for _ in range(2):
        compiled_graph = compile_graph(module, example(), DYNAMIC, boundary_ops=BOUNDARY, config=FX)
    assert torch.equal(compiled_graph(call_op, *step(7, 3)), want)


def test_switched_off_by_name() -> None:
    config = TorchCompileConfig(enable_inductor=False, disabled_passes=("merge_linears",))
    compiled_graph = compile_graph(toy(), example(), DYNAMIC, boundary_ops=BOUNDARY, config=config)
    assert merged(compiled_graph.report)["enabled"] is False


class Pair(nn.Module):
    """Two linears over x, with options that prevent merging."""

    def __init__(
        self, between: str = "", bias: tuple[bool, bool] = (False, False), rows: tuple[int, int] = (16, 8)
    ) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(8, width, bias=each) for width, each in zip(rows, bias, strict=True))
        self.between = between
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 1.0
        if self.between == "flat":
            return self.a(x).view(-1) * 2, self.b(x)
        a = self.a(x)
        if self.between == "relu":
            return a.relu(), self.b(x).relu()
        if self.between == "method":
            return a.as_strided((a.shape[0], 4), (16, 2)), self.b(x)
        if self.between == "strides":
            return torch.as_strided(a[0], (a.shape[0], 4), (16, 2)), self.b(x)
        if self.between == "write":
            x.add_(1)
        if self.between == "write a view":
            x[:, 1:].mul_(2)
        if self.between == "boundary":
            out = torch.empty_like(a[:, None])
            attention(a[:, None], a[:, None], a[:, None], out, 0, 1.0)
            a = out[:, 0]
        if self.between == "computed":
            return a, F.linear(x, self.b.weight * 2)
        if self.between == "same weight":
            return a, self.a(x)
        return a, self.b(x)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Pair("write"), "writes to it between them"),
        (Pair("write a view"), "writes to it between them"),
        (Pair("boundary"), "the boundary op"),
        (Pair("computed"), "computed, not a parameter"),
        (Pair("flat", rows=(16, 16)), "needs a contiguous result"),
        (Pair("method"), "strides of its own"),
        (Pair("strides"), "strides of its own"),
        (Pair(bias=(True, False)), "differs in bias"),
        (Pair("same weight"), "already part of"),
    ],
    ids=lambda thing: thing.between or "kind" if isinstance(thing, Pair) else "",
)
def test_near_misses_are_unchanged_and_have_reasons(module: Pair, why: str) -> None:
    graph = graph_of(module, 5, 8)
    graph.boundary_ops = BOUNDARY
    before = num_linears(graph)
    result = MergeLinears().run(graph)
    assert result.matches == 0 and num_linears(graph) == before
    assert any(why in miss.why for miss in result.near_misses), result.near_misses


class SharedExpert(nn.Module):
    """Gate and up of a shared expert, a router that reads x through a view, and the expert's gate of one row."""

    def __init__(self, router: bool = True) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(8, 16, bias=False) for _ in range(2))
        self.router = nn.Linear(8, 24, bias=False) if router else None
        self.expert_gate = nn.Linear(8, 1, bias=False)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        scale = self.expert_gate(x).sigmoid()
        if self.router is not None:
            scale = scale * self.router(x.reshape(-1, 8)).softmax(-1)[:, :1]
        return scale * F.silu(self.gate(x)) * self.up(x)


def test_a_router_and_a_gate_of_one_row_are_merged_with_padding() -> None:
    """Gate and up stay a pair, which a later pass fuses with their activation."""
    module = SharedExpert()
    want = {x: module(x) for x in (torch.randn(1, 8), torch.randn(7, 8))}
    report = Report(show=False)
    compiled_graph = compile_graph(module, {"x": torch.zeros(5, 8)}, {"x": {0: "T"}}, config=FX, report=report)
    assert merged(report)["matches"] == 2 and merged(report)["rewritten"] == 4
    rows = {name: each.untyped_storage().nbytes() // 32 for name, each in module.named_parameters()}
    assert rows == {"gate.weight": 32, "up.weight": 32, "router.weight": 32, "expert_gate.weight": 32}, (
        "24 + 1 + 7 zeros"
    )
    for x, expected in want.items():
        torch.testing.assert_close(compiled_graph(call_op, x), expected)
    graph = graph_of(SharedExpert(), 5, 8)
    MergeLinears().run(graph)
    sizes = [node.args[1] for node in graph.graph.find_nodes(op="call_function", target=torch.split)]
    assert sorted(sizes) == [[1, 7, 24], [16, 16]], "the router's columns behind the gate's are aligned"


def test_a_gate_of_one_row_beside_a_merged_group_is_left_alone() -> None:
    graph = graph_of(SharedExpert(router=False), 5, 8)
    result = MergeLinears().run(graph)
    assert result.rewritten == 2 and ["misalign" in miss.why for miss in result.near_misses] == [True]


def test_near_miss_does_not_prevent_other_merges() -> None:
    """Of five linears over x, the three before a boundary op and the two behind it become one each."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))
            self.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (linear(x)[:, None] for linear in list(self.each)[:3])
            out = torch.empty_like(q)
            attention(q, k, v, out, 0, 1.0)
            return out[:, 0] + self.each[3](x) * self.each[4](x)

    module = Parallel()
    x = torch.randn(9, 8)
    want = module(x)
    report = Report(show=False)
    compiled_graph = compile_graph(
        module, {"x": torch.zeros(5, 8)}, {"x": {0: "T"}}, boundary_ops=BOUNDARY, config=FX, report=report
    )
    assert merged(report)["matches"] == 2 and merged(report)["rewritten"] == 5
    torch.testing.assert_close(compiled_graph(call_op, x), want)


def test_linears_over_the_same_weights_share_the_merged_one() -> None:
    """The weights of a layer that is applied twice are merged once."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = self.a(x) * self.b(x)
            return x

    module = Twice()
    graph = graph_of(module, 5, 8)
    result = MergeLinears().run(graph)
    assert result.matches == 2 and len(list(graph.constants())) == 1
    assert module.a.weight.untyped_storage().data_ptr() == module.b.weight.untyped_storage().data_ptr()


def test_strides_downstream_are_those_of_views() -> None:
    graph = graph_of(Pair("relu", rows=(16, 8)), 5, 8)
    MergeLinears().run(graph)
    readers = graph.graph.find_nodes(op="call_method", target="relu")
    fakes: list[Any] = [node.all_input_nodes[0].meta["example_value"] for node in readers]
    assert [fake.stride() for fake in fakes] == [(24, 1), (24, 1)] and fakes[1].storage_offset() == 16
