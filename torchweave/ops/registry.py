"""Registration of custom ops: the op, its fake kernel, its eager reference, and whether graphs are cut at it.

A *boundary op* has no output: it writes into tensors that the piece before it allocated, so that captured pieces on either side
keep their addresses. Capture and partition read `boundary_ops()`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch.library import CustomOpDef  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True)
class OpInfo:
    """Registration of a custom op of the project.

    Attributes:
        name: qualified name, `torchweave::attention`, in any namespace.
        reference: the eager implementation; the oracle of every faster one.
        mutates: names of the arguments that it writes into.
        boundary: whether graphs are cut at it.
        cuda: implementation on a GPU, if it is not the reference.
    """

    name: str
    reference: Callable[..., Any]
    mutates: tuple[str, ...]
    boundary: bool
    cuda: Callable[..., Any] | None = None


_OPS: dict[str, OpInfo] = {}
_FRAGMENTS: dict[str, torch.library.Library] = {}
"""Open libraries of namespaces, which keep their kernels registered."""


def define(
    name: str,
    *,
    mutates: tuple[str, ...] = (),
    fake: Callable[..., Any] | None = None,
    boundary: bool = False,
    cuda: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register the decorated function as custom op `name`, with itself as the eager reference.

    The schema comes from the annotations. `fake` gives the shapes of the outputs and may be left out when there are none.
    `cuda` runs on CUDA tensors in the reference's place, so that the reference stays plain torch code, which can be traced.
    A boundary op must return nothing and write into at least one argument.
    """

    def register(reference: Callable[..., Any]) -> CustomOpDef:
        assert name not in _OPS, f"{name} is registered twice"
        hints = typing.get_type_hints(reference)
        returns_nothing = hints.get("return", type(None)) is type(None)
        assert fake is not None or returns_nothing, f"{name} has outputs and needs a fake kernel"
        assert not boundary or (returns_nothing and mutates), f"boundary op {name} must only write into its arguments"
        # The schema is inferred from annotations, which `from __future__ import annotations` turns into strings.
        reference.__annotations__ = hints | ({"return": None} if returns_nothing else {})
        op = torch.library.custom_op(name, reference, mutates_args=mutates)
        op.register_fake(fake if fake is not None else _fake_without_outputs)
        if cuda is not None:
            # `op.register_kernel` would wrap it in two Python functions, which take as long as the dispatch itself.
            _implement(name, cuda)
        _OPS[name] = OpInfo(name, reference, mutates, boundary, cuda)
        return op

    return register


def _implement(name: str, cuda: Callable[..., Any]) -> None:
    namespace, _, leaf = name.partition("::")
    if namespace not in _FRAGMENTS:
        _FRAGMENTS[namespace] = torch.library.Library(namespace, "FRAGMENT")
    _FRAGMENTS[namespace].impl(leaf, cuda, "CUDA")


def register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: Sequence[str] = (),
    fake_impl: Callable[..., Any] | None = None,
    *,
    cuda: Callable[..., Any] | None = None,
) -> CustomOpDef:
    """Register a function as a custom op, which captured graphs hold as one call, and which patterns of passes match.

    Args:
        op_name: `namespace::name`, called as `torch.ops.namespace.name`; without a namespace that of `torchweave`.
        op_func: the implementation, whose annotations are the op's schema.
        mutates_args: names of the arguments that it writes into.
        fake_impl: returns empty outputs of the right shapes; None: the function returns nothing.
        cuda: implementation on CUDA tensors; None: `op_func`.

    Raises:
        ValueError: the name is taken or not valid, or `fake_impl` is missing.
    """
    name = op_name if "::" in op_name else f"torchweave::{op_name}"
    if not all(part.isidentifier() for part in name.split("::")) or name.count("::") != 1:
        raise ValueError(f"op_name={op_name!r} is not valid; give name, or namespace::name")
    if name in _OPS:
        raise ValueError(f"op_name={op_name!r} is registered already; choose another name")
    hints = typing.get_type_hints(op_func)
    if fake_impl is None and hints.get("return", type(None)) is not type(None):
        raise ValueError(f"{op_name} returns values; give fake_impl, which returns empty ones of the same shapes")
    parameters = inspect.signature(op_func).parameters
    if unknown := [each for each in mutates_args if each not in parameters]:
        raise ValueError(f"mutates_args names {unknown[0]!r}, which {op_name} has not; it has {', '.join(parameters)}")
    return define(name, mutates=tuple(mutates_args), fake=fake_impl, cuda=cuda)(op_func)


def define_boundary(
    name: str, call: type[Any], run: Callable[[Any], None], mutates: tuple[str, ...], order: Sequence[str] | None = None
) -> CustomOpDef:
    """Register boundary op `name`, whose arguments are the fields of the dataclass `call`, and `run` as its eager reference.

    Args:
        mutates: fields that the op writes into; they are required, whatever their default.
        order: the fields that are arguments, in the order of the schema; None: all, in the order of `call`.
    """
    hints, defaults = typing.get_type_hints(call), {field.name: field.default for field in fields(call)}
    names = list(defaults) if order is None else order

    def reference(*args: Any, **kwargs: Any) -> None:
        run(call(**dict(zip(names, args, strict=False)), **kwargs))

    parameters = []
    for each in names:
        required = each in mutates or defaults[each] is MISSING
        default = inspect.Parameter.empty if required else defaults[each]
        hint = torch.Tensor if each in mutates else hints[each]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(each, kind, default=default, annotation=hint))
    reference.__signature__ = inspect.Signature(parameters, return_annotation=None)  # pyright: ignore[reportFunctionMemberAccess]
    reference.__name__ = reference.__qualname__ = name.partition("::")[2]
    return define(name, mutates=mutates, boundary=True)(reference)


def _fake_without_outputs(*args: Any, **kwargs: Any) -> None:
    """The fake kernel of an op without outputs."""


def op_info(name: str) -> OpInfo:
    """The registration of `name`; KeyError if there is none."""
    return _OPS[name]


def cuda_kernel(name: str) -> Callable[..., Any] | None:
    """The GPU implementation of an op; None if it has none, or if the op is not the project's."""
    return _OPS[name].cuda if name in _OPS else None


def boundary_ops() -> frozenset[str]:
    """Names of the boundary ops whose modules have been imported."""
    return frozenset(name for name, info in _OPS.items() if info.boundary)
