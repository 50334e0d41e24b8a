"""Built pieces: a piece as Inductor code or as plain FX code, with a minimal call path.

A built piece takes one list and empties it, so that each tensor is freed after its last use in the piece.
"""

from __future__ import annotations

import functools
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import torchweave.compiler.eager_semantics.opaque_writes  # noqa: F401 (defines ops that cached pieces call)
from torchweave.compiler.eager_semantics.registry import inductor_options as eager_options
from torchweave.compiler.eager_semantics.registry import while_building
from torchweave.compiler.eager_semantics.size_answers import dynamic_shapes_mode
from torchweave.compiler.ir.mutation import has_mutations
from torchweave.compiler.ir.size_ranges import MAX_SIZE
from torchweave.compiler.partition.split import Piece
from torchweave.config.options import TorchCompileConfig

Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class BuiltPiece:
    """A callable piece.

    Attributes:
        digest: digest of the piece.
        call: takes the list of inputs and constants, returns the outputs.
        built: `inductor`, `fx` or `cache`.
        seconds: duration of the build or load.
        artifact: Inductor's artifact for the cache; None for FX code.
        code: Inductor's generated code; "" for FX code.
        passes: fields of each ATen pass's event.
        ranges: token-count ranges in which passes give different graphs; this build is for the last.
        variants: builds for other token counts; a call takes the first that covers its token count.
        max_size: largest dynamic size that the build supports.
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
    """A piece built for token counts from `low` to `high`; None for an open end."""

    low: int
    high: int | None
    built: BuiltPiece


def inductor_options(config: TorchCompileConfig) -> dict[str, Any]:
    """Inductor settings of a piece. CUDA graphs are recorded by the stack, never inside a piece.

    Pointwise kernels get one configuration. Autotuning would compile and time up to six at the example's token count, without
    a gain: steps take 0.998 to 1.008 times as long with it on an H100 (decision 0105). Rows are not padded to 128 bytes: cuBLASLt
    adds a bias in its epilogue only where the result is contiguous, else a copy of the bias precedes the product (33 us before
    69 us for 4096 rows of 4304 in Gemma 3's tower on an H100).
    """
    return {
        "triton.cudagraphs": False,
        "triton.autotune_pointwise": False,
        "size_asserts": config.debug,
        "alignment_asserts": config.debug,
        "nan_asserts": False,
        "comprehensive_padding": False,
    }


def build_fx(piece: Piece) -> BuiltPiece:
    """Build a piece as the Python code of its graph."""
    begin = time.monotonic()
    call = _boxed(functools.partial(_forward(piece.module), piece.module))
    if any(node.target is torch.amp.autocast_mode._enter_autocast for node in piece.module.graph.nodes):
        call = restore_autocast()(call)
    return BuiltPiece(piece.digest, call, "fx", time.monotonic() - begin)


def _boxed(function: Callable[..., Any]) -> Boxed:
    """A function of several arguments as one of a list, which it empties."""

    def call(args: list[Any]) -> Sequence[Any]:
        taken = tuple(args)
        args.clear()
        return function(*taken)

    return call


@contextmanager
def restore_autocast() -> Iterator[None]:
    """Restore autocast on exit: running a graph enters it and, where an operation raises, does not leave it."""
    kinds = ("cpu", "cuda")
    states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        for kind, enabled, dtype in states:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        if torch.autocast_increment_nesting() > depth:  # of a region that was not left, with its casts of weights
            torch.clear_autocast_cache()
        while torch.autocast_decrement_nesting() >= depth:
            pass


def _forward(module: fx.GraphModule) -> Callable[..., Any]:
    """The module's code with each op's C function bound by name.

    An `OpOverload` adds a Python call, which for the 60 operations of a layer is a quarter of the host time.
    """
    source = module.graph.python_code("self")
    namespace = dict(source.globals)

    def bind(match: re.Match[str]) -> str:
        space, name, overload = match.groups()
        op: Any = getattr(getattr(getattr(torch.ops, space), name), overload)
        namespace[f"{space}_{name}_{overload}"] = op._op
        return f"{space}_{name}_{overload}("

    code = re.sub(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)\(", bind, source.src)
    exec(compile(code, "<torchweave piece>", "exec"), namespace)
    return namespace["forward"]


_INCOMPLETE_MATCH = "Not all inputs to pattern found"
"""Error of Inductor's pattern for `x[torch.randperm(n)]` with a dynamic n."""


class InductorUnsupportedError(Exception):
    """Inductor does not support an operation of a piece, on any machine; the message is the reason."""


def build_inductor(
    piece: Piece,
    config: TorchCompileConfig,
    tune: bool = False,
    as_eager: bool = False,
    finish: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> BuiltPiece:
    """Build a piece with Inductor, with the captured symbolic sizes.

    Args:
        tune: let Inductor time candidate kernels on the device, which pays where sizes are fixed.
        as_eager: correct what Inductor computes otherwise than eager code, see `eager_semantics`.
        finish: adds to the options, see `passes.inductor_graph`.

    Raises:
        InductorUnsupportedError: Inductor does not support an operation of the piece.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import standalone_compile

    from torchweave.compiler.codegen.index_strides import zero_strides_early
    from torchweave.compiler.codegen.row_reductions import keep_rows_in_registers
    from torchweave.compiler.codegen.size_symbols import bind_size_symbols

    patches = {
        **inductor_options(config),
        "max_autotune": tune,
        **eager_options(as_eager),
    }
    begin = time.monotonic()
    context = TracingContext(piece.fake_mode)
    with (
        torch.no_grad(),
        dynamic_shapes_mode(config.dynamic_shapes),
        while_building(as_eager),
        keep_rows_in_registers(),
        bind_size_symbols(),
        zero_strides_early(),
        tracing(context),
        warnings.catch_warnings(),
    ):
        # Models compute RoPE in float32 on purpose; the hint to use TF32 would only clutter the terminal.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        try:
            artifact = standalone_compile(
                piece.module,
                piece.examples(),
                dynamic_shapes="from_tracing_context",
                options={"config_patches": finish(patches)},
            )
        except Exception as error:
            inner = getattr(error, "inner_exception", None)
            # A compiler or disk error is no missing support.
            is_unsupported = type(inner).__name__ in ("LoweringException", "AssertionError")
            text = str(inner if is_unsupported else error)
            if not is_unsupported and not text.startswith(_INCOMPLETE_MATCH):
                raise
            raise InductorUnsupportedError(text.partition("\n")[0] or "an assertion in Inductor failed") from error
    call, seconds = fast_callable(artifact, piece.module), time.monotonic() - begin
    return BuiltPiece(piece.digest, call, "inductor", seconds, artifact, generated_code(artifact))


def fast_callable(artifact: Any, module: fx.GraphModule) -> Boxed:
    """The cheapest correct callable of an artifact.

    AOTAutograd wraps Inductor's code to handle mutated and aliased inputs. A piece without in-place operations calls the
    innermost function instead, which halves the host time of a small piece.
    """
    inner = None if has_mutations(module.graph) else compiled_fx_graph(artifact)
    return _boxed(artifact) if inner is None else inner.current_callable


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def generated_code(artifact: Any) -> str:
    """Inductor's generated code with its kernels; "" if not found."""
    return getattr(compiled_fx_graph(artifact), "source_code", "") or ""


def compiled_fx_graph(artifact: Any) -> Any:
    """The `CompiledFxGraph` behind an artifact's wrappers; None if not found."""
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
        references = [_content(cell) for cell in getattr(thing, "__closure__", None) or ()]
        references += [getattr(thing, "__wrapped__", None), getattr(thing, "__self__", None)]
        queue += [item for item in references if callable(item)]
    return None
