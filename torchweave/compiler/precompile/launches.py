"""Which kernels an op of a piece will run by: seen from calls on operands of many sizes, of which nothing is launched.

These are the collectives, and the ops whose kernels depend on nothing but their operands: norms, activations and their like. Of a
collective, what makes its operand is left out: a product's kernels are found by its choices
(`torchweave.compiler.precompile.precompile`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from torchweave.compiler.ir.collectives import collective_group, op_schema
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import Piece, normalize_call
from torchweave.distributed.fake_collectives import fake_collectives
from torchweave.ops.collectives.user_buffers import operand_shape
from torchweave.ops.registry import cuda_kernel

_TOKENS = tuple(1 << power for power in range(13))
"""Up to 4096: kernels change with the size of their operand, at sizes further apart than these."""
_MAX_OPERAND_BYTES = 64 << 20  # of an operand
_PRODUCTS = frozenset(f"torchweave::{name}" for name in ("linear", "fused_linear", "fp4_linear", "fp8_linear"))
"""What they launch is chosen when they run, and is not only the project's."""


@dataclass(frozen=True)
class Operand:
    """A tensor of a call; sizes and strides may depend on the token count. Without strides it is contiguous."""

    sizes: tuple[Any, ...]
    dtype: torch.dtype
    strides: tuple[Any, ...] | None = None

    def shape(self, tokens: int) -> tuple[int, ...]:
        return _numbers(self.sizes, tokens)

    def bytes(self, tokens: int) -> int:
        return int(sympy.prod(self.shape(tokens))) * self.dtype.itemsize

    def make(self, tokens: int, device: torch.device) -> Tensor:
        if self.strides is None:
            return torch.empty(self.shape(tokens), dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape(tokens), _numbers(self.strides, tokens), dtype=self.dtype, device=device)


@dataclass(frozen=True)
class OpCall:
    """A call of an op in a piece: what its kernels depend on.

    Attributes:
        group: the ranks that it meets; None where it is no collective.
        arguments: by the op's schema, tensors as `Operand`.
    """

    op: torch._ops.OpOverload
    group: str | None
    arguments: tuple[Any, ...]

    def launch(self, device: torch.device) -> None:
        """Call it on operands of each number of tokens, whose values are not read; launches must not be carried out."""
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if self.group is None:
                self._launch_all(cuda_kernel(self.op._schema.name) or self.op, device)
                return
            with fake_collectives(self.group) as has_kernels:
                if has_kernels:
                    self._launch_all(self.op, device)

    def _launch_all(self, function: Callable[..., Any], device: torch.device) -> None:
        for tokens in _TOKENS:
            if max(each.bytes(tokens) for each in self._operands()) > _MAX_OPERAND_BYTES:
                return
            function(*(_materialize(each, tokens, device) for each in self.arguments))

    def _operands(self) -> Iterator[Operand]:
        for each in self.arguments:
            yield from (part for part in (each if isinstance(each, tuple) else (each,)) if isinstance(part, Operand))


def op_calls(piece: Piece) -> Iterator[OpCall]:
    """The calls of a piece that have kernels to be seen, as far as they differ."""
    found: dict[OpCall, None] = {}
    for node in piece.module.graph.nodes:
        group = collective_group(node)
        if (group is not None or _has_kernels(node)) and (call := _op_call(node, group)) is not None:
            found[call] = None
    yield from found


def _has_kernels(node: fx.Node) -> bool:
    schema = op_schema(node)
    return schema is not None and schema.name not in _PRODUCTS and cuda_kernel(schema.name) is not None


class _ComputedArgument(Exception):
    """An argument that is computed, and no tensor."""


def _op_call(node: fx.Node, group: str | None) -> OpCall | None:
    """What a call depends on; None for an op that is not the project's, or that takes sizes."""
    op: Any = node.target
    if isinstance(op, torch._ops.OpOverloadPacket):
        op = getattr(op, op.overloads()[0])
    args, keywords = normalize_call(op, tuple(node.args), dict(node.kwargs))
    if keywords or op_schema(node).name.partition("::")[0] != "torchweave":
        return None
    names = [argument.name for argument in op._schema.arguments]
    try:
        plain = [_plain(each) for each in args]
    except _ComputedArgument:
        return None
    if "producer" in names:
        known = dict(zip(names, args, strict=True))
        shape = operand_shape(str(known["producer"]), [value(each) for each in known["operands"]])
        operand = Operand(_sizes(shape), known["dtype"])
        copied = {"producer": "copy", "operands": (operand,), "choices": "", "slot": 0}
        plain = [copied.get(name, each) for name, each in zip(names, plain, strict=True)]
    return OpCall(op, group, tuple(plain))


def _plain(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        known = value(argument)
        if not isinstance(known, Tensor):
            raise _ComputedArgument
        return Operand(_sizes(known.shape), known.dtype, _sizes(known.stride()))
    return tuple(map(_plain, argument)) if isinstance(argument, (tuple, list)) else argument


def _numbers(sizes: tuple[Any, ...], tokens: int) -> tuple[int, ...]:
    return tuple(int(size.xreplace(dict.fromkeys(size.free_symbols, tokens))) for size in sizes)


def _sizes(shape: Any) -> tuple[Any, ...]:
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in shape)


def _materialize(argument: Any, tokens: int, device: torch.device) -> Any:
    if isinstance(argument, Operand):
        return argument.make(tokens, device)
    return [_materialize(each, tokens, device) for each in argument] if isinstance(argument, tuple) else argument
