"""Mutated arguments in Torch IR, for every way in which torch declares an in-place write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweave.compiler import InvariantError, compile_graph
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.ir.mutation import mutated_args
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig

FX = TorchCompileConfig(enable_inductor=False)


class Of(nn.Module):
    """A module with `function(self, x)` as forward and submodules that write in place."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        linear = lambda: nn.Linear(8, 8, bias=False)  # noqa: E731
        self.one, self.other, self.elu = linear(), linear(), nn.ELU(inplace=True)
        self.register_buffer("seen", torch.rand(8))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def module_between(self: Any, x: Tensor) -> Any:
    x = x * 2
    one = self.one(x)
    self.elu(x)
    return one, self.other(x)


WRITES: list[Callable[[Any, Tensor], Any]] = [
    lambda self, y: y.add_(1),
    lambda self, y: y.__imul__(2),
    lambda self, y: self.elu(y),
    lambda self, y: F.relu(y, True),
    lambda self, y: F.leaky_relu(y, 0.1, inplace=True),
    lambda self, y: F.dropout(y, 0.5, False, True),
    lambda self, y: torch.mul(y, 3, out=y),
    lambda self, y: torch._foreach_add_([y], 1.0),  # pyright: ignore[reportPrivateImportUsage]
    lambda self, y: F.embedding(torch.arange(2), y, max_norm=0.1),
]


@pytest.mark.parametrize("write", WRITES)
def test_every_spelling_of_an_in_place_write_is_detected(write: Callable[[Any, Tensor], Any]) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = x + 1
        write(self, y)
        return y * 2

    graph = capture(Of(forward).eval(), {"x": torch.randn(5, 8)}, {"x": {0: "T"}}, "backed_size_oblivious")
    targets = [target for node in graph.graph.nodes for target in mutated_args(node)]
    assert targets == [next(node for node in graph.graph.nodes if node.op == "call_function" and node.args[1:] == (1,))]


def test_a_shift_in_place_is_a_write() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = x.to(torch.int64)
        y <<= 2
        y >>= 1
        return y

    graph = capture(Of(forward), {"x": torch.randn(5, 8)}, {"x": {0: "T"}}, "backed_size_oblivious")
    assert sum(len(mutated_args(node)) for node in graph.graph.nodes) == 2


@pytest.mark.parametrize(
    "read",
    [
        lambda self, y: F.elu(y, 1.0, False),
        lambda self, y: F.embedding(torch.arange(2), y),
        lambda self, y: F.batch_norm(y, self.seen, self.seen.abs(), None, None, False),
    ],
)
def test_reads_are_not_reported_as_writes(read: Callable[[Any, Tensor], Any]) -> None:
    graph = capture(
        Of(lambda self, x: read(self, x + 1)), {"x": torch.randn(5, 8)}, {"x": {0: "T"}}, "backed_size_oblivious"
    )
    assert not any(mutated_args(node) for node in graph.graph.nodes)


def test_linears_are_not_merged_over_a_module_that_writes_in_place() -> None:
    module, x = Of(module_between).eval(), torch.randn(6, 8)
    compiled_graph = compile_graph(module, {"x": torch.randn(5, 8)}, {"x": {0: "T"}}, config=FX)
    torch.testing.assert_close(compiled_graph(call_op, x), module(x))


@pytest.mark.parametrize(
    "write",
    [
        lambda self, x: F.elu(self.seen, 1.0, True),
        lambda self, x: F.batch_norm(x, self.seen, self.seen + 1, training=True),
        lambda self, x: F.embedding(x.long(), self.one.weight, max_norm=1.0),
    ],
)
def test_mutation_of_module_tensors_is_rejected(write: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(InvariantError, match=r"forward writes to .*(seen|weight)"):
        compile_graph(Of(lambda self, x: write(self, x)), {"x": torch.ones(5, 8)}, {"x": {0: "T"}}, config=FX)
