"""Models of transformers: tracing repeated layers once gives the graph of a plain capture."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.compiler.canonical import canonical
from tests.parameters import few
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.partition.split import Piece, split
from torchweave.models.adapt import install_ops
from torchweave.models.decoder import DecoderStep
from torchweave.report import Report
from torchweave.verify import zoo

INPUTS = {
    "input_ids": torch.zeros(23, dtype=torch.int64),
    "positions": torch.arange(23),
    "logits_index": torch.tensor([4, 9, 22]),
}
DYNAMIC = {"input_ids": {0: "T"}, "positions": {0: "T"}, "logits_index": {0: "N"}}

# Architectures, how many layers of them, and how many of these are clones: one kind of layer (with three of it, the last one is
# a clone behind a clone; biases, learned positions); two and more kinds by turns or in blocks, with experts; norms behind and
# before; two ropes; dense layers before sparse ones; latent attention; sinks. Models whose layers repeat in one of these ways are
# left out.
CASES = {
    "llama": (3, 2),
    "qwen2-sliding": (4, 2),
    "gemma3": (8, 6),
    "gpt2": (3, 2),
    "cohere2": (5, 3),
    "gpt_oss": (4, 2),
    "deepseek_v3": (4, 2),
    "llama4": (6, 4),
}


def build(name: str, layers: int) -> DecoderStep:
    zoo_model = zoo.zoo_model(name)
    count = "n_layer" if "n_layer" in zoo_model.options else "num_hidden_layers"
    model = zoo.build(dataclasses.replace(zoo_model, options={**zoo_model.options, count: layers}))
    install_ops(model)
    return DecoderStep(model, [], zoo.VOCAB, 512)


@pytest.mark.parametrize("name", few(CASES, ("gemma3", "deepseek_v3")))
def test_the_stitched_graph_is_that_of_a_plain_capture(name: str) -> None:
    layers, cloned = CASES[name]
    module, report = build(name, layers), Report(show=False)
    once = capture(module, INPUTS, DYNAMIC, "backed_size_oblivious", report)
    plain = capture(module, INPUTS, DYNAMIC, "backed_size_oblivious", trace_once=False)
    (event,) = report.select("trace_once")
    assert event["cloned"] == cloned, event
    assert canonical(once) == canonical(plain)
    pieces = []
    for graph in (once, plain):
        graph.boundary_ops = frozenset({"torchweave::attention"})
        pieces.append([piece.digest for piece in split(graph) if isinstance(piece, Piece)])
    assert pieces[0] == pieces[1]
