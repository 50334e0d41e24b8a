"""merge_fp8_linears: quantizations and linears over one tensor are merged; near-misses stay separate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweave.compiler import compile_graph
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.passes.base import PassResult
from torchweave.compiler.passes.manager import default_passes
from torchweave.compiler.passes.torch_ir.merge_fp8_linears import MergeFp8Linears
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.ops.quant.fp8 import FP8, GROUP
from torchweave.ops.quant.fp8_linear import block_scales, fp8_linear

SIZES = (1, 2, 7, 64)
FX = TorchCompileConfig(enable_inductor=False)


class One(nn.Module):
    """A linear in the form of `models.quantize`."""

    def __init__(self, rows: int, kind: str = "row", bias: bool = False, given: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 192).to(FP8), requires_grad=False)
        scale = torch.rand(-(-rows // GROUP), 2) if kind == "block" else torch.rand(rows)
        self.register_buffer("scale", block_scales(scale) if kind == "block" else scale)
        self.bias = nn.Parameter(torch.randn(rows), requires_grad=False) if bias else None
        self.register_buffer("given", None if given is None else torch.tensor([given]))
        self.group = GROUP if kind == "block" else 0

    def forward(self, x: Tensor) -> Tensor:
        q, s = torch.ops.torchweave.fp8_quant(x, self.group, self.given)
        return torch.ops.torchweave.fp8_linear(q, s, self.weight, self.scale, self.bias, x.dtype)


class Several(nn.Module):
    """Linears over x, optionally with a write or a boundary op between them."""

    def __init__(self, *linears: One, between: str = "") -> None:
        super().__init__()
        self.linears, self.between = nn.ModuleList(linears), between

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x * 1.5
        results = []
        for linear in self.linears:
            results.append(linear(x))
            if self.between == "write":
                x.add_(1.0)
        return tuple(results)


def run(module: nn.Module) -> tuple[Any, PassResult]:
    graph = capture(module, {"x": torch.randn(5, 192)}, {"x": {0: "T"}}, "backed_size_oblivious")
    result = MergeFp8Linears().run(graph)
    graph.graph.lint()
    return graph, result


def count(graph: Any, op: str) -> int:
    return sum(op in str(node.target) for node in graph.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Several(One(64), One(32), One(32)),
        lambda: Several(One(64, bias=True), One(48, bias=True)),
        lambda: Several(One(128, "block"), One(256, "block")),
        lambda: Several(One(64, given=0.02), One(32, given=0.02)),
    ],
    ids=["three", "bias", "blocks", "static"],
)  # fmt: skip
def test_merge_fires_and_is_bitwise_equal(make: Any) -> None:
    torch.manual_seed(0)
    module = make()
    inputs = {size: torch.randn(size, 192) for size in SIZES}
    want = {size: module(x) for size, x in inputs.items()}
    nbytes = sum(parameter.untyped_storage().nbytes() for parameter in module.parameters())
    graph, result = run(module)
    assert (count(graph, "fp8_quant"), count(graph, "fp8_linear")) == (1, 1)
    assert result.matches == 2 and not result.near_misses
    assert MergeFp8Linears().run(graph).matches == 0, "its own result must not match again"
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
    assert sum(storages.values()) == nbytes, "the module's parameters are views of the stacked weight"
    compiled_graph = compile_graph(module, {"x": inputs[7]}, {"x": {0: "T"}}, config=FX)
    for size, x in inputs.items():
        for got, right, again in zip(compiled_graph(call_op, x), want[size], module(x), strict=True):
            torch.testing.assert_close(got, right, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(again, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "left", "why"),
    [
        (lambda: Several(One(64), One(32), between="write"), (2, 2), "writes to it between them"),
        (lambda: Several(One(64, given=0.02), One(32, given=0.03)), (2, 2), "another given scale"),
        (lambda: Several(One(64), One(128, "block")), (2, 2), "by groups of 128, not 0"),
        (lambda: Several(One(144, "block"), One(128, "block")), (1, 2), "144 rows are not whole blocks"),
        (lambda: Several(One(64, bias=True), One(32)), (1, 2), ""),
    ],
    ids=["write", "scales", "schemes", "ragged blocks", "bias"],
)
def test_near_misses_are_left_alone(make: Any, left: tuple[int, int], why: str) -> None:
    torch.manual_seed(0)
    module, x = make(), torch.randn(7, 192)
    want = module(x)
    graph, result = run(module)
    assert (count(graph, "fp8_quant"), count(graph, "fp8_linear")) == left
    assert not why or any(why in miss.why for miss in result.near_misses), result.near_misses
    compiled_graph = compile_graph(module, {"x": x}, {"x": {0: "T"}}, config=FX)
    for got, right in zip(compiled_graph(call_op, x), want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-6, atol=1e-6)


def test_merge_precedes_linear_passes_and_passes_opcheck() -> None:
    names = [each.name for each in default_passes()]
    assert "merge_fp8_linears" in names
    q = torch.randn(7, 192).to(FP8)
    torch.library.opcheck(
        fp8_linear,
        (q, torch.rand(7, 1), torch.randn(96, 192).to(FP8), torch.rand(96), None, torch.float32),
        test_utils=("test_faketensor", "test_aot_dispatch_dynamic"),
    )
