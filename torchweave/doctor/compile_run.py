"""Compile the subject with the stack, and compare its results with the eager run at each size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torchweave.compiler.backend import compile_graph
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.errors import CompileError
from torchweave.compiler.runtime.compiled_graph import CompiledGraph
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.doctor.eager_run import SIZES, EagerResult, fixed_seed
from torchweave.doctor.subject import Subject
from torchweave.report import Report


@dataclass
class CompileResult:
    """Result of compiling the subject.

    Attributes:
        compiled_graph: None after an error.
        error: error of the compilation.
        unbacked_error: error of a capture with unbacked sizes.
        mismatches: size -> difference from the eager result.
        report: all events of the compilation.
    """

    report: Report = field(default_factory=lambda: Report(show=False))
    compiled_graph: CompiledGraph | None = None
    error: CompileError | None = None
    unbacked_error: CompileError | None = None
    mismatches: dict[int, str] = field(default_factory=dict)

    def captured(self) -> list[fx.GraphModule]:
        return [piece.module for piece in self.compiled_graph.pieces] if self.compiled_graph is not None else []


def compile_subject(subject: Subject, eager_result: EagerResult) -> CompileResult:
    """Compile with the default `dynamic_shapes` and compare; then capture with unbacked sizes."""
    compile_result = CompileResult()
    inputs = dict(zip(subject.inputs, subject.arguments(23), strict=True))
    config = TorchCompileConfig(enable_inductor=False, compile_cache=False)
    try:
        compile_result.compiled_graph = compile_graph(
            subject.module,
            inputs,
            subject.dynamic,
            boundary_ops=subject.boundary_ops,
            config=config,
            report=compile_result.report,
        )
    except CompileError as error:
        compile_result.error = error
        return compile_result
    for variant, size in enumerate(SIZES):
        if size in eager_result.results:
            why = _compare(compile_result.compiled_graph, subject.arguments(size, variant), eager_result.results[size])
            if why:
                compile_result.mismatches[size] = why
    if subject.dynamic:
        try:
            capture(subject.module, inputs, subject.dynamic, "unbacked")
        except CompileError as error:
            compile_result.unbacked_error = error
    return compile_result


def _compare(compiled_graph: CompiledGraph, arguments: list[Any], expected: Any) -> str:
    try:
        with torch.no_grad(), fixed_seed():
            result = compiled_graph(call_op, *arguments)
    except Exception as error:  # whatever a wrong graph raises
        return f"it raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    pairs = zip(_tensors(result), _tensors(expected), strict=False)
    for one, other in pairs:
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"it returns {one.dtype}{list(one.shape)} instead of {other.dtype}{list(other.shape)}"
        loose = one.dtype in (torch.float16, torch.bfloat16)
        rtol, atol = (3e-2, 1e-2) if loose else (1e-3, 1e-4)
        if not torch.allclose(one.double(), other.double(), rtol=rtol, atol=atol, equal_nan=True):
            return f"results differ by up to {(one.double() - other.double()).abs().max().item():.3g}"
    return ""


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
