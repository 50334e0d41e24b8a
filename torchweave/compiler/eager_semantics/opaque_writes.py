"""Indexed writes and copies as ops of their own, which Inductor calls and does not fuse: `torchweave::opaque_index_put` and others.

They have the schemas and results of aten's.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
_library = torch.library.Library("torchweave", "FRAGMENT")


def _define(op: Any) -> Any:
    """The opaque form of one of aten's functional writes."""
    name = f"opaque_{op.name().removeprefix('aten::').strip('_').replace('.', '_')}"
    schema = str(op._schema)
    _library.define(name + schema[schema.index("(") :])
    _library.impl(name, op, "CompositeExplicitAutograd")
    # Scatter's results are contiguous, index_put's not.
    torch.library.register_fake(f"torchweave::{name}", op, lib=_library)
    return getattr(torch.ops.torchweave, name).default


OPAQUE: dict[Any, Any] = {
    op: _define(op)
    for op in (
        aten.index_put.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
        aten.scatter_reduce.two,
    )
}
OPAQUE[aten._unsafe_index_put.default] = OPAQUE[aten.index_put.default]
"""The opaque form of each write."""
OPAQUE_CLONE = _define(aten.clone.default)
