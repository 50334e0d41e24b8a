"""Compile random modules and compare them with eager: `python -m tests.compiler.fuzz --count 1000 --seed 0`.

A program is a list of statements over numbered tensors, each a line of Python; it is kept only where eager runs it for every size.
It is compiled once by `torchweave.compile` with a dynamic first dimension, and called with several sizes. Outcomes: `right`;
`refused`, a ValueError of one sentence; `wrong`, another number, shape, dtype or container, another value left in an input, or
outputs that alias each other or an input where eager's do not; `crashed`, any other exception. The last two are findings: a program
is shrunk to the statements that it needs and printed.
"""

from __future__ import annotations

import argparse
import collections
import linecache
import random
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import torchweave
from tests.compiler import fuzz_statements as statements_of
from torchweave.config.options import TorchCompileConfig

WIDTH = 8
DYNAMIC = {"x": {0: "T"}, "y": {0: "T"}, "i": {0: "T"}, "z": {0: "S"}, "u": {0: "T"}}
FX = TorchCompileConfig(enable_inductor=False, compile_cache=False)
INDUCTOR = TorchCompileConfig(compile_cache=False)


class Base(nn.Module):
    """What the programs use: linears, a norm, a convolution, a table and buffers."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(8):
            setattr(self, f"linear_{index}", nn.Linear(WIDTH, WIDTH, bias=index % 2 == 0))
        self.norm, self.group, self.batch = nn.LayerNorm(WIDTH), nn.GroupNorm(2, WIDTH), nn.BatchNorm1d(WIDTH)
        self.conv, self.conv_2d = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1)
        self.embedding, self.gru = nn.Embedding(6, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.table = nn.Parameter(torch.randn(6, WIDTH))
        self.register_buffer("steps", torch.arange(WIDTH) / WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("table_2", torch.randn(6, WIDTH))
        for name in statements_of.DTYPE_NAMES:
            self.register_buffer(f"one_{name}", torch.tensor(2.5).to(getattr(torch, name)))

    def scaled(self, x: Tensor, **kwargs: Any) -> Tensor:
        kwargs.setdefault("shift", 0.5)
        return x * kwargs["scale"] + kwargs["shift"]


@dataclass(frozen=True)
class Program:
    """Statements of a forward `(x [T, 8], y [T, 8], i [T], z [S, 8], w [], u [T, 3, 6, 6])`, and what it returns."""

    statements: tuple[str, ...]
    result: str
    seed: int
    device: str = "cpu"

    @property
    def code(self) -> str:
        lines = "".join(f"    {each}\n" for each in (*self.statements, f"return {self.result}"))
        return f"def forward(self, x, y, i, z, w, u):\n{lines}"

    @property
    def tolerance(self) -> float:
        """A number that differs in its last bit may be rounded to another one of the lowest dtype."""
        return 2e-2 if "bfloat16" in self.code else 4e-3 if ".half()" in self.code or "float16" in self.code else 1e-4

    def module(self) -> nn.Module:
        torch.manual_seed(self.seed)
        file = f"<program {self.seed}>"
        linecache.cache[file] = (len(self.code), None, self.code.splitlines(keepends=True), file)
        namespace: dict[str, Any] = {"torch": torch, "F": nn.functional}
        exec(compile(self.code, file, "exec"), namespace)
        module = type("Program", (Base,), {"forward": namespace["forward"]})().eval().requires_grad_(False)
        return module.to(self.device)

    def inputs(self, size: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(1000 * self.seed + size)
        x, y, z = (torch.randn(rows, WIDTH, generator=draw) for rows in (size, size, size + 2))
        i = torch.randperm(size, generator=draw)
        dtype = getattr(torch, statements_of.DTYPE_NAMES[self.seed % len(statements_of.DTYPE_NAMES)])
        w = (torch.randn((), generator=draw).abs() + 1).to(dtype)
        u = torch.randint(0, 256, (size, 3, 6, 6), generator=draw, dtype=torch.uint8)
        inputs = {"x": x, "y": y, "i": i, "z": z, "w": w, "u": u}
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}


def make(seed: int, device: str = "cpu") -> Program:
    """The program of a seed."""
    draw = random.Random(seed)
    floats, statements = ["x", "y"], ["m = x * 1" if draw.random() < 0.7 else "m = x"]
    for number in range(draw.randint(2, 9)):
        template = draw.choice(_kind(draw))
        fill = {"a": draw.choice(floats), "b": draw.choice(floats), "m": "m", "n": f"v{number}", "i": "i"}
        d, e = draw.choice(statements_of.DTYPE_NAMES), draw.choice(statements_of.DTYPE_NAMES)
        factor, dim = draw.choice(statements_of.SCORE_FACTORS), draw.choice((0, 1, 2, 3, -1, -1, -2))
        numbers = {"c": draw.randint(1, 3), "k": draw.randint(0, 7), "d": d, "e": e, "f": factor, "s": dim}
        statements.append(template.format(**fill, **numbers))
        floats += [f"v{number}"] if "{n}" in template else []
        if number == 2:
            floats.append("m")
    result = draw.choice(statements_of.RESULTS)
    result = result.format(a=draw.choice(floats[2:] or floats), b=draw.choice(floats), m="m")
    return Program(tuple(statements), result, seed, device)


def _kind(draw: random.Random) -> tuple[str, ...]:
    """Templates of one kind: half of the statements are of the kinds that are easily compiled wrong."""
    if draw.random() < 0.5:
        return draw.choice(statements_of.NEW_KINDS)
    return statements_of.IN_PLACE if draw.random() < 0.35 else statements_of.SAME_SHAPE


@torch.library.custom_op("fuzz::add_into", mutates_args=("out",))
def _add_into(out: Tensor, x: Tensor) -> None:
    out.mul_(0.5).add_(x)
    out.add_(x)


@torch.library.custom_op("fuzz::add_both", mutates_args=("one", "other"))
def _add_both(one: Tensor, other: Tensor) -> None:
    one.add_(1)
    other.add_(one)


@torch.library.custom_op("fuzz::doubled", mutates_args=())
def _doubled(x: Tensor) -> Tensor:
    return x * 2


@_doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def run(program: Program, config: TorchCompileConfig = FX) -> tuple[str, str]:
    """Outcome and cause: `invalid` where eager raises; else as in the module's text."""
    try:
        module = program.module()
        for call in CALLS:
            call(module, program)
    except Exception as error:  # a random program may be wrong in any way
        return "invalid", str(error)
    eager, module = program.module(), program.module()
    try:
        compiled = torchweave.compile(module, program.inputs(CALLS[0].size), DYNAMIC, config)
    except Exception as error:
        return _refusal(error)
    refused = ""
    for call in CALLS:
        other = call(eager, program)
        try:
            got = call(compiled, program)
        except Exception as error:
            outcome, why = _refusal(error)
            if outcome == "crashed" or not call.may_be_refused:
                return outcome, f"{call}: {why}"
            refused = why
            module.load_state_dict(eager.state_dict())
            continue
        if difference := _difference(got, other, program.tolerance, call.size == 1):
            return "wrong", f"{call}: {difference}"
        if difference := _buffer_difference(module, eager, program.tolerance):
            return "wrong", f"{call}: {difference}"
    return ("right, a call refused", refused) if refused else ("right", "")


def _buffer_difference(got: nn.Module, expected: nn.Module, tolerance: float) -> str:
    for (name, one), (_, other) in zip(got.named_buffers(), expected.named_buffers(), strict=True):
        if not torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"buffer {name} is another one"
    return ""


def _refusal(error: Exception) -> tuple[str, str]:
    is_sentence = isinstance(error, ValueError) and "\n" not in str(error)
    return "refused" if is_sentence else "crashed", f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Called:
    """What a call leaves: leaves and structure of its result, its inputs afterwards, and which of these share memory."""

    leaves: list[Any]
    structure: Any
    inputs: list[Tensor]
    aliases: list[int]


@dataclass(frozen=True)
class Call:
    """A call of a program with `size` rows.

    Attributes:
        named: inputs are given by name.
    """

    size: int
    named: bool = False

    @property
    def may_be_refused(self) -> bool:
        return self.size == 1

    def __call__(self, function: Any, program: Program) -> Called:
        inputs = program.inputs(self.size)
        torch.manual_seed(self.size)
        with torch.no_grad():
            result = function(**inputs) if self.named else function(*inputs.values())
        leaves, structure = pytree.tree_flatten(result)
        tensors = [each for each in (*inputs.values(), *leaves) if isinstance(each, Tensor)]
        addresses = [each.untyped_storage().data_ptr() for each in tensors]
        return Called(leaves, structure, list(inputs.values()), [addresses.index(each) for each in addresses])


CALLS = (Call(5), Call(1), Call(2, named=True), Call(17))
"""The first has the sizes of the example."""


def _difference(got: Called, expected: Called, tolerance: float, copies_are_right: bool) -> str:
    """The first difference, or nothing.

    Args:
        copies_are_right: whether a copy is right where eager returns a view, as `contiguous()` does for a size of 1.
    """
    if got.structure != expected.structure:
        return f"returns {got.structure}, expected {expected.structure}"
    pairs = [*zip(got.leaves, expected.leaves, strict=True), *zip(got.inputs, expected.inputs, strict=True)]
    for number, (one, other) in enumerate(pairs):
        if not isinstance(other, Tensor):
            if one != other:
                return f"leaf {number} is {one}, expected {other}"
            continue
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"leaf {number} is {one.dtype}{list(one.shape)}, expected {other.dtype}{list(other.shape)}"
        if one.stride() != other.stride() and not {0, 1} & {*one.shape} and not _overlaps(other):
            return f"leaf {number} has strides {one.stride()}, expected {other.stride()}"
        within = max(tolerance, 1e-2 if one.dtype is torch.bfloat16 else 0)
        if not torch.allclose(one.double(), other.double(), rtol=within, atol=within, equal_nan=True):
            return f"leaf {number} differs by {(one.double() - other.double()).abs().max():.3g}"
    if got.aliases != expected.aliases and not copies_are_right:
        return f"outputs share memory as {got.aliases}, expected {expected.aliases}"
    return ""


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory (`unfold`, `expand`): Inductor gives each its own."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span < tensor.numel()


def shrink(program: Program, outcome: str, config: TorchCompileConfig) -> Program:
    """The program without the statements that its outcome does not need."""
    smaller = True
    while smaller:
        smaller = False
        for at in range(len(program.statements)):
            shorter = replace(program, statements=program.statements[:at] + program.statements[at + 1 :])
            if run(shorter, config)[0] == outcome:
                program, smaller = shorter, True
                break
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="number of valid programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--inductor", action="store_true", help="compile pieces with Inductor, some 2 s a program")
    parser.add_argument("--device", default="cpu", help="of the modules and inputs: cpu or cuda")
    parser.add_argument("--no-shrink", action="store_true", help="print findings as they are")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    config = INDUCTOR if options.inductor else FX
    outcomes: collections.Counter[str] = collections.Counter()
    seed, begin = options.seed, time.monotonic()
    while outcomes.total() - outcomes["invalid"] < options.count:
        program = make(seed, options.device)
        outcome, why = run(program, config)
        outcomes[outcome] += 1
        if outcome in ("wrong", "crashed"):
            program = program if options.no_shrink else shrink(program, outcome, config)
            print(f"seed {seed} {outcome}: {why[:600]}\n{program.code}", flush=True)
        elif outcome != "right":
            print(f"seed {seed} {outcome}: {why[:300]}", flush=True)
        seed += 1
    print(dict(outcomes), f"seeds {options.seed} to {seed - 1}, {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
