"""The corrections of Dynamo and Inductor by which compiled code computes what eager code computes, one file a kind.

A correction is a context that is entered while torch traces a forward (`while_tracing`) or while Inductor builds a piece
(`while_building`), a pass over the captured graph (`correct`), or a pass over Inductor's graph or another option of it
(`inductor_options`). Those of `_TRACING` and `_ALWAYS` are for every forward: their causes occur in models that an engine serves.
The others are for `torchweave.compile`, whose modules may do anything, and cost an engine nothing. A new kind of difference from
eager code is a new file here and a line below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torchweave.compiler.eager_semantics.arithmetic import exact_arithmetic
from torchweave.compiler.eager_semantics.attention_patterns import compare_attention_patterns
from torchweave.compiler.eager_semantics.branches import record_branches
from torchweave.compiler.eager_semantics.dropout import remove_idle_dropout
from torchweave.compiler.eager_semantics.overlapping_writes import refuse_overlapping_writes
from torchweave.compiler.eager_semantics.overlaps import exact_overlap
from torchweave.compiler.eager_semantics.size_indices import select_by_sizes, unpack_sizes
from torchweave.compiler.ir.graph import CapturedGraph

Correction = Callable[[], AbstractContextManager[None]]

_TRACING: tuple[Correction, ...] = (record_branches, select_by_sizes, unpack_sizes)
_ALWAYS: tuple[Correction, ...] = (exact_overlap,)
_AS_EAGER: tuple[Correction, ...] = (compare_attention_patterns, exact_arithmetic)
_CAPTURED: tuple[Callable[[CapturedGraph], None], ...] = (refuse_overlapping_writes, remove_idle_dropout)


@contextmanager
def while_tracing() -> Iterator[None]:
    """The corrections of Dynamo, while it traces a forward in the body."""
    with ExitStack() as stack:
        for correction in _TRACING:
            stack.enter_context(correction())
        yield


@contextmanager
def while_building(as_eager: bool) -> Iterator[None]:
    """The corrections of Inductor, while it builds a piece in the body.

    Args:
        as_eager: enter those of `torchweave.compile`, too.
    """
    with ExitStack() as stack:
        for correction in (*_ALWAYS, *(_AS_EAGER if as_eager else ())):
            stack.enter_context(correction())
        yield


def correct(graph: CapturedGraph) -> None:
    """The corrections of a captured graph of `torchweave.compile`.

    Raises:
        TraceError: eager code raises an error, and compiled code would not.
    """
    for correction in _CAPTURED:
        correction(graph)


def inductor_options(as_eager: bool) -> dict[str, Any]:
    """Options of Inductor: its passes over graphs, and casts to 16 bits between operations as in eager code."""
    from torchweave.compiler.eager_semantics.copy_before_write import CopyBeforeWrite
    from torchweave.compiler.eager_semantics.input_writes import KeepInputs, NoteResults
    from torchweave.compiler.eager_semantics.small_integers import WidenSmallIntegers

    if not as_eager:
        return {"post_grad_custom_post_pass": CopyBeforeWrite()}
    return {
        "emulate_precision_casts": True,
        "joint_custom_pre_pass": NoteResults(),
        "post_grad_custom_post_pass": [WidenSmallIntegers(), CopyBeforeWrite(), KeepInputs()],
    }
