"""The public function `torchweave.compile` and its result, a compiled module without an engine."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, TypeVar, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchweave.compiler.backend import compile_graph
from torchweave.compiler.cache.keys import autocast
from torchweave.compiler.cache.store import open_cache
from torchweave.compiler.dump import open_dump
from torchweave.compiler.explain.page import save_explanation
from torchweave.compiler.passes.base import Pass
from torchweave.compiler.runtime.compiled_graph import CompiledGraph
from torchweave.compiler.runtime.cuda_graphs import GraphPool
from torchweave.compiler.runtime.forward import call_op
from torchweave.compiler.runtime.module_state import ModuleState
from torchweave.compiler.runtime.recorded_calls import RecordedCalls
from torchweave.config.options import TorchCompileConfig
from torchweave.config.validate import check_folders, config_from
from torchweave.ops.registry import boundary_ops
from torchweave.report import Report
from torchweave.utils.suggest import suggest_keywords

Dynamic = Mapping[str, Mapping[int, str]]
ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])


@overload
def compile(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    dynamic: Dynamic | None = None,
    config: TorchCompileConfig | Mapping[str, Any] | None = None,
    report: Report | None = None,
    passes: Sequence[Pass] | None = None,
    cuda_graphs: bool = False,
    max_cuda_graphs: int = 64,
    static_outputs: bool = False,
) -> CompiledModule: ...
@overload
def compile(module: ModuleClass) -> ModuleClass: ...
@overload
def compile(
    *,
    dynamic: Dynamic | None = None,
    config: TorchCompileConfig | Mapping[str, Any] | None = None,
    report: Report | None = None,
    passes: Sequence[Pass] | None = None,
    cuda_graphs: bool = False,
    max_cuda_graphs: int = 64,
    static_outputs: bool = False,
) -> Callable[[ModuleClass], ModuleClass]: ...
@suggest_keywords
def compile(
    module: Any = None,
    inputs: Mapping[str, Tensor] | None = None,
    dynamic: Dynamic | None = None,
    config: TorchCompileConfig | Mapping[str, Any] | None = None,
    report: Report | None = None,
    passes: Sequence[Pass] | None = None,
    cuda_graphs: bool = False,
    max_cuda_graphs: int = 64,
    static_outputs: bool = False,
) -> Any:
    """Compile a plain module: `compiled(*tensors)` returns the result of `module(*tensors)`, without gradients.

    Tensors may be given by name as well: `compiled(x=tensor)`.

    Or decorate a class of modules, `@torchweave.compile(dynamic={"x": {0: "T"}})`: each of its modules is compiled at its first
    call, whose tensors are the examples, and called compiled from then on. Inside another module that is compiled or traced it
    is a part of that.

    Args:
        module: must not change afterwards, except for in-place writes to its weights; its forward may write to buffers. Of a
            module that `torch.compile` returned, the module inside is compiled. A class: see above.
        inputs: example tensors by forward's parameter names, in forward's order; values are not read. None for a class.
        dynamic: names of the dimensions that vary, by input and dimension: `{"x": {0: "T"}}`.
        config: a `torchweave.TorchCompileConfig`, or a dict of its fields. With its `compile_cache` an equal module is loaded,
            not captured again.
        report: collects the events of the compilation.
        passes: replaces the default passes; `[*default_passes(), Mine()]` adds a pass to them.
        cuda_graphs: record calls as CUDA graphs, one for each tuple of input shapes, at the first call of these shapes, and replay
            them. Boundary ops and `splitting_ops` that only write run between the graphs.
        max_cuda_graphs: largest number of recorded shapes; calls of further ones are launched plainly.
        static_outputs: return the graphs' own tensors, which the module's next call overwrites, instead of copies.

    Returns:
        A callable; `.compiled_graph` holds the pieces and the code. Boundary ops run as they are. A call raises ValueError when
        inputs differ in kind from the examples, share memory that forward writes to or require gradients, when `torch.autocast`
        differs, or when a weight was replaced or the module's mode changed (`train()`, `eval()`) since.

    Raises:
        TraceError: a ValueError; forward is not one graph for all sizes, or changes Python objects, with the line and the
        cause.
        ValueError: `cuda_graphs` for inputs that are not on a CUDA device.
    """
    if module is None or isinstance(module, type):
        compile_module = partial(
            compile,
            dynamic=dynamic,
            config=config,
            report=report,
            passes=passes,
            cuda_graphs=cuda_graphs,
            max_cuda_graphs=max_cuda_graphs,
            static_outputs=static_outputs,
        )
        compile_class = partial(_compile_class, compile_module=compile_module)
        return compile_class if module is None else compile_class(module)
    module = getattr(module, "_orig_mod", module)  # of `torch.compile(module)`
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"module must be a torch.nn.Module, not {getattr(module, '__name__', type(module).__name__)}; call a function in the "
            "forward of a module"
        )
    _validate_inputs(inputs, dynamic or {})
    assert inputs is not None, "validated"
    device = next(iter(inputs.values())).device
    if cuda_graphs:
        _validate_cuda_graphs(inputs, max_cuda_graphs)
    if isinstance(config, Mapping):
        config = config_from(TorchCompileConfig, config)
    config, report = config or TorchCompileConfig(), report or Report(show=False)
    check_folders(config)
    open_dump(config, report)
    cache, ops = open_cache(config, report), boundary_ops()
    compiled_graph = compile_graph(
        module,
        inputs,
        dynamic,
        boundary_ops=ops,
        config=config,
        cache=cache,
        report=report,
        passes=passes,
        as_eager=True,
    )
    save_explanation(None, report)
    recorded = None
    if cuda_graphs:
        recorded = RecordedCalls(compiled_graph, GraphPool(device), report, max_cuda_graphs, static_outputs)
    return CompiledModule(compiled_graph, ModuleState(module), device.type, recorded)


def _compile_class(cls: type, compile_module: Callable[[nn.Module, Mapping[str, Tensor]], CompiledModule]) -> type:
    """Let the modules of a class compile themselves at their first call; returns the class."""
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"expected a class of torch.nn.Module, not {getattr(cls, '__name__', cls)!r}")
    signature, eager_call = inspect.signature(cls.forward), cls.__call__
    # What is compiled is a module of this class: one of `cls` would compile itself while it is traced.
    plain = type(cls.__name__, (cls,), {"__call__": eager_call, "__module__": cls.__module__, "__doc__": cls.__doc__})
    plain.__qualname__ = cls.__qualname__
    compiled_modules: WeakKeyDictionary[nn.Module, tuple[nn.Module, CompiledModule]] = WeakKeyDictionary()

    @wraps(eager_call)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or type(self) is plain:
            return eager_call(self, *args, **kwargs)
        inputs = _bind_tensors(signature, self, args, kwargs)
        if self not in compiled_modules:
            twin = copy.copy(self)  # with the same parameters
            twin.__class__ = plain
            compiled_modules[self] = twin, compile_module(twin, inputs)
        twin, compiled = compiled_modules[self]
        twin.training = self.training
        return compiled(*inputs.values())

    cls.__call__ = call  # type: ignore[method-assign, assignment]
    return cls


def _bind_tensors(signature: inspect.Signature, module: nn.Module, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Tensors of a call by forward's parameter names, in its order.

    Raises:
        ValueError: an argument is no tensor.
    """
    arguments = list(signature.bind(module, *args, **kwargs).arguments.items())[1:]
    given = {name: value for name, value in arguments if value is not signature.parameters[name].default}
    for name, value in given.items():
        if signature.parameters[name].kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise ValueError(
                f"forward of a compiled class takes named parameters only, but this call gives values to {name}, which takes "
                "any number; name them, as in `def forward(self, x)`"
            )
        if not isinstance(value, Tensor):
            raise ValueError(f"forward of a compiled class takes tensors only, but {name} is a {type(value).__name__}")
    return given


class CompiledModule:
    """`compiled(*tensors)` or `compiled(name=tensor)`, which runs boundary ops as they are; see `compile`.

    Attributes:
        compiled_graph: the pieces and the code.
        cuda_graphs: recorded calls and their counts; None without `cuda_graphs`.
    """

    def __init__(
        self,
        compiled_graph: CompiledGraph,
        state: ModuleState,
        device_type: str,
        cuda_graphs: RecordedCalls | None = None,
    ) -> None:
        self.compiled_graph = compiled_graph
        self._state = state
        self.cuda_graphs = cuda_graphs
        self._device_type, self._autocast = device_type, autocast(device_type)

    def __repr__(self) -> str:
        graph = self.compiled_graph
        return f"CompiledModule(inputs=({', '.join(graph.inputs)}), pieces={len(graph.pieces)})"

    @property
    def woven(self) -> CompiledGraph:
        """Deprecated alias of `compiled_graph`."""
        warnings.warn("`.woven` is deprecated; use `.compiled_graph`", DeprecationWarning, stacklevel=2)
        return self.compiled_graph

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Any:
        if named:
            inputs = self._in_order(inputs, named)
        if len(inputs) != len(self.compiled_graph.inputs) or not all(isinstance(each, Tensor) for each in inputs):
            given = ", ".join(type(each).__name__ for each in inputs) or "nothing"
            raise ValueError(f"expected one tensor for each of {', '.join(self.compiled_graph.inputs)}, not {given}")
        if (now := autocast(self._device_type)) != self._autocast:
            raise ValueError(
                f"compiled with autocast {self._autocast} and called with autocast {now}; compile in the `torch.autocast` in "
                "which the module is called, or enter it in forward"
            )
        if not torch.compiler.is_compiling():  # as a part of another module: that one is checked
            self._state.check()
            if torch.is_grad_enabled():
                self._state.check_gradients(self.compiled_graph.inputs, inputs)
        if self.cuda_graphs is not None:
            return self.cuda_graphs(*inputs)
        return self.compiled_graph(call_op, *inputs)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a compiled module cannot be copied or pickled; copy the module that it was compiled from, and compile that"
        )

    def _in_order(self, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """All inputs in forward's order. Raises ValueError for a name that is missing, unknown, or given by position as well."""
        names = self.compiled_graph.inputs
        missing = names[len(inputs) :]
        if set(named) != set(missing):
            given = [*names[: len(inputs)], *named]
            raise ValueError(f"expected each of {', '.join(names)} once, not {', '.join(given)}")
        return (*inputs, *(named[name] for name in missing))


def _validate_inputs(inputs: Any, dynamic: Any) -> None:
    """Raise ValueError for examples that are not tensors by name, and for names of dimensions that do not exist."""
    if not isinstance(inputs, Mapping) or not inputs or not all(isinstance(each, Tensor) for each in inputs.values()):
        raise ValueError(
            'inputs must be example tensors by forward\'s parameter names, at least one: `{"x": torch.zeros(8, 64)}`'
        )
    rule = 'dynamic names dimensions of inputs, counted from 0: `{"x": {0: "T"}}`'
    if not isinstance(dynamic, Mapping) or not all(isinstance(each, Mapping) for each in dynamic.values()):
        raise ValueError(f"{rule}; not {dynamic}")
    for name, dims in dynamic.items():
        if name not in inputs:
            raise ValueError(f"{rule}; no input is named {name}; inputs are {', '.join(inputs)}")
        for dim, size_name in dims.items():
            if not (isinstance(dim, int) and 0 <= dim < inputs[name].dim() and isinstance(size_name, str)):
                raise ValueError(
                    f"{rule}; not {dim!r}: {size_name!r}, where {name} has {inputs[name].dim()} dimensions"
                )


def _validate_cuda_graphs(inputs: Mapping[str, Tensor], max_cuda_graphs: int) -> None:
    """Raise ValueError where calls with these inputs cannot be recorded."""
    if not isinstance(max_cuda_graphs, int) or max_cuda_graphs < 1:
        raise ValueError(
            f"max_cuda_graphs is the largest number of recorded shapes, at least 1; not {max_cuda_graphs!r}"
        )
    first = next(iter(inputs.values())).device
    for name, tensor in inputs.items():
        if not tensor.is_cuda:
            raise ValueError(
                f"cuda_graphs records on a CUDA device, but {name} is on {tensor.device.type}, which has no CUDA graphs; leave "
                "cuda_graphs out, or move the module and its inputs to a GPU"
            )
        if tensor.device != first:
            raise ValueError(f"cuda_graphs records on one CUDA device, but inputs are on {first} and {tensor.device}")
