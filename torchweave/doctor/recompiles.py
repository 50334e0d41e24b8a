"""Recompiles: lines that make a capture valid for some calls only.

Torchweave captures once without guards, so that each of these is an error at start-up or fixed to the example's value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchweave.compiler.errors import CompileError, InvariantError, SizeError
from torchweave.doctor.compile_run import CompileResult
from torchweave.doctor.eager_run import EagerResult
from torchweave.doctor.finding import Finding, Rules
from torchweave.doctor.source_reader import statement
from torchweave.doctor.tracing import Recompile, TraceResult

_RULES = Rules("recompile", {
    "bit_length": (
        "bit_length() needs the exact number, so each value needs a new compilation",
        "round up to a power of two by shifts: n -= 1; n |= n >> 1; n |= n >> 2; ... n |= n >> 32; n += 1",
        "warning",
    ),
    "min_max_of_list": (
        "min/max over a list of numbers is fixed to its elements, and a change of one needs a new compilation",
        "keep the numbers in a tensor and use amin/amax, or compute the result before the forward",
        "warning",
    ),
    "size_branch": (
        "control flow depends on a dynamic size ({guard}), so each branch is a separate graph",
        "write it without a branch (a mask, torch.where, clamp), or decide before the forward",
    ),
    "zero_one": (
        "a size of 0 or 1 takes another path ({guard})",
        "let the general path handle it; steps of one token are the most common",
    ),
    "op_takes_int": (
        "the schema of {op} declares `{argument}` as int, but it follows a size, so each value needs a new compilation",
        "declare it as SymInt in the schema (`SymInt {argument}`), or pass a tensor of that size",
    ),
    "dynamic_loop": (
        "the loop's number of iterations follows a size, so each size needs a new compilation",
        "write the loop as tensor operations, or move it into one custom op",
    ),
    "changing_attribute": (
        "an attribute of the module changes between calls ({guard}), and each value needs a new compilation",
        "do not read it in the forward, or pass it as a tensor",
    ),
    "changing_number": (
        "a Python number that changes between calls is part of the graph ({guard})",
        "pass it as a tensor, or as a size of a tensor; in an op's schema declare it as SymInt",
        "warning",
    ),
    "data_dependent_size": (
        "the computation depends on a number read from a tensor ({guard}), and each value needs a new compilation",
        "keep the shape and use a mask, or move the line into a custom op",
    ),
    "fixed_size": ("a dynamic size is fixed to one value ({guard})", "make the line valid for every size"),
    "wrong_at_size": (
        "the captured graph gives another result at {guard}",
        "remove the dependence on the size: a branch, a number read from the shape, or an op with a wrong fake kernel",
    ),
    "unbacked": (
        "the capture fails with unbacked sizes (dynamic_shapes=unbacked): {guard}",
        "nothing with the default dynamic_shapes; else remove the comparison of sizes",
        "note",
    ),
})  # fmt: skip
_SIZE_MISMATCH = re.compile(r"tensor '(\w+)' (?:size|stride) mismatch")
_ATTRIBUTE = re.compile(r"\bself\b.* == ")


def find(
    eager_result: EagerResult, trace_result: TraceResult, compile_result: CompileResult | None
) -> Iterator[Finding]:
    # At an op that was kept out of the graph, Dynamo traces the implementation; its recompiles do not matter.
    own = [one for one in trace_result.recompiles if one.first_line not in eager_result.lines_in_ops]
    fixed = any(_SIZE_MISMATCH.match(one.guard) and "resume" not in one.function for one in own)
    findings = [
        _RULES.finding(_rule(one), one.where, guard=_short(one.guard))
        for one in own
        if one.where and not _SIZE_MISMATCH.match(one.guard)
    ]
    findings += _size_dependent_lines(eager_result, fixed)
    if not findings and fixed:
        findings += _from_capture(compile_result)
    if not findings and compile_result is not None:
        findings += _from_compile(compile_result)
    yield from findings


def _rule(one: Recompile) -> str:
    line = statement(one.where)
    calls = line.calls()
    if ".bit_length" in calls:
        return "bit_length"
    if "size()" in one.guard and line.node is not None and line.loop() is line.node:
        return "dynamic_loop"
    if "size()" in one.guard:
        return (
            "zero_one" if re.search(r"size\(\)\[\d+\] *(!=|==|<=|<|>) *[01]$|^[12] <= ", one.guard) else "size_branch"
        )
    if calls & {"min", "max"} and "[" in one.guard:
        return "min_max_of_list"
    if _ATTRIBUTE.search(one.guard):
        return "changing_attribute"
    return "data_dependent_size" if "resume" in one.function else "changing_number"


def _size_dependent_lines(eager_result: EagerResult, fixed: bool) -> Iterator[Finding]:
    """Lines that need a size as a number, for a specialization that Dynamo reports without a line."""
    for where in sorted(eager_result.lines if fixed else ()):
        line = statement(where)
        if ".bit_length" in line.calls():
            yield _RULES.finding("bit_length", where)
        elif line.loop() is line.node is not None and line.reads_shape():
            yield _RULES.finding("dynamic_loop", where)
    for (where, op, argument), by_size in eager_result.int_arguments.items():
        if len({tuple(values) for values in by_size.values()}) > 1:
            yield _RULES.finding("op_takes_int", where, op=op, argument=argument)


def _from_capture(compile_result: CompileResult | None) -> Iterator[Finding]:
    if compile_result is not None and compile_result.error is not None:
        yield _refused(compile_result.error)
    else:
        yield _RULES.finding("fixed_size", "", guard="Dynamo reports no line")


def _from_compile(compile_result: CompileResult) -> Iterator[Finding]:
    if compile_result.error is not None and not isinstance(compile_result.error, InvariantError):
        yield _refused(compile_result.error)
    if compile_result.mismatches:
        sizes = ", ".join(map(str, sorted(compile_result.mismatches)))
        yield _RULES.finding(
            "wrong_at_size", "", guard=f"a size of {sizes}: {next(iter(compile_result.mismatches.values()))}"
        )
    if compile_result.unbacked_error is not None and compile_result.error is None:
        error = compile_result.unbacked_error
        yield _RULES.finding("unbacked", error.where, guard=error.cause)


def _refused(error: CompileError) -> Finding:
    """The finding for an error of the compilation."""
    if isinstance(error, SizeError):
        return _RULES.finding("fixed_size", error.where, guard=error.cause)
    return Finding("trace_failure", "refused", error.where, error.cause, "change the line as the cause describes")


def _short(guard: str) -> str:
    return " ".join(guard.split())[:120]
