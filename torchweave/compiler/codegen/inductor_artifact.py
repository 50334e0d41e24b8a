"""What Inductor generated for a piece, kept so that it is loaded without what generated it.

To load an artifact, Inductor imports its lowerings, its scheduler and its code generators (300 modules, 0.9 of 5 s of imports): its
generated code begins with a list of imports, most of which it does not use, and its cache of artifacts looks up keys of torch's
source. Here the generated code is kept with only the imports that it uses, and loaded by what runs it.
"""

from __future__ import annotations

import ast
import pickle
from copy import copy
from typing import Any

import torch

from torchweave.compiler.codegen.retarget_device import retarget

_EXTERN = "extern_kernels"
"""What generated code calls torch's own kernels by; to import it is to import every lowering."""


def serialize_code(graph: Any, artifacts: bytes | None = None) -> bytes:
    """A `CompiledFxGraph`, with its kernels where it has any, and the configurations that these were tuned to.

    Args:
        artifacts: what Inductor kept while it made the graph.

    Raises what pickling raises.
    """
    kept = copy(graph)
    kept.prepare_for_serialization()
    kept.source_code = strip_unused_imports(graph.source_code)
    kept.cache_key = f"{graph.cache_key}_lean"  # names the file that the code is run from
    return pickle.dumps((_tuned(artifacts) if artifacts else [], kept))


def deserialize_code(payload: bytes, built_on: int = 0, runs_on: int = 0) -> Any:
    """What `serialize_code` wrote on one GPU, a `CompiledFxGraph` that can be called on that or another one of its kind.

    Args:
        built_on, runs_on: the GPUs' indices.
    """
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.runtime.autotune_cache import AutotuneCacheArtifact
    from torch._inductor.triton_bundler import TritonBundler
    from torch._inductor.utils import BoxedBool

    tuned, graph = pickle.loads(payload)
    for name, configuration in tuned:
        AutotuneCacheArtifact(name, configuration).populate_cache()
    if built_on != runs_on:
        retarget(graph, built_on, runs_on)
    if graph._triton_bundle is not None:
        TritonBundler.read_and_emit(graph._triton_bundle)
    constants = CompiledFxGraphConstants()
    graph.after_deserialization(constants)
    graph.post_compile((), constants, {"cudagraphs": BoxedBool(False), "is_backward": False})
    return graph


def _tuned(artifacts: bytes) -> list[tuple[str, bytes]]:
    """Files of Inductor's folder that say which configuration of a kernel was the fastest: their names and contents."""
    from torch.compiler._cache import CacheArtifactManager

    found = CacheArtifactManager.deserialize(artifacts) or {}
    return [(each.key, each.content) for each in found.get("autotune", ())]


def strip_unused_imports(code: str) -> str:
    """Generated code without the imports from Inductor that it does not use; every other line stays where it was.

    `extern_kernels` are made of torch's functions, where they are just that: `extern_kernels.mm` is `torch.mm`.
    """
    tree = ast.parse(code)
    lines = code.splitlines()
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("torch._inductor."):
            continue
        if node.lineno != node.end_lineno:
            continue
        names = [alias.asname or alias.name for alias in node.names]
        if used.isdisjoint(names):
            lines[node.lineno - 1] = ""
        elif names == [_EXTERN] and (kernels := _kernels_of_torch(tree)):
            listed = ", ".join(f"{name}=torch.{name}" for name in sorted(kernels))
            lines[node.lineno - 1] = f"import types; {_EXTERN} = types.SimpleNamespace({listed})"
    return "\n".join(lines) + "\n"


def _kernels_of_torch(tree: ast.Module) -> set[str]:
    """The extern kernels that code uses, if each is torch's function of the same name; else none."""
    from torch._inductor.select_algorithm import extern_kernels

    nodes = list(ast.walk(tree))
    names = [node for node in nodes if isinstance(node, ast.Name) and node.id == _EXTERN]
    used = [node for node in nodes if isinstance(node, ast.Attribute) and node.value in names]
    kernels = {node.attr for node in used}
    own = all(hasattr(torch, name) and getattr(extern_kernels, name) is getattr(torch, name) for name in kernels)
    return kernels if own and len(used) == len(names) else set()
