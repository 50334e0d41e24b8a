"""Build the project's kernels in separate processes while Inductor builds the pieces that call them.

The kernels of a piece are found by tracing launches, which run on operands of many sizes and execute nothing:

- Linear ops name their kernels in their `choices`. A launch on a small weight of the same width shows each; all are built, and
  launched before a CUDA graph is recorded.
- Collectives, and ops whose kernels depend on their operands alone (norms, activations and the like), are called at each
  number of tokens. Their kernels are built and loaded, but not launched: collectives would wait for other ranks. A
  collective's linear producer is handled as a linear op.

A kernel that is missed is built at its first launch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from torchweave.compiler.ir.collectives import collective_group, op_schema
from torchweave.compiler.ir.mutation import op_overload
from torchweave.compiler.ir.symbols import expression, size_at, value
from torchweave.compiler.partition.split import Piece, normalize_call
from torchweave.compiler.precompile.kernel_jobs import KernelSpec, kernel_specs, missing_kernels
from torchweave.compiler.precompile.workers import KernelWorkers
from torchweave.distributed.symmetric_memory import fake_collectives
from torchweave.ops.collectives.user_buffers import operand_shape
from torchweave.ops.linear import LinearFusion, run
from torchweave.ops.linear_config import LinearConfig, parse_choices
from torchweave.ops.registry import cuda_kernel

_ROWS = 256  # of the small weights: Triton specializes kernels for this number as for real ones
_NO_FUSION = (None, 0.0, 0.0, False, None, None)
"""Arguments of `fused_linear` between bias and choices for a linear op without fusion."""
_NO_SCALING = (1.0, None, 1.0, 0, 0)
"""Last arguments of a linear op that multiplies neither its input nor its output."""
_TOKENS = tuple(1 << power for power in range(13))
"""Up to 4096: kernels change with the size of their operand, at sizes further apart than these."""
_MAX_OPERAND_BYTES = 64 << 20
_LINEAR_OPS = frozenset(f"torchweave::{name}" for name in ("linear", "fused_linear", "fp8_linear"))
"""They choose their kernels when they run, and not only among the project's."""
_log = logging.getLogger("torchweave")


class KernelPrecompiler:
    """Builds the kernels of submitted pieces; the exit of its `with` waits for all of them. Does nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: set[LinearKernel | OpCall] = set()
        self._linear_kernels: list[LinearKernel] = []
        self._kernel_specs: list[KernelSpec] = []
        self._to_load: list[KernelSpec] = []
        self._workers: KernelWorkers | None = None

    def __enter__(self) -> KernelPrecompiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._workers is not None:
            with self._workers:
                if kind is None:
                    self._workers.finish()
        if kind is None and self._seen:
            self._load_on_gpu()

    def submit_piece(self, piece: Piece) -> None:
        """Begin to build the kernels of a piece."""
        if self._device.type != "cuda":
            return
        for node in piece.module.graph.nodes:
            for kernel in linear_kernels(node):
                if self._is_new(kernel):
                    self._linear_kernels.append(kernel)
                    self._begin(partial(kernel.launch, self._device))
        for call in filter(self._is_new, op_calls(piece)):
            self._to_load += self._begin(partial(call.launch, self._device))

    def _is_new(self, thing: LinearKernel | OpCall) -> bool:
        is_new = thing not in self._seen
        self._seen.add(thing)
        return is_new

    def _begin(self, launch: Callable[[], None]) -> list[KernelSpec]:
        """Begin to build the kernels of a launch, each once. A launch that cannot be traced builds them itself."""
        with suppress(Exception):  # Triton may raise anything
            specs = kernel_specs(launch)
            missing = missing_kernels([spec for spec in specs if spec not in self._kernel_specs])
            self._kernel_specs += specs
            if missing and self._workers is None:
                self._workers = KernelWorkers()
            if self._workers is not None:
                self._workers.begin(missing)
            return specs
        return []

    def _load_on_gpu(self) -> None:
        """Load the kernels onto the GPU, which is forbidden while a CUDA graph is recorded; build those that are missing."""
        errors: list[Exception] = []
        for load in (
            *(partial(kernel.launch, self._device) for kernel in self._linear_kernels),
            *(each.load for each in self._to_load),
        ):
            try:
                load()
            except Exception as error:  # Triton may raise anything
                errors.append(error)
        if errors:
            _log.warning("%d kernels were not built in advance; the first error: %s", len(errors), errors[0])
        torch.cuda.synchronize(self._device)


@dataclass(frozen=True)
class LinearKernel:
    """A kernel of a linear op: everything that it is specialized for."""

    config: LinearConfig
    tokens: int
    width: int
    dtype: torch.dtype
    bias: bool = False
    norm: bool = False
    wide: bool = False
    residual: bool = False
    activation: str | None = None
    scaled_input: bool = False
    factors: torch.dtype | None = None
    factor: bool = False
    addend: bool = False

    def launch(self, device: torch.device) -> None:
        """Run the kernel once, on zeros."""
        x, w = (torch.zeros(rows, self.width, dtype=self.dtype, device=device) for rows in (self.tokens, _ROWS))
        columns = _ROWS if self.activation is None else _ROWS // 2
        out, norm = x.new_zeros(self.tokens, columns), x[0] if self.norm else None
        residual, bias = out if self.residual else None, w[:, 0].contiguous() if self.bias else None
        factors = None if self.factors is None else w.new_zeros(_ROWS, dtype=self.factors)
        scaling = (2.0 if self.scaled_input else 1.0, factors, 2.0 if self.factor else 1.0, 0, 0)
        around = (bias, norm, 1e-5, 0.0, self.wide, residual, self.activation)
        with _on_device(device):
            run(self.config, x, w, out, LinearFusion(*around, *scaling, out if self.addend else None))


def linear_kernels(node: fx.Node) -> Iterator[LinearKernel]:
    """The kernels of a linear op, alone or as the producer of a collective's operand: one per configuration and padded number
    of tokens."""
    ops = torch.ops.torchweave
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "torchweave":
        return
    args, _ = normalize_call(op, node.args, node.kwargs)
    scaling, addend = _NO_SCALING, None
    if op is ops.linear.default:
        _, weight, bias, choices, *scaling = args
        rest = [choices]
    elif op is ops.fused_linear.default:
        _, weight, bias, *rest, addend = args
        rest, scaling = rest[:7], rest[7:]
    elif op._schema.arguments and op._schema.arguments[0].name == "producer" and args[0] == "linear":
        (_, weight, *biases), rest = args[1], [args[2]]
        bias = biases[0] if biases else None
    else:
        return
    norm, _, _, wide, residual, activation, choices = rest if len(rest) > 1 else (*_NO_FUSION, *rest)
    w, previous = value(weight), 0
    input_factor, factors, factor, *_ = scaling
    scaled = (input_factor != 1.0, None if factors is None else value(factors).dtype, factor != 1.0, addend is not None)
    for most, config in parse_choices(str(choices)):
        if config is not None:
            fusion = (bias is not None, norm is not None, bool(wide), residual is not None, activation, *scaled)
            for padded_tokens in sorted({config.padded_tokens(tokens) for tokens in range(previous + 1, most + 1)}):
                yield LinearKernel(config, min(padded_tokens, most), w.shape[1], w.dtype, *fusion)
        previous = most


@dataclass(frozen=True)
class Operand:
    """A tensor argument; sizes and strides may depend on the token count. Without strides it is contiguous."""

    sizes: tuple[Any, ...]
    dtype: torch.dtype
    strides: tuple[Any, ...] | None = None

    def shape(self, tokens: int) -> tuple[int, ...]:
        return tuple(size_at(size, tokens) for size in self.sizes)

    def bytes(self, tokens: int) -> int:
        return math.prod(self.shape(tokens)) * self.dtype.itemsize

    def make(self, tokens: int, device: torch.device) -> Tensor:
        if self.strides is None:
            return torch.empty(self.shape(tokens), dtype=self.dtype, device=device)
        strides = [size_at(stride, tokens) for stride in self.strides]
        return torch.empty_strided(self.shape(tokens), strides, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class OpCall:
    """A call of an op in a piece: everything that its kernels depend on.

    Attributes:
        group: of a collective's ranks; None for other ops.
        arguments: in the order of the op's schema, tensors as `Operand`.
    """

    op: torch._ops.OpOverload
    group: str | None
    arguments: tuple[Any, ...]

    def launch(self, device: torch.device) -> None:
        """Call the op on uninitialized operands of each number of tokens; only for `kernel_specs`, which executes no kernel."""
        with _on_device(device):
            if self.group is None:
                self._launch_all(cuda_kernel(self.op._schema.name) or self.op, device)
                return
            with fake_collectives(self.group) as has_kernels:
                if has_kernels:
                    self._launch_all(self.op, device)

    def _launch_all(self, function: Callable[..., Any], device: torch.device) -> None:
        for tokens in _TOKENS:
            if max(each.bytes(tokens) for each in self._operands()) > _MAX_OPERAND_BYTES:
                return
            function(*(_materialize(each, tokens, device) for each in self.arguments))

    def _operands(self) -> Iterator[Operand]:
        for each in self.arguments:
            yield from (part for part in (each if isinstance(each, tuple) else (each,)) if isinstance(part, Operand))


def op_calls(piece: Piece) -> list[OpCall]:
    """The distinct calls of a piece whose kernels can be traced."""
    calls: dict[OpCall, None] = {}
    for node in piece.module.graph.nodes:
        group = collective_group(node)
        if (group is not None or _has_kernels(node)) and (call := _op_call(node, group)) is not None:
            calls[call] = None
    return list(calls)


def _has_kernels(node: fx.Node) -> bool:
    schema = op_schema(node)
    return schema is not None and schema.name not in _LINEAR_OPS and cuda_kernel(schema.name) is not None


class _ComputedArgument(Exception):
    """An argument is computed by the graph, and is not a tensor."""


def _op_call(node: fx.Node, group: str | None) -> OpCall | None:
    """The call as values; None for an op of another project, or with computed arguments."""
    op = op_overload(node.target)
    assert op is not None, "a node with a schema calls an op"
    args, keywords = normalize_call(op, node.args, node.kwargs)
    if keywords or op.namespace != "torchweave":
        return None
    names = [argument.name for argument in op._schema.arguments]
    try:
        plain = [_plain(each) for each in args]
    except _ComputedArgument:
        return None
    if "producer" in names:
        by_name = dict(zip(names, args, strict=True))
        shape = operand_shape(str(by_name["producer"]), [value(each) for each in by_name["operands"]])
        operand = Operand(_sizes(shape), by_name["dtype"])
        copied = {"producer": "copy", "operands": (operand,), "choices": "", "slot": 0}
        plain = [copied.get(name, each) for name, each in zip(names, plain, strict=True)]
    return OpCall(op, group, tuple(plain))


def _plain(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        fake = value(argument)
        if not isinstance(fake, Tensor):
            raise _ComputedArgument
        return Operand(_sizes(fake.shape), fake.dtype, _sizes(fake.stride()))
    return tuple(map(_plain, argument)) if isinstance(argument, (tuple, list)) else argument


def _sizes(shape: Any) -> tuple[Any, ...]:
    """Sizes that can be compared and hashed."""
    return tuple(map(expression, shape))


def _materialize(argument: Any, tokens: int, device: torch.device) -> Any:
    if isinstance(argument, Operand):
        return argument.make(tokens, device)
    return [_materialize(each, tokens, device) for each in argument] if isinstance(argument, tuple) else argument


def _on_device(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
