"""Recompiles: what makes one capture hold for some calls only. Torchweave captures once and keeps no guard, so that each of
these is either refused at start-up or fixed to the value of the example."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchweave.compiler.errors import CompileError, InvariantError, SizeError
from torchweave.doctor.compile_run import CompileResult
from torchweave.doctor.eager_run import EagerResult
from torchweave.doctor.finding import Finding
from torchweave.doctor.source_reader import statement
from torchweave.doctor.subject import Subject
from torchweave.doctor.tracing import Recompile, TraceResult

_RULES: dict[str, tuple[str, str]] = {
    "bit_length": (
        "bit_length() needs the very number, so each one is compiled anew",
        "round up to a power of two by shifts: n -= 1; n |= n >> 1; n |= n >> 2; ... n |= n >> 32; n += 1",
    ),
    "min_max_of_list": (
        "min/max over a list of numbers is fixed to the elements it saw, and compiled anew when one changes",
        "keep the numbers in a tensor and use amin/amax, or compute the result before the forward",
    ),
    "size_branch": (
        "control flow depends on a dynamic size ({guard}), so each side is a graph of its own",
        "write it without a branch (a mask, torch.where, clamp), or choose before the forward",
    ),
    "zero_one": (
        "a size of 0 or 1 takes another path ({guard})",
        "let the general path handle it; a step of one token is the most common of all",
    ),
    "op_takes_int": (
        "the schema of {op} declares `{argument}` as int, and it changes with the size: each value is compiled anew",
        "declare it as SymInt in the schema (`SymInt {argument}`), or hand over a tensor that has the size",
    ),
    "dynamic_loop": (
        "how often the loop runs follows a size, so each size is compiled anew",
        "write the loop as tensor operations, or put it into one custom op",
    ),
    "changing_attribute": (
        "an attribute of the module changes from call to call ({guard}), and each value is compiled anew",
        "keep it out of the forward, or pass it in as a tensor",
    ),
    "changing_number": (
        "a Python number that changes from call to call is part of the graph ({guard})",
        "pass it as a tensor, or as a size of a tensor; in an op's schema declare it as SymInt",
    ),
    "data_dependent_size": (
        "a number taken from a tensor's values decides what is computed ({guard}), and each value is compiled anew",
        "keep the shape and use a mask, or do it inside a custom op",
    ),
    "fixed_size": ("a dynamic size is fixed to one value ({guard})", "let the line hold for every size"),
    "wrong_at_size": (
        "what was captured computes something else at {guard}",
        "take out what depends on the size: a branch, a number read from the shape, or an op with a wrong fake kernel",
    ),
    "unbacked": (
        "cannot be captured when no size is known (dynamic_shapes=unbacked): {guard}",
        "nothing with the default dynamic_shapes; else take out the comparison of sizes",
    ),
}
_SIZE_MISMATCH = re.compile(r"tensor '(\w+)' (?:size|stride) mismatch")
_ATTRIBUTE = re.compile(r"\bself\b.* == ")


def find(
    subject: Subject, eager_result: EagerResult, trace_result: TraceResult, compile_result: CompileResult | None
) -> Iterator[Finding]:
    # Where an op was kept out of the graph, Dynamo looks into its implementation, which is nobody's concern.
    own = [one for one in trace_result.recompiles if one.first_line not in eager_result.lines_in_ops]
    fixed = any(_SIZE_MISMATCH.match(one.guard) and "resume" not in one.function for one in own)
    found = [
        _finding(_rule(one), one.where, guard=_short(one.guard))
        for one in own
        if one.where and not _SIZE_MISMATCH.match(one.guard)
    ]
    found += _size_dependent_lines(eager_result, fixed)
    if not found and fixed:
        found += _from_capture(compile_result)
    if not found and compile_result is not None:
        found += _from_compile(subject, compile_result)
    yield from found


def _finding(rule: str, where: str, severity: str = "error", **facts: str) -> Finding:
    cause, fix = _RULES[rule]
    level = "warning" if rule in ("bit_length", "min_max_of_list", "changing_number") else severity
    return Finding("recompile", rule, where, cause.format(**facts), fix.format(**facts), level)  # type: ignore[arg-type]


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
    """Lines that need a size as a number, for a specialisation whose line Dynamo does not tell."""
    for where in sorted(eager_result.lines if fixed else ()):
        line = statement(where)
        if ".bit_length" in line.calls():
            yield _finding("bit_length", where)
        elif line.loop() is line.node is not None and line.reads_shape():
            yield _finding("dynamic_loop", where)
    for (where, op, argument), by_size in eager_result.int_arguments.items():
        if len({tuple(values) for values in by_size.values()}) > 1:
            yield _finding("op_takes_int", where, op=op, argument=argument)


def _from_capture(compile_result: CompileResult | None) -> Iterator[Finding]:
    if compile_result is not None and compile_result.error is not None:
        yield _refused(compile_result.error)
    else:
        yield _finding("fixed_size", "", guard="Dynamo does not say where")


def _from_compile(subject: Subject, compile_result: CompileResult) -> Iterator[Finding]:
    if compile_result.error is not None and not isinstance(compile_result.error, InvariantError):
        yield _refused(compile_result.error)
    if compile_result.mismatches:
        sizes = ", ".join(map(str, sorted(compile_result.mismatches)))
        yield _finding(
            "wrong_at_size", "", guard=f"a size of {sizes}: {next(iter(compile_result.mismatches.values()))}"
        )
    if compile_result.unbacked_error is not None and compile_result.error is None:
        yield _finding(
            "unbacked", compile_result.unbacked_error.where, "note", guard=compile_result.unbacked_error.cause
        )


def _refused(error: CompileError) -> Finding:
    """What weaving refused; only sometimes is that a size."""
    if isinstance(error, SizeError):
        return _finding("fixed_size", error.where, guard=error.cause)
    return Finding("trace_failure", "refused", error.where, error.cause, "do what the sentence asks for")


def _short(guard: str) -> str:
    return " ".join(guard.split())[:120]
