"""Answers about symbolic sizes, and how dynamic sizes are traced and built.

torch leaves relations such as `T // 2 <= T` and the sign of indices such as `-(T // 2)` open (see `size_relations`), and adds
guards where it looks for elements of the target of a copy that share memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from torchweave.compiler.ir.size_relations import resolve_index, static_answer
from torchweave.compiler.ir.symbols import expression, free_symbols
from torchweave.config.options import DynamicShapes


@contextlib.contextmanager
def dynamic_shapes_mode(mode: DynamicShapes) -> Iterator[None]:
    """Trace and build under the rules of one `dynamic_shapes` mode, with torch's answers about sizes completed."""
    from torch._subclasses import fake_impls
    from torch.fx.experimental import _config, symbolic_shapes

    symbolic_config: Any = _config
    copy_op, fake_ops = torch.ops.aten.copy.default, fake_impls.op_implementations_dict
    static_eval, slice_index = symbolic_shapes._static_eval_sym_bool, fake_impls._compute_slice_index
    fake_copy = fake_ops[copy_op]

    def complete_answer(condition: Any) -> bool | None:
        answer = static_eval(condition)
        return static_answer(condition) if answer is None else answer

    def complete_index(size: Any, index: Any) -> Any:
        found = slice_index(size, index)
        if found is None and not symbolic_shapes.free_unbacked_symbols((size, index)):
            return resolve_index(size, index)
        return found

    def copy_without_guards(fake_mode: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if fake_mode.shape_env is None else fake_mode.shape_env.suppress_guards():
            return fake_copy(fake_mode, *args, **kwargs)

    with (
        symbolic_config.patch(backed_size_oblivious=mode == "backed_size_oblivious"),
        mock.patch.object(torch, "_debug_has_internal_overlap", _has_internal_overlap),
        mock.patch.object(symbolic_shapes, "_static_eval_sym_bool", complete_answer),
        mock.patch.object(fake_impls, "_compute_slice_index", complete_index),
        mock.patch.dict(fake_ops, {copy_op: copy_without_guards}),
    ):
        yield


_torch_has_internal_overlap: Any = torch._debug_has_internal_overlap  # type: ignore[attr-defined]


def _has_internal_overlap(tensor: Tensor) -> int:
    """torch's check of the target of `copy_` (1: elements share memory, 2: not known) without a guard on symbolic sizes.

    torch's own asks of each size whether it is above 1, which would exclude the sizes at which a slice has one row.
    """
    if not free_symbols(tensor):
        return _torch_has_internal_overlap(tensor)
    sizes = zip(map(expression, tensor.shape), map(expression, tensor.stride()), strict=True)
    return 1 if any(stride == 0 and size not in (0, 1) for size, stride in sizes) else 2
