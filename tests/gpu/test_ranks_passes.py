"""Collective fusions and user buffers on two GPUs through Inductor against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.compiler.passes.collectives.rank_blocks import Block, inputs, part, weights, whole
from tests.ranks import run_ranks
from torchweave.compiler import CompiledGraph, compile_graph
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.distributed.symmetric_memory import enable_symmetric_memory
from torchweave.report import Report

pytestmark = pytest.mark.gpu
WIDTHS = 2048, 4096
TOKENS = 1, 3, 16, 64, 300, 3000
OFF = ("all_reduce_norm", "all_reduce_norm_fp8", "userbuffers_convert", "userbuffers_prologue")
FORMS = {
    "plain": TorchCompileConfig(compile_cache=False, disabled_passes=OFF),
    "fused": TorchCompileConfig(compile_cache=False, enable_userbuffers=False),
    "buffers": TorchCompileConfig(compile_cache=False),
}
MATCHES = {
    "plain": {},
    "fused": {"all_reduce_norm": 3},
    "buffers": {"all_reduce_norm": 3, "userbuffers_convert": 3, "userbuffers_prologue": 3},
}


def compiled_graph(module: Block, config: TorchCompileConfig) -> CompiledGraph:
    example = {"x": torch.zeros(23, module.parts[0].shape[1]), "residual": torch.zeros(23, WIDTHS[0])}
    example = {name: each.to("cuda", module.dtype) for name, each in example.items()}
    return compile_graph(
        module, example, {name: {0: "T"} for name in example}, config=config, report=Report(show=False)
    )


def matches(compiled_graph: CompiledGraph) -> dict[str, int]:
    """The most matches of each pass over ranks in one variant of the piece."""
    found: dict[str, int] = {}
    for event in compiled_graph.report.select("pass"):
        if event["enabled"] and event["matches"] and event["name"].startswith(("all_reduce", "userb")):
            found[event["name"]] = max(found.get(event["name"], 0), event["matches"])
    return {name: count for name, count in found.items() if not name.endswith("_fp8")}


def replayed(compiled_graph: CompiledGraph, x: Tensor, residual: Tensor) -> list[tuple[Tensor, ...]]:
    """Results of three replays of a recorded call, on other values each time."""
    given = x.clone(), residual.clone()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # a rank's collectives follow each other
    with torch.cuda.stream(stream):
        compiled_graph(call_op, *given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = compiled_graph(call_op, *given)
    found = []
    for sign in (1, -1, 1):
        given[0].copy_(sign * x)
        graph.replay()
        found.append(tuple(each.clone() for each in results))
    return found


def on_two_gpus(process_groups: ProcessGroups, quantized: bool) -> dict[str, float]:
    """By form and token count, how far the result is from float64, as a part of its largest number."""
    enable_symmetric_memory(process_groups, Report(show=False))
    module = Block(process_groups.tensor_rank, 2, torch.bfloat16, quantized, True, WIDTHS).to(process_groups.device)
    given = [each.to(process_groups.device) for each in weights(*WIDTHS)]
    found = {}
    for name, config in FORMS.items():
        each = compiled_graph(module, config)
        assert matches(each) == MATCHES[name], (name, matches(each))
        for tokens in TOKENS:
            x, residual = (one.to(process_groups.device) for one in inputs(tokens, *WIDTHS))
            own = part(x, process_groups.tensor_rank, 2, torch.bfloat16)
            called = each(call_op, own, residual.bfloat16())
            first, _, third = replayed(each, own, residual.bfloat16())
            assert all(map(torch.equal, first, called)) and all(map(torch.equal, first, third)), (name, tokens)
            wanted = whole(x, residual, given)
            errors = [(a.double() - b).abs().max() / b.abs().max() for a, b in zip(called, wanted, strict=True)]
            found[f"{name} T={tokens}"] = float(torch.stack(errors).max())
            found[f"{name} T={tokens} sum"] = float(called[0].double().sum())
    return found


@pytest.mark.parametrize("quantized", [False, True])
def test_every_form_is_near_float64_and_equal_on_both_ranks(quantized: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    one, other = run_ranks(on_two_gpus, 2, quantized, device="cuda")
    assert one == other, "every rank has the same bits"
    for case, error in one.items():
        assert case.endswith("sum") or error < (0.1 if quantized else 0.03), (case, error)
