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
    """Compile a plain module: `compiled(*tensors)` returns the result of `module(*tensors)`, without gradients.

    Args:
        module: must not change afterwards, except for in-place writes to its weights.
        inputs: example tensors by forward's parameter names, in forward's order; values are not read.
        dynamic: names of the dimensions that vary, by input and dimension: `{"x": {0: "T"}}`.
        config: see `torchweave.TorchCompileConfig`. With its `compile_cache` an equal module is loaded, not captured again.
        report: collects the events of the compilation.
        passes: replaces the default passes; `[*default_passes(), Mine()]` adds a pass to them.

    Returns:
        A callable; `.compiled_graph` holds the pieces and the code. Boundary ops run as they are. A call raises ValueError when
        inputs differ in kind from the examples, share memory that forward writes to, or when `torch.autocast` differs.

    Raises:
        TraceError: a ValueError; forward is not one graph for all sizes, or changes Python objects, with the line and the
        cause.
    """
    from torchweave.compiler.compiled_module import CompiledModule

    return CompiledModule(module, inputs, dynamic, config, report, passes)
