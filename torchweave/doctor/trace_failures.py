"""Trace failures: missing or wrong fake kernels, unrolled loops, and lines that fail on symbolic sizes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import fx

from torchweave.doctor.eager_run import EagerResult
from torchweave.doctor.finding import Finding, Rules
from torchweave.doctor.source_reader import Statement, is_user_code, source_line, statement
from torchweave.doctor.tracing import TraceResult

_UNROLLED = 32  # minimum number of traced operations of one module from one stack
_FRAMES = re.compile(r'File "([^"]+)", line (\d+)')

_RULES = Rules("trace_failure", {
    "missing_fake_kernel": (
        "the custom op {op} has no fake kernel, so it cannot be traced",
        "register one with register_fake: return torch.empty of the right shape, dtype and strides, read no values",
    ),
    "wrong_fake_kernel": (
        "the fake kernel of {op} is wrong: {detail}",
        "return the op's shape, dtype and strides from the fake kernel at every size; torchweave's `define` and "
        "torch.library.opcheck test it",
    ),
    "undeclared_mutation": (
        "the custom op {op} violates its schema: {detail}",
        "name the argument in mutates_args (or as Tensor(a!) in the schema), or write to a copy",
    ),
    "undeclared_alias": (
        "the custom op {op} violates its schema: {detail}",
        "return a copy, or declare the alias in the schema",
    ),
    "raises": (
        "forward raises at a size of {sizes} ({message})",
        "support every size from 1; steps of one token are the most common",
    ),
    "fake_run": (
        "`{line}` fails on symbolic sizes: {cause}",
        "make it valid for every dynamic size, or move it into a custom op with a fake kernel",
    ),
})  # fmt: skip
_OP_RULES = {
    "missing": "missing_fake_kernel",
    "wrong": "wrong_fake_kernel",
    "mutates": "undeclared_mutation",
    "aliases": "undeclared_alias",
}
"""Rule by `OpFault.what`."""


def find(eager_result: EagerResult, trace_result: TraceResult) -> Iterator[Finding]:
    yield from _ops(eager_result)
    yield from _loops(trace_result.graphs)
    yield from _refused(trace_result, {fault.where for fault in eager_result.faults})
    if eager_result.errors:
        sizes = ", ".join(map(str, eager_result.errors))
        message = " ".join(next(iter(eager_result.errors.values())).split())[:200]
        yield _RULES.finding("raises", "", sizes=sizes, message=message)


def _ops(eager_result: EagerResult) -> Iterator[Finding]:
    for fault in eager_result.faults:
        yield _RULES.finding(_OP_RULES[fault.what], fault.where, op=fault.op._schema.name, detail=fault.detail)


def _loops(graphs: Iterable[fx.GraphModule]) -> Iterator[Finding]:
    """Unrolled loops. Operations count by stack and module, so that a loop over layers, which are modules, does not count."""
    times: dict[tuple[str, str], int] = defaultdict(int)
    for gm in graphs:
        for node in gm.graph.nodes:
            stack = node.meta.get("stack_trace")
            if node.op.startswith("call") and stack:
                modules = node.meta.get("nn_module_stack") or {}
                times[stack, str(list(modules)[-1:])] += 1
    reported: dict[tuple[str, bool], int] = {}
    for (stack, _), count in times.items():
        loop = _loop_of(stack) if count >= _UNROLLED else None
        if loop is not None:
            reported[loop] = reported.get(loop, 0) + count
    for (where, sized), count in reported.items():
        cause = f"the loop was unrolled into {count} operations, which makes tracing and building slow"
        if sized:
            cause += ", and its length follows a size, so each size would need a new capture"
        yield Finding(
            "trace_failure",
            "unrolled_loop",
            where,
            cause,
            "write the loop as tensor operations, or move it into one custom op; a short loop over layers may stay",
            "error" if sized else "warning",
        )


def _loop_of(stack: str) -> tuple[str, bool] | None:
    """Line of the innermost loop around any frame of a stack, and whether its length follows a size; None without a loop, or for
    a loop over modules. The loop's own node is analyzed, since its body may share its line."""
    for file, line in reversed(_FRAMES.findall(stack)):
        around = statement(f"{file}:{line}") if is_user_code(file) else Statement(None)
        node = around.loop() or around.comprehension()
        if node is not None:
            loop = Statement(node)
            return None if loop.iterates_modules() else (f"{file}:{node.lineno}", loop.reads_shape())
    return None


def _refused(trace_result: TraceResult, known: set[str]) -> Iterator[Finding]:
    for where, text in trace_result.errors:
        if where and where not in known:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            cause = next(
                (line.split("got ", 1)[1] for line in lines if "got " in line), lines[0] if lines else "unknown"
            )
            yield _RULES.finding("fake_run", where, line=source_line(where), cause=cause)
