"""shared_expert: the shared expert of a mixture joins its routed experts; every bit, memory and near-misses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchweave.ops.collectives.op
import torchweave.ops.moe.quantized_experts  # noqa: F401  (defines torchweave::quantized_experts)
from torchweave.compiler import compile_graph
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.passes.manager import PassManager, default_passes, run_pass
from torchweave.compiler.passes.torch_ir.merge_linears import MergeLinears
from torchweave.compiler.passes.torch_ir.shared_expert import SharedExpert
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import DynamicShapes, TorchCompileConfig
from torchweave.report import Report

PASS = SharedExpert()
EXPERTS, QUANTIZED = torch.ops.torchweave.experts, torch.ops.torchweave.quantized_experts
E, TOP, WIDTH, INNER = 6, 2, 32, 16


class Mixture(nn.Module):
    """A mixture as Qwen 3-Next (gated) or DeepSeek V3 writes it; `form`: what differs."""

    def __init__(self, form: str = "", gated: bool = True, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.gated = form, gated
        inner = 2 * INNER if form == "wide" else INNER

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=form == "biases", dtype=dtype)

        self.router = nn.Linear(WIDTH, E, bias=False, dtype=dtype)
        self.up = nn.Parameter(torch.randn(E, 2 * INNER, WIDTH).to(dtype) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(E, WIDTH, INNER).to(dtype) / INNER**0.5)
        self.gate_proj, self.up_proj, self.down_proj = linear(WIDTH, inner), linear(WIDTH, inner), linear(inner, WIDTH)
        self.shared_gate = nn.Linear(WIDTH, WIDTH if form == "gate of columns" else 1, bias=False, dtype=dtype)
        self.requires_grad_(False)

    def experts(self, x: Tensor) -> Tensor:
        weights, index = torch.topk(F.softmax(self.router(x), -1, dtype=torch.float), TOP, -1)
        weights = weights if self.form == "float32 weights" else weights.to(x.dtype)
        if self.form == "quantized":
            scales = (torch.ones(E, 2 * INNER, 1), torch.ones(E, WIDTH, 1))
            fp8 = (self.up.to(torch.float8_e4m3fn), self.down.to(torch.float8_e4m3fn))
            return QUANTIZED(x, index, weights, fp8[0], scales[0], fp8[1], scales[1], None, None, "silu")
        up = self.up * 2 if self.form == "computed" else self.up
        return EXPERTS(x, index, weights, up, self.down, None, None, "silu")

    def mlp(self, x: Tensor) -> Tensor:
        act = F.gelu if self.form == "gelu" else F.silu
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.mlp(x + 1 if self.form == "other input" else x)
        routed = self.experts(x)
        if self.form == "all-reduced":
            routed = torch.ops.torchweave.all_reduce(routed, "tp")
        if self.form == "written input":
            x.add_(1)
        weighted = F.sigmoid(self.shared_gate(x)) * shared if self.gated else shared
        viewed = weighted.view(1, -1, WIDTH)
        out = (x[None] + (routed.view(1, -1, WIDTH) + viewed))[0]
        out = out + viewed[0] if self.form == "its view is read" else out
        return out + shared if self.form == "shared is read" else out


def captured(module: nn.Module, mode: DynamicShapes = "backed_size_oblivious") -> CapturedGraph:
    return capture(module, {"x": torch.zeros(5, WIDTH, dtype=torch.bfloat16)}, {"x": {0: "T"}}, mode)


@pytest.mark.parametrize("mode", ["backed", "backed_size_oblivious", "unbacked"])
@pytest.mark.parametrize("gated", [False, True])
def test_shared_expert_fires_once(gated: bool, mode: DynamicShapes) -> None:
    module = Mixture(gated=gated)
    graph = captured(module, mode)
    result = run_pass(PASS, graph, debug=True)
    assert result.matches == 1 and not result.near_misses
    assert result.rewritten == (6 if gated else 5), "nine or eight operations become three"
    (node,) = (node for node in graph.graph.nodes if node.target is EXPERTS.default)
    assert node.args[-1] is True and node.args[3].meta["example_value"].shape == (E + 1, 2 * INNER, WIDTH)
    assert run_pass(PASS, graph).matches == 0, "its own result must not match again"


def test_weights_become_views_of_the_stacked_ones() -> None:
    module = Mixture()
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    run_pass(PASS, captured(module), debug=True)
    assert all(parameter.equal(before[name]) for name, parameter in module.named_parameters())
    ups, downs = (
        {parameter.untyped_storage().data_ptr() for parameter in each}
        for each in (
            (module.up, module.gate_proj.weight, module.up_proj.weight),
            (module.down, module.down_proj.weight),
        )
    )
    assert len(ups) == len(downs) == 1
    assert module.up.untyped_storage().nbytes() == 2 * (E + 1) * 2 * INNER * WIDTH


@pytest.mark.parametrize("form", ["", "float32 weights"])
@pytest.mark.parametrize("gated", [False, True])
def test_shared_expert_keeps_every_bit(gated: bool, form: str) -> None:
    module, report = Mixture(form, gated), Report(show=False)
    compiled = compile_graph(
        module, {"x": torch.zeros(5, WIDTH, dtype=torch.bfloat16)}, {"x": {0: "T"}}, report=report,
        config=TorchCompileConfig(enable_inductor=False, compile_cache=False), passes=(PASS, *default_passes()[1:]),
    )  # fmt: skip
    events = {event["name"]: event["matches"] for event in report.select("pass") if event["enabled"]}
    assert events["shared_expert"] == 1 and events["route"] == (2 if form else 3), "the selection, a cast, the column"
    for tokens in (1, 2, 7, 64):
        x = torch.randn(tokens, WIDTH).to(torch.bfloat16)
        assert compiled(call_op, x).equal(module(x))


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("wide", f"the shared expert has {2 * INNER} inner columns, the routed ones {INNER}"),
        ("biases", "the shared expert has biases"),
        ("gate of columns", f"gate has {WIDTH} columns, not one"),
        ("quantized", "weights of the experts are quantized"),
        ("computed", "computed, not a parameter"),
        ("gelu", "is not the routed experts' silu"),
        ("other input", "linear reads add"),
        ("all-reduced", "is rounded by an all-reduce of its own"),
        ("written input", "writes to it between them"),
        ("shared is read", "has further readers"),
        ("its view is read", "has further readers"),
    ],
)
def test_shared_expert_leaves_others_alone(form: str, why: str) -> None:
    graph = captured(Mixture(form))
    result = run_pass(PASS, graph, debug=True)
    assert result.matches == 0 and [why in miss.why for miss in result.near_misses] == [True], result.near_misses


def test_a_sum_without_a_shared_expert_is_no_near_miss() -> None:
    class Routed(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            return self.experts(x) + self.router(x).sum(-1, keepdim=True) * x

    result = run_pass(PASS, captured(Routed()), debug=True)
    assert result.matches == 0 and not result.near_misses


def test_two_mixtures_over_the_same_weights_share_one_stack() -> None:
    class Twice(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    graph = captured(Twice())
    assert run_pass(PASS, graph, debug=True).matches == 2
    stacks = {node.args[3] for node in graph.graph.nodes if node.target is EXPERTS.default}
    assert len(stacks) == 1


def test_the_gate_is_merged_with_the_router() -> None:
    graph = captured(Mixture())
    run_pass(PASS, graph)
    assert run_pass(MergeLinears(), graph, debug=True).matches == 1
    assert sum(node.target is F.linear for node in graph.graph.nodes) == 1


def test_it_runs_by_default_before_linears_are_merged() -> None:
    names = [setting.each.name for setting in PassManager().settings if setting.enabled]
    assert names.index("shared_expert") < names.index("merge_linears")
