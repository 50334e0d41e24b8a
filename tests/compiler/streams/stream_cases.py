"""Pieces for tests of streams: a mixture of experts with a shared one, and random graphs of views and writes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torchweave.ops.moe.experts  # noqa: F401  (defines torchweave::experts)
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.partition.split import Piece, digest, split

TOKENS, WIDTH = 4, 8


class SharedExperts(nn.Module):
    """Between two attentions of a mixture of experts: out projection, norm, router and experts beside a shared expert, q/k/v.

    12 experts: a router of 8 or 16 rows would be merged with the shared expert's linear, and the experts wait for both.
    """

    def __init__(self, hidden: int = 32, experts: int = 12, width: int = 16, shared: int = 64, top_k: int = 2) -> None:
        super().__init__()
        linear = lambda rows, columns: nn.Linear(columns, rows, bias=False)  # noqa: E731
        self.top_k, self.hidden = top_k, hidden
        self.o, self.qkv = linear(hidden, hidden), linear(3 * hidden, hidden)
        self.router, self.weigh = linear(experts, hidden), linear(1, hidden)
        self.gate_up, self.down = linear(2 * shared, hidden), linear(hidden, shared)
        self.up_experts = nn.Parameter(torch.randn(experts, 2 * width, hidden) * hidden**-0.5)
        self.down_experts = nn.Parameter(torch.randn(experts, hidden, width) * width**-0.5)
        self.norm_1, self.norm_2 = (nn.Parameter(torch.rand(hidden) + 0.5) for _ in range(2))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        y = x.float()
        return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def forward(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        residual = residual + self.o(attended)
        x = self.norm(residual, self.norm_1)
        weight, index = torch.topk(F.softmax(self.router(x), -1, dtype=torch.float), self.top_k, -1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
        routed = torch.ops.torchweave.experts(x, index, weight, self.up_experts, self.down_experts, None, None, "silu")
        gate, up = self.gate_up(x).chunk(2, -1)
        shared = F.sigmoid(self.weigh(x)) * self.down(F.silu(gate) * up)
        residual = residual + routed + shared
        q, k, v = self.qkv(self.norm(residual, self.norm_2)).split(self.hidden, -1)
        return q, k, v, residual


def shared_experts(**options: int) -> SharedExperts:
    torch.manual_seed(0)
    return SharedExperts(**options).eval().requires_grad_(False)


def example(tokens: int = 5, hidden: int = 32, seed: int = 1) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tokens, hidden, generator=draw) for name in ("attended", "residual")}


DYNAMIC = {"attended": {0: "T"}, "residual": {0: "T"}}


def captured_piece(module: nn.Module, inputs: dict[str, Tensor] | None = None) -> tuple[CapturedGraph, Piece]:
    graph = capture(module, inputs or example(), DYNAMIC, "backed_size_oblivious")
    (piece,) = split(graph)
    assert isinstance(piece, Piece)
    return graph, piece


@torch.library.custom_op("toy::accumulate", mutates_args=("out",))
def accumulate(x: Tensor, out: Tensor) -> None:
    """out += 2 x, an op that Inductor does not know."""
    out.add_(x, alpha=2)


@accumulate.register_fake
def _(x: Tensor, out: Tensor) -> None: ...


# What random graphs are made of. Operands are [TOKENS, WIDTH]; a result of that shape can be an operand of later operations.


def _half(graph: fx.Graph, x: fx.Node, which: int) -> fx.Node:
    halves = graph.call_function(torch.split, (x, WIDTH // 2), {"dim": -1})
    return graph.call_function(operator.getitem, (halves, which))


def _square(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
    between = graph.call_function(torch.matmul, (graph.call_method("t", (x,)), y))
    return graph.call_function(torch.matmul, (x, between))


def _write_half(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
    return graph.call_method("copy_", (_half(graph, x, 0), _half(graph, y, 1)))


def _filled(graph: fx.Graph, x: fx.Node) -> fx.Node:
    made = graph.call_function(torch.empty_like, (x,))
    graph.call_method("copy_", (made, x))
    return made


def _largest(graph: fx.Graph, x: fx.Node) -> fx.Node:
    both = graph.call_function(torch.sort, (x,))
    return graph.call_function(operator.getitem, (both, 0))


def _set(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(operator.setitem, (x, (slice(None), slice(0, 3)), 0.25))


def _call(target: Callable[..., Any], *constants: Any) -> Callable[..., fx.Node]:
    return lambda graph, *nodes: graph.call_function(target, (*nodes, *constants))


def _method(name: str, *constants: Any) -> Callable[..., fx.Node]:
    return lambda graph, *nodes: graph.call_method(name, (*nodes, *constants))


OPERATIONS: tuple[tuple[int, Callable[..., fx.Node]], ...] = (
    (2, _call(torch.add)),
    (2, _square),
    (1, _call(torch.tanh)),
    (1, _filled),
    (1, _largest),
    (1, _method("view", TOKENS, WIDTH)),
    (1, _method("flip", 0)),
    (2, _method("add_")),
    (1, _method("mul_", 0.5)),
    (2, _write_half),
    (2, _call(accumulate._opoverload)),
    (1, _set),
    (1, _method("clone")),
)


def random_piece(picks: list[tuple[int, int, int]], returned: list[int], num_inputs: int = 2) -> Piece:
    """A piece of one operation per pick: (which operation, which operands). It returns some of the tensors that it made."""
    graph = fx.Graph()
    pool = [graph.placeholder(f"input_{index}") for index in range(num_inputs)]
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        for node in pool:
            node.meta["example_value"] = torch.empty(TOKENS, WIDTH)
    for which, *operands in picks:
        count, operation = OPERATIONS[which % len(OPERATIONS)]
        made = operation(graph, *(pool[pick % len(pool)] for pick in operands[:count]))
        _fake(graph, mode)
        if isinstance(fake := made.meta["example_value"], Tensor) and fake.shape == (TOKENS, WIDTH):
            pool.append(made)
    made = [node for node in pool if node.op != "placeholder"] or [graph.call_function(torch.relu, (pool[0],))]
    graph.output(tuple(dict.fromkeys(made[pick % len(made)] for pick in returned)))
    _fake(graph, mode)
    module = fx.GraphModule(nn.Module(), graph, "Piece")
    inputs = tuple(node for node in graph.nodes if node.op == "placeholder")
    return Piece(0, module, inputs, (), tuple(made), digest(module, num_inputs))


def _fake(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Fake values of the nodes that have none yet."""
    look = lambda node: node.meta["example_value"]  # noqa: E731
    with mode:
        for node in graph.nodes:
            if node.op in ("placeholder", "output") or "example_value" in node.meta:
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), look)
            call = node.target if callable(node.target) else getattr(torch.Tensor, node.target)
            node.meta["example_value"] = call(*args, **kwargs)
