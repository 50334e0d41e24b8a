"""The public function `torchweave.compile`; importing it imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchweave.compiler.passes.base import Pass
    from torchweave.config import TorchCompileConfig
    from torchweave.report import Report


def compile(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    config: TorchCompileConfig | None = None,
    report: Report | None = None,
    passes: Sequence[Pass] | None = None,
) -> Callable[..., Any]:
    """Compile a plain module: `compiled(*tensors)` computes what `module(*tensors)` does, without gradients.

    Args:
        module: must not change afterwards, but for values of its weights that are written in place.
        inputs: example tensors by forward's parameter names, in forward's order; values are not read.
        dynamic: names of the dimensions that vary, by input and dimension: `{"x": {0: "T"}}`.
        config: how; see `torchweave.TorchCompileConfig`. With its `compile_cache` an equal module is loaded, not captured again.
        report: collects what was decided.
        passes: what runs instead of the stack's own passes; `[*default_passes(), Mine()]` adds one to them.

    Returns:
        A callable; `.compiled_graph` holds the pieces and the code. Boundary ops are called as they are. It raises
        ValueError for what it
        was not compiled for: inputs of another kind, or that share memory where forward writes to one; another `torch.autocast`.

    Raises:
        TraceError: a ValueError; forward is no one graph for every size, or changes Python objects, with the line and the cause.
    """
    from torchweave.compiler.compiled_module import CompiledModule

    return CompiledModule(module, inputs, dynamic, config, report, passes)
