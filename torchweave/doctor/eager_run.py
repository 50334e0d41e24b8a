"""Instrumented eager run of the subject: executed lines, host synchronizations, and checks of custom ops.

Each custom op also runs on fake tensors of the same geometry, and the result of its fake kernel is compared with the real one.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchweave.doctor.source_reader import innermost_user_line, is_user_code
from torchweave.doctor.subject import Subject

SIZES = (64, 7, 2, 1)
_TORCHS_OWN = ("aten", "prims", "prim", "quantized", "inductor", "profiler", "_c10d_functional")
_HOST_SYNC_OPS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.is_nonzero.default,
)


@dataclass(frozen=True)
class OpFault:
    """An op that violates its schema or fake kernel: `what` is `missing`, `wrong`, `mutates` or `aliases`."""

    op: torch._ops.OpOverload
    where: str
    what: str
    detail: str


@dataclass
class EagerResult:
    """Results of the eager runs.

    Attributes:
        results: forward's result by size, without sizes at which it raised.
        errors: error text by size.
        lines: executed lines of the subject, `file:line`, outside custom ops.
        lines_in_ops: executed lines in custom ops, with the first line of each function.
        host_syncs: lines that made the host wait for a tensor's value.
        faults: ops that violate their schema or fake kernel.
        int_arguments: (line, op, argument) of plain `int` arguments of custom ops -> size -> values, in order.
    """

    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    lines: set[str] = field(default_factory=set)
    lines_in_ops: set[str] = field(default_factory=set)
    host_syncs: set[str] = field(default_factory=set)
    faults: list[OpFault] = field(default_factory=list)
    int_arguments: dict[tuple[str, str, str], dict[int, list[int]]] = field(default_factory=dict)


def run_eager(subject: Subject) -> EagerResult:
    """Run the subject at each of `SIZES`."""
    eager_result = EagerResult()
    for variant, size in enumerate(SIZES):
        before, watcher = sys.gettrace(), _OpWatcher(eager_result, size)
        sys.settrace(_tracer(eager_result, watcher))
        try:
            with torch.no_grad(), fixed_seed(), watcher:
                eager_result.results[size] = subject.module(*subject.arguments(size, variant))
        except Exception as error:  # whatever the subject raises
            eager_result.errors[size] = f"{type(error).__name__}: {error}"
        finally:
            sys.settrace(before)
    return eager_result


@contextlib.contextmanager
def fixed_seed() -> Iterator[None]:
    """Run the body with random seed 0, and restore the generator state."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _tracer(eager_result: EagerResult, watcher: _OpWatcher) -> Any:
    def each_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines = eager_result.lines_in_ops if watcher.in_op else eager_result.lines
            lines.add(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return each_line

    def each_call(frame: FrameType, event: str, _: Any) -> Any:
        if not is_user_code(frame.f_code.co_filename):
            return None
        if watcher.in_op:
            eager_result.lines_in_ops.add(f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno}")
        return each_line

    return each_call


class _OpWatcher(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, eager_result: EagerResult, size: int) -> None:
        super().__init__()
        self.eager_result, self.size = eager_result, size
        self.in_op = False
        self.checked: set[tuple[Any, str, tuple]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):  # ops inside `cond` and the like dispatch separately
            return func(*args, **kwargs)
        if func in _HOST_SYNC_OPS:
            self.eager_result.host_syncs.add(_call_site())
        if func.namespace in _TORCHS_OWN:
            return func(*args, **kwargs)
        self.in_op = True
        try:
            return self._run_custom_op(func, args, kwargs, _call_site())
        finally:
            self.in_op = False

    def _run_custom_op(self, func: Any, args: tuple, kwargs: dict[str, Any], where: str) -> Any:
        self._note_int_arguments(func, args, where)
        shapes = tuple(tuple(item.shape) for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Tensor))
        if (func, where, shapes) in self.checked:
            return func(*args, **kwargs)
        self.checked.add((func, where, shapes))
        result, faults = check(func, args, kwargs)
        known = {(fault.op, fault.what, fault.where) for fault in self.eager_result.faults}
        self.eager_result.faults += [
            OpFault(func, where, what, detail) for what, detail in faults if (func, what, where) not in known
        ]
        return result

    def _note_int_arguments(self, func: Any, args: tuple, where: str) -> None:
        for argument, declared in zip(args, func._schema.arguments, strict=False):
            if type(argument) is int and isinstance(declared.real_type, torch.IntType):
                key = (where, func._schema.name, declared.name)
                self.eager_result.int_arguments.setdefault(key, {}).setdefault(self.size, []).append(argument)


def _call_site() -> str:
    return innermost_user_line(traceback.extract_stack())


def check(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, list[tuple[str, str]]]:
    """Run an op, and compare its behavior with its schema and fake kernel.

    Returns:
        The result, and faults as (what, detail).
    """
    fake_result, fault = _fake(func, args, kwargs)
    tensors = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
    copies = [item.clone() for item in tensors]
    result = func(*args, **kwargs)
    faults = [fault] if fault else []
    declared = _written(func, args, kwargs)
    for tensor, copy in zip(tensors, copies, strict=True):
        if id(tensor) not in declared and not torch.equal(tensor.nan_to_num(), copy.nan_to_num()):
            faults.append(("mutates", "it writes to an argument that its schema does not declare as mutated"))
            break
    outputs = [item for item in pytree.tree_leaves(result) if isinstance(item, Tensor)]
    owned = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
    if not any(value.alias_info for value in func._schema.returns) and any(
        out.numel() and out.untyped_storage().data_ptr() in owned for out in outputs
    ):
        faults.append(("aliases", "its output shares memory with an argument, which its schema does not declare"))
    if fault is None:
        fakes = [item for item in pytree.tree_leaves(fake_result) if isinstance(item, Tensor)]
        if len(fakes) != len(outputs):
            faults.append(("wrong", f"it returns {len(fakes)} tensors, the op returns {len(outputs)}"))
        faults += [
            ("wrong", why) for fake, out in zip(fakes, outputs, strict=False) if (why := disagreement(fake, out))
        ]
    return result, faults[:1] if faults and faults[0][0] == "missing" else faults


def _fake(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple[str, str] | None]:
    """The fake kernel's result for these arguments, or its fault."""
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def to_fake(item: Any) -> Any:
        return mode.from_tensor(item, static_shapes=True) if isinstance(item, Tensor) else item

    args, kwargs = pytree.tree_map(to_fake, (args, kwargs))
    tracer = sys.gettrace()
    sys.settrace(None)  # lazy imports of torch would be traced line by line
    try:
        with mode:
            return func(*args, **kwargs), None
    except UnsupportedOperatorException:
        return None, ("missing", "")
    except Exception as error:  # whatever the kernel raises
        text = str(error)
        if "no fake impl" in text or "no fake kernel" in text.lower() or isinstance(error, NotImplementedError):
            return None, ("missing", "")
        return None, ("wrong", f"it raises {type(error).__name__}: {text.splitlines()[0] if text else ''}")
    finally:
        sys.settrace(tracer)


def disagreement(fake: Tensor, real: Tensor) -> str:
    """Difference between a fake and a real result as a clause; "" if they agree. A symbolic size matches any."""
    if fake.dtype != real.dtype:
        return f"it returns {fake.dtype}, the op returns {real.dtype}"
    if fake.dim() != real.dim() or not all(map(_fits, fake.shape, real.shape)):
        return f"it returns shape {tuple(fake.shape)}, the op returns {tuple(real.shape)}"
    if fake.device.type != real.device.type:
        return f"it returns a tensor on {fake.device}, the op returns a tensor on {real.device}"
    if not all(_fits(a, b) for a, b, size in zip(fake.stride(), real.stride(), real.shape, strict=True) if size > 1):
        return f"it returns strides {tuple(fake.stride())}, the op returns {tuple(real.stride())}"
    return ""


def _fits(fake_result: Any, real: int) -> bool:
    return not isinstance(fake_result, int) or fake_result == real


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> set[int]:
    names = {
        argument.name for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write
    }
    named = {**{declared.name: item for item, declared in zip(args, func._schema.arguments, strict=False)}, **kwargs}
    return {id(item) for name in names for item in pytree.tree_leaves(named.get(name))}
