"""Pieces: each distinct piece is built once, by Inductor or as plain FX code, and called with as little as can be between.

A built piece is a function of one list, which it empties: tensors die as soon as the piece has no use for them.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchweave.compiler.ir.mutation import has_mutations
from torchweave.compiler.ir.size_ranges import MAX_SIZE
from torchweave.compiler.ir.symbols import dynamic_shapes_mode
from torchweave.compiler.partition.split import Piece
from torchweave.config.options import TorchCompileConfig

Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class BuiltPiece:
    """A piece that can be called.

    Attributes:
        digest: of the pieces that it stands for.
        call: takes the list of inputs and constants, returns the outputs.
        built: `inductor`, `fx` or `cache`.
        seconds: how long that took.
        artifact: what Inductor made, to be kept in the cache; None when there is nothing to keep.
        code: what Inductor generated, as text; "" for a piece that it did not build.
        passes: facts of what each pass of the ATen stage did to it.
        ranges: of the token count in which passes make different things of the piece; this one is for the last.
        variants: the same piece for some token counts; the first that holds is called instead.
        max_size: the largest dynamic size that it was built for.
    """

    digest: str
    call: Boxed
    built: str
    seconds: float
    artifact: Any = None
    code: str = ""
    passes: tuple[dict[str, Any], ...] = ()
    variants: tuple[Variant, ...] = ()
    ranges: tuple[tuple[int, int | None], ...] = ()
    max_size: int = MAX_SIZE


@dataclass(frozen=True)
class Variant:
    """A piece built for token counts from `low` to `high`; None: for all above."""

    low: int
    high: int | None
    built: BuiltPiece


def inductor_options(config: TorchCompileConfig) -> dict[str, Any]:
    """Inductor settings that a piece is built with. Graphs are recorded by the stack, never inside a piece.

    Kernels that go through elements one by one have one configuration, not up to six that are compiled and timed at the example's
    number of tokens: steps take as long (0.998 to 1.008 times with them, on an H100; decision 0105).
    """
    return {
        "triton.cudagraphs": False,
        "triton.autotune_pointwise": False,
        "size_asserts": config.debug,
        "alignment_asserts": config.debug,
        "nan_asserts": False,
    }


def build_fx(piece: Piece) -> BuiltPiece:
    """The piece as the Python code of its graph."""
    begin = time.monotonic()
    module, forward = piece.module, _forward(piece.module)

    def call(args: list[Any]) -> Sequence[Any]:
        taken = tuple(args)
        args.clear()
        return forward(module, *taken)

    return BuiltPiece(piece.digest, call, "fx", time.monotonic() - begin)


def _forward(module: fx.GraphModule) -> Callable[..., Any]:
    """The module's code with the C function of each op bound by name: an `OpOverload` is a Python call around it, which over the
    60 operations of a layer is a quarter of the host's time."""
    source = module.graph.python_code("self")
    namespace = dict(source.globals)

    def bind(found: re.Match[str]) -> str:
        space, name, overload = found.groups()
        op: Any = getattr(getattr(getattr(torch.ops, space), name), overload)
        namespace[f"{space}_{name}_{overload}"] = op._op
        return f"{space}_{name}_{overload}("

    code = re.sub(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)\(", bind, source.src)
    exec(compile(code, "<torchweave piece>", "exec"), namespace)
    return namespace["forward"]


class InductorUnsupportedError(Exception):
    """Inductor has no code for an operation of a piece, whatever the machine; the reason is its text."""


def build_inductor(piece: Piece, config: TorchCompileConfig, tune: bool = False) -> BuiltPiece:
    """The piece as Inductor's code for the device, sizes symbolic as they were captured.

    Args:
        tune: let Inductor try candidates on the device, which is of use where sizes are fixed.

    Raises:
        InductorUnsupportedError: it fails on an operation.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import standalone_compile

    begin = time.monotonic()
    context = TracingContext(piece.fake_mode)
    with torch.no_grad(), dynamic_shapes_mode(config.dynamic_shapes), tracing(context), warnings.catch_warnings():
        # Models that compute RoPE in float32 mean it: a hint to round it more is no help to whoever reads the terminal.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        try:
            artifact = standalone_compile(
                piece.module,
                piece.examples(),
                dynamic_shapes="from_tracing_context",
                options={"config_patches": {**inductor_options(config), "max_autotune": tune}},
            )
        except Exception as error:
            inner = getattr(error, "inner_exception", None)
            if type(inner).__name__ != "LoweringException":  # what a compiler or the disk said is another matter
                raise
            raise InductorUnsupportedError(str(inner).splitlines()[0]) from error
    call, seconds = fast_callable(artifact, piece.module), time.monotonic() - begin
    return BuiltPiece(piece.digest, call, "inductor", seconds, artifact, generated_code(artifact))


def fast_callable(artifact: Any, module: fx.GraphModule) -> Boxed:
    """The cheapest correct way to call an artifact.

    Around the code that Inductor generated, AOTAutograd keeps wrappers for mutated and aliased inputs. A piece without
    in-place operations needs none of them, and calls the innermost function: about half of the cost of a small piece.
    """
    inner = None if has_mutations(module.graph) else compiled_fx_graph(artifact)
    if inner is not None:
        return inner.current_callable

    def call(args: list[Any]) -> Sequence[Any]:
        taken = tuple(args)
        args.clear()
        return artifact(*taken)

    return call


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a cell that was never filled
        return None


def generated_code(artifact: Any) -> str:
    """The text of what Inductor generated, kernels included; "" when it is not there."""
    return getattr(compiled_fx_graph(artifact), "source_code", "") or ""


def compiled_fx_graph(artifact: Any) -> Any:
    """What Inductor generated, found behind the wrappers of an artifact: its `CompiledFxGraph`; None when it is not there."""
    from torch._inductor.output_code import CompiledFxGraph

    seen: set[int] = set()
    queue = [getattr(artifact, "_compiled_fn", None)]
    while queue and len(seen) < 200:
        thing = queue.pop(0)
        if thing is None or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, CompiledFxGraph):
            return thing
        held = [_content(cell) for cell in getattr(thing, "__closure__", None) or ()]
        held += [getattr(thing, "__wrapped__", None), getattr(thing, "__self__", None)]
        queue += [item for item in held if callable(item)]
    return None
