"""Cutting a captured graph to one stage of a pipeline."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import torchweave.ops.pipeline_marks  # noqa: F401  (defines the marks)
from torchweave.compiler.backend import compile_graph
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.errors import TraceError
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.partition.pipeline_stages import extract_pipeline_stage
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig

INPUTS = {"ids": torch.zeros(23, dtype=torch.int64), "positions": torch.arange(23)}
DYNAMIC = {"ids": {0: "T"}, "positions": {0: "T"}}
PLAIN = TorchCompileConfig(enable_inductor=False, compile_cache=False)
marks = torch.ops.torchweave


class Decoder(nn.Module):
    """An embedding, two layers that read an angle, and an output layer; `begin` and `end` put marks around layer 1 or behind 0."""

    def __init__(self, begin: bool = False, end: bool = False, skip: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.begin, self.end, self.skip = begin, end, skip

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None].float().sin()
        first = marks.elsewhere(ids, 4, torch.float32) if self.begin else self.embedding(ids)
        x = first if self.begin else self._layer(0, first, angles)
        x = marks.stage_input(x) if self.begin else x
        x = marks.stage_output(x) if self.end else self._layer(1, x, angles)
        return self.head(x + first if self.skip else x)

    def _layer(self, number: int, x: Tensor, angles: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.copy_(self.layers[number](x))  # into a tensor that was made before, as attention does
        return out + angles


def captured(**options: bool) -> CapturedGraph:
    return capture(Decoder(**options).eval(), INPUTS, DYNAMIC, "backed_size_oblivious")


def sources(graph: CapturedGraph) -> set[str]:
    return {re.findall(r"_modules\['(\w+)'\]", constant.source)[0] for _, constant in graph.constants()}


def test_two_pipeline_stages_compute_what_one_graph_does() -> None:
    ids, positions = torch.tensor([3, 1, 5, 0, 6]), torch.tensor([0, 1, 0, 1, 2])
    whole = Decoder().eval()
    first, last = Decoder(end=True).eval(), Decoder(begin=True).eval()
    compiled_graph = [compile_graph(each, INPUTS, DYNAMIC, config=PLAIN) for each in (first, last)]
    assert [each.inputs for each in compiled_graph] == [("ids", "positions"), ("ids", "positions", "stage_input")]
    hidden = compiled_graph[0](call_op, ids, positions)
    assert torch.equal(compiled_graph[1](call_op, ids, positions, hidden), whole(ids, positions))
    with pytest.raises(ValueError, match="stage_input"):
        compiled_graph[1](call_op, ids, positions, hidden[:3])


def test_a_pipeline_stage_keeps_only_what_it_needs() -> None:
    first, last = captured(end=True), captured(begin=True)
    extract_pipeline_stage(first)
    extract_pipeline_stage(last)
    assert sources(first) == {"embedding", "layers"} and len(list(first.constants())) == 3
    assert sources(last) == {"layers", "head"} and len(list(last.constants())) == 4
    for graph in (first, last):
        assert "sin" in str(graph.graph), "angles are computed on both"
        assert "torchweave" not in str(graph.graph), "no mark is left"


def test_a_graph_without_pipeline_marks_stays() -> None:
    graph = captured()
    before = str(graph.graph)
    extract_pipeline_stage(graph)
    assert str(graph.graph) == before


def test_value_that_skips_a_pipeline_stage_is_rejected() -> None:
    graph = captured(begin=True, skip=True)
    with pytest.raises(TraceError, match="more than hidden states"):
        extract_pipeline_stage(graph)
