"""The compiler: `torchweave.compile(module, inputs, dynamic=...)`, and the interfaces that the engine uses."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchweave.compiler.api import compile as compile
    from torchweave.compiler.backend import compile_graph as compile_graph
    from torchweave.compiler.cache.store import CompileCache as CompileCache
    from torchweave.compiler.cache.store import open_cache as open_cache
    from torchweave.compiler.errors import InvariantError as InvariantError
    from torchweave.compiler.errors import TraceError as TraceError
    from torchweave.compiler.passes.base import GraphPass as GraphPass
    from torchweave.compiler.passes.base import Pass as Pass
    from torchweave.compiler.passes.base import PassResult as PassResult
    from torchweave.compiler.passes.manager import default_passes as default_passes
    from torchweave.compiler.passes.matcher import Match as Match
    from torchweave.compiler.passes.pattern import Fusion as Fusion
    from torchweave.compiler.runtime.compiled_graph import CompiledGraph as CompiledGraph
    from torchweave.compiler.runtime.forward import eager_forward as eager_forward

LAZY_EXPORTS = {
    "CompileCache": "torchweave.compiler.cache.store",
    "Fusion": "torchweave.compiler.passes.pattern",
    "GraphPass": "torchweave.compiler.passes.base",
    "InvariantError": "torchweave.compiler.errors",
    "Match": "torchweave.compiler.passes.matcher",
    "Pass": "torchweave.compiler.passes.base",
    "PassResult": "torchweave.compiler.passes.base",
    "TraceError": "torchweave.compiler.errors",
    "CompiledGraph": "torchweave.compiler.runtime.compiled_graph",
    "eager_forward": "torchweave.compiler.runtime.forward",
    "compile": "torchweave.compiler.api",
    "default_passes": "torchweave.compiler.passes.manager",
    "open_cache": "torchweave.compiler.cache.store",
    "compile_graph": "torchweave.compiler.backend",
}


def __getattr__(name: str) -> Any:
    if name not in LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(LAZY_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY_EXPORTS})
