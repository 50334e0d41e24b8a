"""Fusions on real decoders: number of matches, bitwise equality, and unchanged input of Inductor."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parameters import few
from torchweave.compiler import CompiledGraph, compile_graph
from torchweave.compiler.passes.manager import default_passes
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.models import load
from torchweave.report import Report
from torchweave.verify import zoo

DYNAMIC = {"input_ids": {0: "T"}, "positions": {0: "T"}, "logits_index": {0: "N"}}
BOUNDARY = {"torchweave::attention"}
ATEN = tuple(each.name for each in default_passes() if each.stage == "aten")


def step(tokens: int) -> dict[str, Tensor]:
    ids = torch.randint(3, zoo.VOCAB, (tokens,), generator=torch.Generator().manual_seed(tokens))
    return dict(zip(DYNAMIC, (ids, torch.arange(tokens), torch.tensor([0, tokens - 1])), strict=True))


def compiled_graph(module: Any, names: tuple[str, ...] = ATEN, inductor: bool = False) -> tuple[CompiledGraph, Report]:
    """Compile a module with the named passes."""
    report = Report(show=False)
    config = TorchCompileConfig(enable_inductor=inductor, compile_cache=False)
    passes = [each for each in default_passes() if each.name in names]
    return compile_graph(
        module, step(9), DYNAMIC, boundary_ops=BOUNDARY, config=config, report=report, passes=passes
    ), report


def fired(report: Report) -> dict[str, int]:
    """Matches of each fusion over the whole model; a shared piece counts once for each use."""
    counts: Counter[str] = Counter()
    for event in report.select("pass"):
        if event.get("stage") == "aten" and event["enabled"]:
            counts[event["name"]] += event["matches"] * event["shared_by"]
    return {name: count for name, count in counts.items() if count}


EXPECTED = {
    # Two norms a layer and one at the end; every residual add but none before the first norm.
    "llama": {"raise_rms_norm": 7, "add_rms_norm": 6, "gated_activation": 3, "rope": 3},
    "phi3": {"raise_rms_norm": 7, "add_rms_norm": 6, "gated_activation": 3, "rope": 3},
    "qwen3": {"raise_rms_norm": 13, "add_rms_norm": 6, "gated_activation": 3, "rope": 3, "qk_norm_rope": 3},
    # A norm behind attention and MLP as well: four a layer.
    "gemma2": {"raise_rms_norm": 13, "add_rms_norm": 6, "gated_activation": 3, "rope": 3},
    "gemma3": {"raise_rms_norm": 37, "add_rms_norm": 12, "gated_activation": 6, "rope": 6, "qk_norm_rope": 6},
    # Norms only behind attention and MLP; only the last norm reads a residual sum; q/k norms span all heads.
    "olmo2": {"raise_rms_norm": 13, "add_rms_norm": 1, "gated_activation": 3, "rope": 3},
    "cohere2": {"gated_activation": 4},
}


@pytest.mark.parametrize("name", few(EXPECTED, ("llama", "gemma3", "cohere2")))
def test_fusion_counts_and_bitwise_equality(name: str) -> None:
    """bfloat16 on a CPU, where every op is its reference: the same operations, so the same bits as in eager mode."""
    module = load(zoo.zoo_model(name).config().to_dict(), torch.bfloat16, load_format="dummy").module
    fused, report = compiled_graph(module)
    assert fired(report) == EXPECTED[name]
    for tokens in (1, 2, 7, 64):
        given = step(tokens).values()
        assert fused(call_op, *given).equal(module(*given))
    if name == "cohere2":  # a layer norm, which resembles an RMSNorm
        events = [event for event in report.select("pass") if event["name"] == "raise_rms_norm"]
        assert all("argument self of pow_1 is sub" in event["near_misses"][0] for event in events)


def kernels(built: CompiledGraph) -> list[int]:
    """Number of kernels of each distinct piece in Inductor's CPU code."""
    return [piece.code.count("async_compile.") for piece in built.built.values()]


def test_inductor_input_is_unchanged() -> None:
    config = zoo.zoo_model("llama").config().to_dict() | {"num_hidden_layers": 1}
    module = load(config, torch.float32, load_format="dummy").module
    fused, report = compiled_graph(module, ("merge_linears", *ATEN), inductor=True)
    assert fired(report) == {"raise_rms_norm": 3, "add_rms_norm": 2, "gated_activation": 1, "rope": 1, "expand": 5}
    plain, _ = compiled_graph(module, ("merge_linears",), inductor=True)
    assert kernels(fused) == kernels(plain) and min(kernels(plain)) > 0
    given = step(7).values()
    torch.testing.assert_close(fused(call_op, *given), plain(call_op, *given), rtol=1e-5, atol=1e-6)
