"""A package that adds one of each kind to Torchweave by entry points; test_package.py serves with it."""

from __future__ import annotations

import numpy as np
import torch

from torchweave import DeviceLogitsProcessor, HostLogitsProcessor
from torchweave.compiler import GraphPass, PassResult
from torchweave.models.weights.formats import QuantizationFormat
from torchweave.models.weights.int_linear import IntQuantizer, IntScheme
from torchweave.ops.attention.backends.torch_native import TorchBackend
from torchweave.serving.openai.reasoning import ReasoningFormat
from torchweave.serving.openai.tools.family import Family
from torchweave.serving.openai.tools.grammar import Grammar, JsonCall

used: list[str] = []
"""What ran in this process."""


class AcmeAttention(TorchBackend):
    name = "acme"

    def __init__(self, device):
        super().__init__()

    @staticmethod
    def unavailable_reason(device):
        return None if device.type == "cpu" else "it runs only on a CPU"

    @staticmethod
    def unsupported_reason(spec, dtype):
        return "it has no sliding window" if spec.window else None

    def begin(self, meta):
        used.append("attention")
        return super().begin(meta)


class AcmeScheme:
    """8-bit integers with a scale for each output."""

    name = "acme"

    def quantizer(self, model):
        used.append("quantization")
        return IntQuantizer(model, IntScheme(8, 0))


ACME = QuantizationFormat(scheme=AcmeScheme())


class CountNodes(GraphPass):
    name, numerics = "acme_count", "exact"

    def run(self, graph):
        return PassResult(matches=len(list(graph.graph.nodes)))


def note_mlp(module):
    used.append(f"hook of {type(module).__name__}")


CALLS = Family(
    name="acme",
    models="Acme",
    source="this test",
    grammar=Grammar((JsonCall(),), opening=("<acme>",), closing=("</acme>",)),
)
REASONING = ReasoningFormat(("<muse>",), ("</muse>",))


class Cycle(HostLogitsProcessor):
    """Allows the tokens of `cycle` one after the other."""

    def start(self, params, prompt):
        cycle = (params.extra_args or {}).get("cycle")
        if cycle is not None and not all(isinstance(token, int) for token in cycle):
            raise ValueError("cycle must be a list of token ids.")
        return cycle

    def bias(self, requests, outputs, out):
        for cycle, output, row in zip(requests, outputs, out, strict=True):
            allowed = cycle[len(output) % len(cycle)]
            row[np.arange(len(row)) != allowed] = -np.inf


class Forbid(DeviceLogitsProcessor):
    """Excludes the token `forbid` - 1."""

    @staticmethod
    def value(params):
        return float((params.extra_args or {}).get("forbid", 0))

    def apply(self, logits, values):
        index = torch.arange(1, logits.shape[1] + 1, device=logits.device)
        return logits.masked_fill(index == values, -torch.inf)
