"""The compile stack: `torchweave.compile(module, inputs, dynamic=...)`, and the parts that an engine is built from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchweave.compile.backend import weave as weave
    from torchweave.compile.cache import CompileCache as CompileCache
    from torchweave.compile.cache import open_cache as open_cache
    from torchweave.compile.eager import broken as broken
    from torchweave.compile.errors import InvariantError as InvariantError
    from torchweave.compile.errors import TraceError as TraceError
    from torchweave.compile.passes.base import GraphPass as GraphPass
    from torchweave.compile.passes.base import Pass as Pass
    from torchweave.compile.passes.base import PassResult as PassResult
    from torchweave.compile.passes.manager import default_passes as default_passes
    from torchweave.compile.passes.matcher import Match as Match
    from torchweave.compile.passes.pattern import Fusion as Fusion
    from torchweave.compile.woven import Woven as Woven
    from torchweave.config.options import TorchCompileConfig
    from torchweave.report import Report

LAZY_EXPORTS = {
    "CompileCache": "cache",
    "Fusion": "passes.pattern",
    "GraphPass": "passes.base",
    "InvariantError": "errors",
    "Match": "passes.matcher",
    "Pass": "passes.base",
    "PassResult": "passes.base",
    "TraceError": "errors",
    "Woven": "woven",
    "broken": "eager",
    "default_passes": "passes.manager",
    "open_cache": "cache",
    "weave": "backend",
}


def __getattr__(name: str) -> Any:
    if name not in LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{LAZY_EXPORTS[name]}"), name)


def compile_module(
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
        A callable; `.woven` holds the pieces and the code. Boundary ops are called as they are. It raises ValueError for what it
        was not compiled for: inputs of another kind, or that share memory where forward writes to one; another `torch.autocast`.

    Raises:
        TraceError: a ValueError; forward is no one graph for every size, or changes Python objects, with the line and the cause.
    """
    from torchweave.compile.direct import Compiled

    return Compiled(module, inputs, dynamic, config, report, passes)


class _CallableModule(ModuleType):
    """`torchweave.compile` names a package and a function; importing the one must not hide the other."""

    def __call__(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return compile_module(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
if TYPE_CHECKING:
    compile = compile_module
else:
    compile = sys.modules[__name__]
