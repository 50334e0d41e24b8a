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
from torch._inductor import config as inductor_config
from torch.utils import _pytree as pytree

import torchweave
from torchweave.config.options import TorchCompileConfig

WIDTH = 8
DYNAMIC = {"x": {0: "T"}, "y": {0: "T"}, "i": {0: "T"}, "z": {0: "S"}}
FX = TorchCompileConfig(enable_inductor=False, compile_cache=False)
INDUCTOR = TorchCompileConfig(compile_cache=False)

# Templates of statements: {a}, {b} are float tensors [T, 8], {n} the new one, {i} permutes rows, {c} and {k} are small numbers.
_SAME_SHAPE = (
    "{n} = self.linear_{k}({a})",
    "{n} = self.norm({a})",
    "{n} = F.silu({a}) * {b}",
    "{n} = {a} + {b} * 0.5",
    "{n} = torch.where({a} > 0, {b}, {a} - 1)",
    "{n} = {a}.clamp(-{c}, {c})",
    "{n} = {a}.double().float()",
    "{n} = ({a} * 8).to(torch.int64).clamp(-50, 50).float() / 8",
    "{n} = {a}.softmax(-1)",
    "{n} = {a} - {a}.mean(0, keepdim=True)",
    "{n} = {a} / ({a}.abs().amax(-1, keepdim=True) + 1)",
    "{n} = {a}.cumsum(0) / {a}.shape[0]",
    "{n} = {a} * torch.rsqrt({a}.pow(2).mean(-1, keepdim=True) + 1e-5)",
    "{n} = {a}.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)",
    "{n} = {a}.t().contiguous().t()",
    "{n} = {a}.view(-1, 4, 2).flip(1).flatten(1)",
    "{n} = {a}.unfold(1, 4, 2).reshape(*{a}.shape[:-1], -1)[:, 2:10]",
    "{n} = torch.cat([{a}[:, {k}:], {b}[:, :{k}]], -1)",
    "{n} = torch.cat([{a}, {b}], 0)[{a}.shape[0]:]",
    "{n} = torch.stack([{a}, {b}], 1).sum(1)",
    "{n} = torch.cat([each + {c} for each in {a}.chunk(2, -1)], -1)",
    "{n} = torch.cat({a}.split([3, 5], -1)[::-1], -1)",
    "{n} = {a}.roll(1, 0)",
    "{n} = {a}.flip(0)",
    "{n} = {a}[{i}]",
    "{n} = {a}.index_select(0, {i})",
    "{n} = {a}.gather(0, {i}[:, None].expand(-1, 8))",
    "{n} = torch.zeros_like({a}).scatter_(0, {i}[:, None].expand(-1, 8), {b})",
    "{n} = torch.zeros_like({a}).index_add_(0, {i}, {b})",
    "{n} = torch.zeros_like({a}).scatter_add(1, ({i} % 8)[:, None], {b}[:, :1])",
    "{n} = {a}.masked_fill({b} > {c}, 0.25)",
    "{n} = {a}.sort(0).values",
    "{n} = {a}.topk(8, -1).values",
    "{n} = {a} * torch.arange({a}.shape[0], device={a}.device)[:, None] / {a}.shape[0]",
    "{n} = {a} + {a}.shape[0] * 0.125",
    "{n} = {a}.new_full(({a}.shape[0], 8), {c}) + {b}",
    "{n} = F.pad({a}, (1, 1))[:, 1:-1]",
    "{n} = F.pad({a}, (0, 0, {c}, 0))[:{a}.shape[0]]",
    "{n} = self.conv({a}.t()[None])[0].t()",
    "{n} = self.conv({a}[:, None].expand(-1, 8, -1)).mean(1)",
    "{n} = ({a} @ {b}.t()).softmax(-1) @ {a}",
    "{n} = ({a} @ {b}.t()).tril().sum(-1, keepdim=True) * 0.01 + {a}",
    "{n} = torch.einsum('td,de->te', {a}, self.linear_0.weight)",
    "{n} = F.scaled_dot_product_attention({a}.view(1, -1, 2, 4).transpose(1, 2), {b}.view(1, -1, 2, 4).transpose(1, 2), "
    "{a}.view(1, -1, 2, 4).transpose(1, 2), is_causal=True).transpose(1, 2).reshape(-1, 8)",
    "{n} = self.table[{i} % 6] + {a}",
    "{n} = {a} + self.steps",
    "{n} = dict(first={a}, second=[{b}])['second'][0] * 1.5",
    "{n} = self.scaled({a}, scale={c})",
    "{n} = {a}.unsqueeze(1).repeat(1, 2, 1).view(-1, 16)[:, 4:12]",
    "{n} = {a}.repeat_interleave(2, 0)[::2]",
    "{n} = {a}.var(-1, keepdim=True) + {b}",
    "{n} = {a}.std(0, correction=0) + {b}",
    "{n} = {a} + ({b}.argmax(-1) % 3)[:, None]",
    "{n} = {a} if {a}.dtype is torch.float32 else {b}",
    "{n} = torch.cat([{a}[{a}.shape[0] // 2 :], {b}[: {a}.shape[0] // 2]])",
    "{n} = F.pad({a}[: {a}.shape[0] - 1], (0, 0, 0, 1), value={c})",
    "{n} = {a}.narrow(0, {a}.shape[0] // 2, 1) + {b}",
    "{n} = {a}[-1:] * 0.5 + {b}[:1] + {a}",
    "{n} = {a}.half().float() + {b}",
    "{n} = ({a}.bfloat16() * {c} + {b}.bfloat16()).float()",
    "{n} = {a} + z.mean(0)",
    "{n} = ({a} @ z.t()).softmax(-1) @ z + {b}",
    "{n} = ({a}[:, None] + z[None]).amax(1)",
    "{n} = {a} + z.shape[0] / {a}.shape[0]",
    "{n} = torch.cat([{a}, z])[z.shape[0] :]",
    "{n} = {a}.expand(2, -1, -1).sum(0)",
    "{n} = self.conv_2d({a}.view(1, 1, -1, 8)).view(-1, 8)",
    "{n} = self.group({a}) + self.batch({b})",
    "{n} = self.embedding({i} % 6) * {a}",
    "{n} = self.attention({a}[None], {b}[None], {a}[None], need_weights=False)[0][0]",
    "{n} = self.gru({a}[:, None])[0][:, 0]",
    "{n} = {a}.index_put(({i},), {b}, accumulate=True)",
    "{n} = {a}.scatter_reduce(0, {i}[:, None].expand(-1, 8), {b}, 'amax')",
    "{n} = {a}.index_copy(0, {i}, {b}) + {a}.index_select(0, {i})",
    "{n} = {a}.masked_scatter({b} > 0, {a} + 1)",
    "{n} = {a}.diagonal_scatter({b}.diagonal() * 2)",
    "{n} = {a}.slice_scatter({b}[:, ::2], 1, 0, 8, 2)",
    "{n} = torch.bucketize({a}, self.steps).float()",
    "{n} = F.one_hot({i} % 8, 8) * {a}",
    "{n} = {a}.cummax(0).values",
    "{n} = {a}.logsumexp(-1, keepdim=True) - {b}",
    "{n} = F.gelu(self.linear_{k}({a}), approximate='tanh') + self.linear_1({a})",
    "{n} = {a}.as_strided(({a}.shape[0], 8), (8, 1)) + {b} if {a}.is_contiguous() else {a}",
    "{n} = [{a} * scale for scale in (1, 2, {c})][-1]",
    "{n} = {a}.movedim(0, 1).contiguous().movedim(1, 0)",
    "{n} = {a}.permute(1, 0).reshape(-1, 8)",
)
_IN_PLACE = (
    "{m} = {a}.clone()",
    "{m}.add_({b})",
    "{m} *= 0.5",
    "{m}[{i}] = {m}.clone()",
    "{m}[{i}] = {b}",
    "{m}[:, {k}] = {b}[:, 0]",
    "{m}[:, 1:5] += {b}[:, :4]",
    "{m}[:, :4].copy_({m}[:, 4:].clone())",
    "{m}[1:].copy_({m}[:-1].clone())",
    "{m}.index_copy_(0, {i}, {m}.clone())",
    "{m}.index_add_(0, {i}, {m}.clone())",
    "{m}.index_fill_(0, {i}[:1], {c})",
    "{m}.scatter_(0, {i}[:, None].expand(-1, 8), {m}.clone())",
    "{m}.masked_fill_({b} > 0, {c})",
    "{m}.copy_({m}.flip(0))",
    "{m}.view(-1, 2, 4)[:, 1].mul_(2)",
    "{m}.t()[{k}].zero_()",
    "{m}.select(1, {k}).add_(1)",
    "{m}.clamp_(min=-1)",
    "F.relu({m}, inplace=True)",
    "torch.add({a}, {b}, out={m})",
    "{m}[{b} > 1] = 0",
    "{m}[: {m}.shape[0] // 2] *= 2",
    "{m}[{m}.shape[0] // 2 :, ::2].add_({b}[{m}.shape[0] // 2 :, 1::2])",
    "{m}[-1] = {b}[0]",
    "{m}[:, 2:6].t().copy_({b}[:, :4].t())",
    "{m}.diagonal().fill_({c})",
    "{m}.index_put_(({i}, {i} % 8), {b}[:, 0])",
    "{m}.index_put_(({i} % 2,), {b}, accumulate=True)",
    "{m}[{i} % 3 == 0] = {c}",
    "{m}.scatter_reduce_(0, {i}[:, None].expand(-1, 8), {b}, 'sum')",
    "{m}.view(-1)[::3] = {c}",
    "{m}.add_({m}.t().contiguous().t().flip(1))",
    "{m}.masked_scatter_({b} > 0, {m}.clone())",
    "{m}.unsqueeze(0).squeeze_(0).sub_(0.25)",
    "{m}.uniform_(0, 0)",
)
_RESULTS = (
    "({a}, {b})",
    "dict(first={a}, rest=[{b}, ({m}, None)])",
    "{a}",
    "({a}.t(), {a}[:, 2:6], {m})",
    "({a}, {a}.view(-1), x)",
    "[{a}.sum(), {b}.mean(0), {m}.amax(-1)]",
    "({a}.argmax(-1), {b} > 0, {a}.to(torch.bfloat16))",
    "({a}.unfold(1, 4, 2), {b}.reshape(-1, 2, 4).transpose(0, 1))",
    "[{a}, [{a}, {m}], {b}]",
    "(*{a}.chunk(2, -1), {m}[1:])",
    "({a}[{b} > 100].sum(), None, 2.5, {m})",
    "dict(z=z, view={m}[:, 1:], same={m})",
    "({a}[:, :4], self.table, {b})",
)


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

    def scaled(self, x: Tensor, **kwargs: Any) -> Tensor:
        kwargs.setdefault("shift", 0.5)
        return x * kwargs["scale"] + kwargs["shift"]


@dataclass(frozen=True)
class Program:
    """Statements of a forward `(x [T, 8], y [T, 8], i [T], z [S, 8])`, and the expression that it returns."""

    statements: tuple[str, ...]
    result: str
    seed: int

    @property
    def code(self) -> str:
        lines = "".join(f"    {each}\n" for each in (*self.statements, f"return {self.result}"))
        return f"def forward(self, x, y, i, z):\n{lines}"

    @property
    def tolerance(self) -> float:
        """A number that differs in its last bit may be rounded to another one of the lowest dtype."""
        return 2e-2 if ".bfloat16()" in self.code else 4e-3 if ".half()" in self.code else 1e-4

    def module(self) -> nn.Module:
        torch.manual_seed(self.seed)
        file = f"<program {self.seed}>"
        linecache.cache[file] = (len(self.code), None, self.code.splitlines(keepends=True), file)
        namespace: dict[str, Any] = {"torch": torch, "F": nn.functional}
        exec(compile(self.code, file, "exec"), namespace)
        return type("Program", (Base,), {"forward": namespace["forward"]})().eval().requires_grad_(False)

    def inputs(self, size: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(1000 * self.seed + size)
        x, y, z = (torch.randn(rows, WIDTH, generator=draw) for rows in (size, size, size + 2))
        return {"x": x, "y": y, "i": torch.randperm(size, generator=draw), "z": z}


def make(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed)
    floats, statements = ["x", "y"], ["m = x * 1" if draw.random() < 0.7 else "m = x"]
    for number in range(draw.randint(2, 9)):
        template = draw.choice(_IN_PLACE if draw.random() < 0.35 else _SAME_SHAPE)
        fill = {"a": draw.choice(floats), "b": draw.choice(floats), "m": "m", "n": f"v{number}", "i": "i"}
        statements.append(template.format(**fill, c=draw.randint(1, 3), k=draw.randint(0, 7)))
        floats += [f"v{number}"] if "{n}" in template else []
        if number == 2:
            floats.append("m")
    if draw.random() < 0.01:
        statements.append("self.count.add_(1)")  # refused
    result = draw.choice(_RESULTS).format(a=draw.choice(floats[2:] or floats), b=draw.choice(floats), m="m")
    return Program(tuple(statements), result, seed)


def run(program: Program, config: TorchCompileConfig = FX) -> tuple[str, str]:
    """Outcome and cause: `invalid` where eager raises; else as in the module's text."""
    module = program.module()
    try:
        expected = [call(module, program) for call in CALLS]
    except Exception as error:  # a random program may be wrong in any way
        return "invalid", str(error)
    try:
        with inductor_config.patch(emulate_precision_casts=True):  # else it keeps float32 between operations of 16 bits
            compiled = torchweave.compile(program.module(), program.inputs(CALLS[0].size), DYNAMIC, config)
    except Exception as error:
        return _refusal(error)
    refused = ""
    for call, other in zip(CALLS, expected, strict=True):
        try:
            got = call(compiled, program)
        except Exception as error:
            outcome, why = _refusal(error)
            if outcome == "crashed" or not call.may_be_refused:
                return outcome, f"{call}: {why}"
            refused = why
            continue
        if difference := _difference(got, other, program.tolerance, call.size == 1):
            return "wrong", f"{call}: {difference}"
    return ("right, a call refused", refused) if refused else ("right", "")


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
    parser.add_argument("--no-shrink", action="store_true", help="print findings as they are")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    config = INDUCTOR if options.inductor else FX
    outcomes: collections.Counter[str] = collections.Counter()
    seed, begin = options.seed, time.monotonic()
    while outcomes.total() - outcomes["invalid"] < options.count:
        program = make(seed)
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
