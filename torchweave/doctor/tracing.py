"""Trace the subject with Dynamo, allowing graph breaks and guards, to record all breaks and recompiles.

Dynamo continues after a break. Ops with a missing or wrong fake kernel become breaks. As in the stack's capture, numbers are
constants, and only declared sizes are dynamic.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from torchweave.compiler.eager_semantics.size_answers import dynamic_shapes_mode
from torchweave.compiler.errors import resolve_file_name
from torchweave.compiler.ir.symbols import value
from torchweave.doctor.source_reader import innermost_user_line
from torchweave.doctor.subject import Subject

# (size, variant) of each call.
_CALLS = ((64, 0), (7, 1), (1, 2))
_GUARD_PLACE = re.compile(r"# (?P<code>.*?)\s+# (?P<file>\S+):(?P<line>\d+) in (?P<function>\S+)")


@dataclass(frozen=True)
class Break:
    """A graph break: its line, the frames above, Dynamo's name of the break, and its explanation."""

    where: str
    callers: tuple[str, ...]
    kind: str
    text: str


@dataclass(frozen=True)
class Recompile:
    """A failed guard: its expression, its line if Dynamo records one, and the name and first line of its function."""

    guard: str
    where: str
    function: str
    first_line: str


@dataclass
class TraceResult:
    """Result of a trace: `graphs` of the first call, breaks, recompiles, and errors as (line, text)."""

    graphs: list[fx.GraphModule] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)

    def is_one_graph(self) -> bool:
        return not self.breaks and not self.errors and len(self.graphs) == 1


def trace(subject: Subject, wrong_fake_ops: Iterable[torch._ops.OpOverload] = ()) -> TraceResult:
    """Run the subject under Dynamo at several sizes; `wrong_fake_ops` stay out of the graphs."""
    import torch._dynamo as dynamo

    trace_result = TraceResult()
    call = 0

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        if call == 0:
            _mark_constants(gm)
            trace_result.graphs.append(gm)
        return gm.forward

    def failed(failure: Any) -> None:
        trace_result.recompiles.append(_recompile(failure))

    rules = dynamo.config.patch(
        specialize_int=True, specialize_float=True, assume_static_by_default=True, automatic_dynamic_shapes=False
    )
    dynamo.reset()
    try:
        with (
            rules,
            dynamic_shapes_mode("backed_size_oblivious"),
            torch.no_grad(),
            _record_breaks(trace_result.breaks),
            _break_at(wrong_fake_ops),
        ):
            compiled = dynamo.optimize(backend, guard_fail_fn=failed)(_as_one_call(subject.module))
            for call, (size, variant) in enumerate(_CALLS):  # noqa: B007  the closures above read it
                arguments = subject.arguments(size, variant)
                for argument, dims in zip(arguments, map(subject.dynamic.get, subject.inputs), strict=True):
                    for dim in dims or ():
                        dynamo.maybe_mark_dynamic(argument, dim)
                try:
                    compiled(*arguments)
                except Exception as error:  # whatever tracing or the subject raises
                    trace_result.errors.append(
                        (innermost_user_line(getattr(error, "real_stack", None) or ()), str(error))
                    )
    finally:
        dynamo.reset()
    return trace_result


def _as_one_call(module: nn.Module) -> Callable[..., Any]:
    """The module, or a function that calls a module with hooks: Dynamo traces the outermost module's hooks separately."""
    if not (module._forward_hooks or module._forward_pre_hooks):
        return module

    def call(*arguments: Any) -> Any:
        return module(*arguments)

    return call


def _recompile(failure: Any) -> Recompile:
    """Parse a guard failure: `0/1: n == 5   # y = x * n  # file.py:12 in forward`."""
    expression, _, _ = failure.reason.partition("#")
    guard = expression.partition(":")[2].strip() or expression.strip()
    place = _GUARD_PLACE.search(failure.reason)
    code, where = failure.orig_code, ""
    if place is not None:
        # Dynamo shortens paths. The full path is the frame's, one in the stack after the guard, or that of a loaded module.
        full = [code.co_filename, *re.findall(r'File "([^"]+)"', failure.reason)]
        file = next((name for name in full if name.endswith(place["file"].lstrip("."))), "") or resolve_file_name(
            place["file"]
        )
        where = f"{file}:{place['line']}" if file else ""
    return Recompile(guard, where, code.co_name, f"{code.co_filename}:{code.co_firstlineno}")


@contextlib.contextmanager
def _record_breaks(breaks: list[Break]) -> Iterator[None]:
    """Append each graph break to `breaks`. Dynamo only logs breaks, so its logging method is patched."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase as Translator

    original = Translator.log_graph_break

    def note(self: Any, code_options: Any, reason: str, exc: Any, *args: Any, **kwargs: Any) -> Any:
        stack = list(getattr(exc, "real_stack", None) or ())
        places = tuple(f"{frame.filename}:{frame.lineno}" for frame in stack)
        breaks.append(Break(innermost_user_line(stack), places, str(getattr(exc, "gb_type", "") or ""), str(exc)))
        return original(self, code_options, reason, exc, *args, **kwargs)

    with mock.patch.object(Translator, "log_graph_break", note):
        yield


@contextlib.contextmanager
def _break_at(ops: Iterable[torch._ops.OpOverload]) -> Iterator[None]:
    """Make Dynamo break the graph at these ops."""
    from torch._dynamo import trace_rules

    ids = {id(each) for op in ops for each in (op, op.overloadpacket)}
    rules: Any = trace_rules._disallowed_callable_ids
    added = [one for one in ids if one not in rules]
    for one in added:
        rules.add(one)
    try:
        yield
    finally:
        for one in added:
            rules.remove(one)


def _mark_constants(gm: fx.GraphModule) -> None:
    """Mark placeholders of parameters and buffers; Dynamo drops the sources after the trace."""
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            source = getattr(node.meta.get("grapharg"), "source", None)
            name = getattr(source, "name", "")
            text = name if isinstance(name, str) else name()
            node.meta["is_module_constant"] = isinstance(value(node), Tensor) and (
                "_parameters" in text or "_buffers" in text
            )
