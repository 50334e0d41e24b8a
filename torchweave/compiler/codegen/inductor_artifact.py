"""Serialize Inductor's generated code so that loading it does not import the compiler.

Loading a plain artifact imports Inductor's lowerings, scheduler and code generators (300 modules, 0.9 of 5 s of imports), because
generated code starts with imports that it mostly does not use, and the artifact cache hashes torch's source. Here the code keeps
only the imports that it uses.
"""

from __future__ import annotations

import ast
import pickle
from copy import copy
from typing import Any

import torch

from torchweave.compiler.codegen.retarget_device import retarget

_EXTERN = "extern_kernels"
"""Namespace of torch's own kernels in generated code; importing it imports every lowering."""


def serialize_code(graph: Any, artifacts: bytes | None = None) -> bytes:
    """Pickle a `CompiledFxGraph` with its kernels and their tuned configurations. Raises the errors of pickling.

    Args:
        artifacts: Inductor's cache artifacts of the graph.
    """
    copied = copy(graph)
    copied.prepare_for_serialization()
    copied.source_code = strip_unused_imports(graph.source_code)
    copied.cache_key = f"{graph.cache_key}_lean"  # file name of the generated module
    return pickle.dumps((_tuned(artifacts) if artifacts else [], copied))


def deserialize_code(payload: bytes, built_on: int = 0, runs_on: int = 0) -> Any:
    """A callable `CompiledFxGraph` from the bytes of `serialize_code`.

    Args:
        built_on, runs_on: indices of two GPUs of one kind.
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
    """Inductor's autotuning results: file names and contents."""
    from torch.compiler._cache import CacheArtifactManager

    by_type = CacheArtifactManager.deserialize(artifacts) or {}
    return [(each.key, each.content) for each in by_type.get("autotune", ())]


def strip_unused_imports(code: str) -> str:
    """Generated code without its unused imports from Inductor; line numbers stay.

    The import of `extern_kernels` is replaced where each used kernel is torch's function: `extern_kernels.mm` is `torch.mm`.
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
    """The extern kernels in use, if each is torch's function of the same name; else none."""
    from torch._inductor.select_algorithm import extern_kernels

    nodes = list(ast.walk(tree))
    names = [node for node in nodes if isinstance(node, ast.Name) and node.id == _EXTERN]
    used = [node for node in nodes if isinstance(node, ast.Attribute) and node.value in names]
    kernels = {node.attr for node in used}
    own = all(hasattr(torch, name) and getattr(extern_kernels, name) is getattr(torch, name) for name in kernels)
    return kernels if own and len(used) == len(names) else set()
