"""Serialize Inductor's generated code so that loading it does not import the compiler.

Loading a plain artifact imports Inductor's lowerings, scheduler and code generators (300 modules, 0.9 of 5 s of imports), because
generated code starts with imports that it mostly does not use, and the artifact cache hashes torch's source. Here the code keeps
only the imports that it uses, and names the GPU that runs it: ranks share one compile cache.
"""

from __future__ import annotations

import ast
import contextlib
import pickle
import re
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.fx.node import map_aggregate

_EXTERN = "extern_kernels"
"""Namespace of torch's own kernels in generated code; importing it imports every lowering."""


def serialize_code(graph: Any, artifacts: bytes | None = None) -> bytes:
    """Pickle a `CompiledFxGraph` with its kernels and their tuned configurations. Raises the errors of pickling.

    Args:
        artifacts: Inductor's cache artifacts of the graph.
    """
    by_type = _artifacts_by_type(artifacts) if artifacts else {}
    copied = _serializable_copy(graph, [content for _, content in by_type.get("inductor", ())])
    copied.source_code = strip_unused_imports(graph.source_code)
    copied.cache_key = f"{graph.cache_key}_lean"  # file name of the generated module
    # Names a function of a module that imports every decomposition; a built graph does not call it.
    copied.fx_kwargs = {name: value for name, value in graph.fx_kwargs.items() if name != "get_decomp_fn"}
    return pickle.dumps((by_type.get("autotune", []), copied))


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


def _artifacts_by_type(artifacts: bytes) -> dict[str, list[tuple[str, bytes]]]:
    """Inductor's cache artifacts, as pairs of key and content."""
    from torch.compiler._cache import CacheArtifactManager

    found = CacheArtifactManager.deserialize(artifacts) or {}
    return {kind: [(each.key, each.content) for each in entries] for kind, entries in found.items()}


def _serializable_copy(graph: Any, stored: Iterable[bytes]) -> Any:
    """A copy of a graph that can be pickled.

    Kernels of a graph from Inductor's disk cache have launchers, and torch refuses to pickle them. Inductor's cache artifact is
    that graph before its kernels were loaded.

    Args:
        stored: pickled graphs of Inductor's cache artifacts.
    """
    for each in map(pickle.loads, stored):
        if each.cache_key == graph.cache_key:
            return each
    copied = copy(graph)
    copied.prepare_for_serialization()
    return copied


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


_INDEX = r"(_DeviceGuard\(|set_device\(|get_raw_stream\(|\bcuda:|\bindex=){}\b"


def retarget_code(code: str, old: int, new: int) -> str:
    """Replace the device index in Inductor's generated code."""
    return re.sub(_INDEX.format(old), rf"\g<1>{new}", code)


def rename_device(graph: fx.Graph, device: torch.device) -> None:
    """Replace GPU devices in all arguments of a graph by `device`; no effect if that is no GPU."""
    if device.type != "cuda":
        return

    def replace_device(argument: Any) -> Any:
        if isinstance(argument, str) and re.fullmatch(r"cuda:\d+", argument):
            return str(device)
        return device if isinstance(argument, torch.device) and argument.type == "cuda" else argument

    for node in graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, replace_device), map_aggregate(node.kwargs, replace_device)  # type: ignore[assignment]


@contextlib.contextmanager
def retarget_on_load(old: int, new: int) -> Iterator[None]:
    """Context in which graphs that Inductor loads from its cache are retargeted from GPU `old` to GPU `new`.

    Retargeting comes before the load: loading opens a CUDA context on the named GPU, half a gigabyte for every rank.
    """
    if old == new:
        yield
        return
    from torch._inductor.codecache import FxGraphCache

    prepare = FxGraphCache.cache_hit_post_compile

    def prepare_retargeted(graph: Any, *rest: Any) -> Any:
        retarget(graph, old, new)
        return prepare(graph, *rest)

    with mock.patch.object(FxGraphCache, "cache_hit_post_compile", staticmethod(prepare_retargeted)):
        yield


def retarget(graph: Any, old: int, new: int) -> None:
    """Retarget an unpickled `CompiledFxGraph` in place before its first run: code, kernels and launchers."""
    code = retarget_code(graph.source_code, old, new)
    if graph._triton_bundle is not None:
        keys = dict(zip(_kernel_keys(graph.source_code), _kernel_keys(code), strict=True))
        graph._triton_bundle = _retarget_bundle(graph._triton_bundle, keys, new)
    graph.source_code, graph.cache_key = code, f"{graph.cache_key}_on_{new}"
    graph.device_idxs = {new for _ in graph.device_idxs}


def _retarget_bundle(bundle: Any, keys: dict[str, str], new: int) -> Any:
    launchers = []
    for each in bundle.static_autotuners:
        kernel = each.kernel
        kernel.device_props = kernel.device_props._replace(index=new)
        kernel.triton_meta = {**kernel.triton_meta, "device": new}
        for result in kernel.compile_results:
            result.compile_meta["device"] = new
        launchers.append(replace(each, cache_key=keys.get(each.cache_key, each.cache_key)))
    kernels = [replace(each, device=new) for each in bundle.kernel_artifacts]
    return replace(bundle, kernel_artifacts=kernels, static_autotuners=launchers)


def _kernel_keys(code: str) -> list[str]:
    """Inductor's in-memory keys of the kernels in its code: hashes of their source."""
    from torch._inductor.async_compile import CompiledTritonKernels

    calls = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    texts = [
        call.args[1].value
        for call in calls
        if ast.unparse(call.func) == "async_compile.triton" and isinstance(call.args[1], ast.Constant)
    ]
    return [CompiledTritonKernels.key(text) for text in texts if isinstance(text, str)]
