"""Which kernels a collective of a piece will run by: seen from calls on operands of many sizes, of which nothing is launched.

What makes the operand of a collective is left out: a product's kernels are found by its choices (`torchweave.compile.ahead`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from torchweave.compile.ranks import group_of, schema_of
from torchweave.compile.split import Piece, normalize
from torchweave.compile.symbols import value
from torchweave.distributed.alone import alone
from torchweave.ops.userbuffers import made_shape

_TOKENS = tuple(1 << power for power in range(13))
"""Up to 4096: kernels change with the size of their operand, at sizes further apart than these."""
_MOST_BYTES = 64 << 20  # of an operand


@dataclass(frozen=True)
class Operand:
    """A tensor of a call; sizes may depend on the token count."""

    sizes: tuple[Any, ...]
    dtype: torch.dtype

    def shape(self, tokens: int) -> tuple[int, ...]:
        return tuple(int(size.xreplace(dict.fromkeys(size.free_symbols, tokens))) for size in self.sizes)

    def bytes(self, tokens: int) -> int:
        return int(sympy.prod(self.shape(tokens))) * self.dtype.itemsize


@dataclass(frozen=True)
class Meeting:
    """A collective of a piece: what it depends on."""

    op: torch._ops.OpOverload
    group: str
    arguments: tuple[Any, ...]

    def launch(self, device: torch.device) -> None:
        """Call it on operands of each number of tokens, whose values are not read; launches must not be carried out."""
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), alone(self.group) as has_kernels:
            for tokens in _TOKENS if has_kernels else ():
                if max(each.bytes(tokens) for each in self._operands()) > _MOST_BYTES:
                    return
                self.op(*(_made(each, tokens, device) for each in self.arguments))

    def _operands(self) -> Iterator[Operand]:
        for each in self.arguments:
            yield from (part for part in (each if isinstance(each, tuple) else (each,)) if isinstance(part, Operand))


def meetings_of(piece: Piece) -> Iterator[Meeting]:
    """The collectives of a piece, as far as they differ."""
    found: dict[Meeting, None] = {}
    for node in piece.module.graph.nodes:
        group = group_of(node)
        if group is not None and (meeting := _meeting(node, group)) is not None:
            found[meeting] = None
    yield from found


class _NotPlain(Exception):
    """An argument that is computed, and no tensor."""


def _meeting(node: fx.Node, group: str) -> Meeting | None:
    """What a call depends on; None for an op that is not the project's, or that takes sizes."""
    op: Any = node.target
    if isinstance(op, torch._ops.OpOverloadPacket):
        op = getattr(op, op.overloads()[0])
    args, keywords = normalize(op, tuple(node.args), dict(node.kwargs))
    if keywords or schema_of(node).name.partition("::")[0] != "torchweave":
        return None
    names = [argument.name for argument in op._schema.arguments]
    try:
        plain = [_plain(each) for each in args]
    except _NotPlain:
        return None
    if "producer" in names:
        known = dict(zip(names, args, strict=True))
        shape = made_shape(str(known["producer"]), [value(each) for each in known["operands"]])
        operand = Operand(_sizes(shape), known["dtype"])
        copied = {"producer": "copy", "operands": (operand,), "choices": "", "slot": 0}
        plain = [copied.get(name, each) for name, each in zip(names, plain, strict=True)]
    return Meeting(op, group, tuple(plain))


def _plain(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        known = value(argument)
        if not isinstance(known, Tensor):
            raise _NotPlain
        return Operand(_sizes(known.shape), known.dtype)
    return tuple(map(_plain, argument)) if isinstance(argument, (tuple, list)) else argument


def _sizes(shape: Any) -> tuple[Any, ...]:
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in shape)


def _made(argument: Any, tokens: int, device: torch.device) -> Any:
    if isinstance(argument, Operand):
        return torch.empty(argument.shape(tokens), dtype=argument.dtype, device=device)
    return [_made(each, tokens, device) for each in argument] if isinstance(argument, tuple) else argument
