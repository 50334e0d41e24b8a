"""merge_int_linears: linears with integer weights over one tensor are merged; near-misses stay separate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ops.int_cases import IntCase, fp4_operands, operands
from torchweave.compiler import compile_graph
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.passes.base import PassResult
from torchweave.compiler.passes.manager import default_passes
from torchweave.compiler.passes.torch_ir.merge_int_linears import MergeIntLinears
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig

SIZES = (1, 2, 7, 64)
WIDTH = 192
FX = TorchCompileConfig(enable_inductor=False)


class One(nn.Module):
    """A linear in the form of `models.weights.int_linear`; `order`: seed of its order of inputs."""

    def __init__(self, rows: int, case: IntCase | None = None, order: int | None = None) -> None:
        super().__init__()
        made = operands(case or IntCase(4, 64), 1, rows, WIDTH, seed=rows)
        w, scale, zero, _ = made.weight
        self.weight = nn.Parameter(w, requires_grad=False)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero)
        generator = torch.Generator().manual_seed(order or 0)
        self.register_buffer("order", None if order is None else torch.randperm(WIDTH, generator=generator).int())
        self.bias = None if made.bias is None else nn.Parameter(made.bias, requires_grad=False)
        self.group = made.group
        self.register_buffer("row_scale", None)

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight, self.scale, self.zero, self.order)
        return torch.ops.torchweave.int_linear(x, *weight, self.bias, self.group, self.row_scale)


class Fp4(One):
    """A linear with e2m1 weights."""

    def __init__(self, rows: int, kind: str) -> None:
        super().__init__(rows)
        made = fp4_operands(kind, 1, rows, WIDTH, bias=True)
        self.scale, self.row_scale, self.group = made.scale, made.row_scale, made.group
        self.weight = nn.Parameter(made.w, requires_grad=False)
        self.bias = nn.Parameter(made.bias, requires_grad=False)


class W8A8(One):
    """A linear with weights and activations in 8 bits."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows, IntCase(8, 0, bias=True))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.torchweave.int8_linear(x, self.weight, self.scale, self.bias)


class Several(nn.Module):
    """Linears over x, optionally with a write between them."""

    def __init__(self, *linears: One, write: bool = False) -> None:
        super().__init__()
        self.linears, self.write = nn.ModuleList(linears), write

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x * 1.5
        results = []
        for linear in self.linears:
            results.append(linear(x))
            if self.write:
                x.add_(1.0)
        return tuple(results)


def run(module: nn.Module) -> tuple[Any, PassResult]:
    graph = capture(module, {"x": torch.randn(5, WIDTH)}, {"x": {0: "T"}}, "backed_size_oblivious")
    result = MergeIntLinears().run(graph)
    graph.graph.lint()
    return graph, result


def count(graph: Any) -> int:
    return sum(
        "int_linear" in str(node.target) or "int8_linear" in str(node.target)
        for node in graph.graph.nodes
        if node.op == "call_function"
    )


def check(module: nn.Module, expected: dict[int, Any]) -> None:
    compiled_graph = compile_graph(module, {"x": torch.randn(7, WIDTH)}, {"x": {0: "T"}}, config=FX)
    torch.manual_seed(1)
    for size in SIZES:
        for got, right in zip(compiled_graph(call_op, torch.randn(size, WIDTH)), expected[size], strict=True):
            torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


def outputs(module: nn.Module) -> dict[int, Any]:
    torch.manual_seed(1)
    return {size: module(torch.randn(size, WIDTH)) for size in SIZES}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Several(One(64), One(32), One(48)),
        lambda: Several(*(One(rows, IntCase(4, 32, zero=True, bias=True)) for rows in (64, 48))),
        lambda: Several(*(One(rows, IntCase(8, 0)) for rows in (64, 48))),
        lambda: Several(One(64, order=3), One(32, order=3)),
        lambda: Several(Fp4(64, "nvfp4"), Fp4(32, "nvfp4")),
        lambda: Several(Fp4(64, "mxfp4"), Fp4(32, "mxfp4")),
        lambda: Several(W8A8(64), W8A8(32)),
    ],
    ids=["three", "zero points and bias", "int8", "order", "nvfp4", "mxfp4", "w8a8"],
)
def test_it_fires_and_every_number_stays(make: Any) -> None:
    module = make()
    expected = outputs(module)
    nbytes = sum(parameter.untyped_storage().nbytes() for parameter in module.parameters())
    graph, result = run(module)
    assert count(graph) == 1 and result.matches == 1 and not result.near_misses
    assert MergeIntLinears().run(graph).matches == 0, "its own result must not match again"
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
    assert sum(storages.values()) == nbytes, "the module's parameters are views of the stacked weight"
    check(module, expected)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Several(One(64), One(32), write=True), "writes to it between them"),
        (lambda: Several(One(64), One(32, IntCase(8, 64))), "differs in bits"),
        (lambda: Several(One(64), One(32, IntCase(4, 64, zero=True))), "zero points"),
        (lambda: Several(One(64, order=3), One(32, order=4)), "order of inputs"),
        (lambda: Several(One(64), One(32, IntCase(4, 32))), "groups"),
        (lambda: Several(Fp4(64, "nvfp4"), Fp4(32, "mxfp4")), "differs in bits"),
    ],
    ids=["write", "bits", "zero points", "orders", "groups", "formats"],
)
def test_near_misses_are_left_alone(make: Any, why: str) -> None:
    module = make()
    expected = outputs(module)
    graph, result = run(module)
    assert count(graph) == 2 and any(why in miss.why for miss in result.near_misses), result.near_misses
    check(module, expected)


def test_it_is_a_default_pass() -> None:
    assert "merge_int_linears" in [each.name for each in default_passes()]
