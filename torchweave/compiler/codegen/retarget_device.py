"""Retarget compiled code to another GPU index: ranks share one compile cache, whose entries name the GPU that built them."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

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

    FxGraphCache.cache_hit_post_compile = staticmethod(prepare_retargeted)  # type: ignore[method-assign]
    try:
        yield
    finally:
        FxGraphCache.cache_hit_post_compile = staticmethod(prepare)  # type: ignore[method-assign]


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
