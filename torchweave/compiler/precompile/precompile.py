"""The project's kernels are built while Inductor builds the pieces that call them, in processes of their own.

A product says in its choices by which kernels it will run. What each needs is seen from a launch on a small weight of the product's
width; all are built and launched before anything is recorded. Kernels of other calls are built and loaded, but not launched: those
of collectives would wait for other ranks. What is missed is built when it is first needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import torch
from torch import fx

from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import Piece, normalize_call
from torchweave.compiler.precompile.kernel_jobs import KernelSpec, kernel_specs, missing_kernels
from torchweave.compiler.precompile.launches import OpCall, op_calls
from torchweave.compiler.precompile.workers import KernelWorkers
from torchweave.ops.linear import LinearFusion, run
from torchweave.ops.linear_config import LinearConfig, parse_choices

_ROWS = 256  # of the small weights: a number that kernels are specialised for as for real ones
_NO_FUSION = (None, 0.0, 0.0, False, None, None)
"""Around a product with nothing around it: what `fused_linear` takes between bias and choices."""
_log = logging.getLogger("torchweave")


@dataclass(frozen=True)
class LinearKernel:
    """A kernel: everything that it is specialised for."""

    config: LinearConfig
    tokens: int
    width: int
    dtype: torch.dtype
    bias: bool = False
    norm: bool = False
    wide: bool = False
    residual: bool = False
    activation: str | None = None

    def launch(self, device: torch.device) -> None:
        """Run the kernel once, on zeros."""
        x, w = (torch.zeros(rows, self.width, dtype=self.dtype, device=device) for rows in (self.tokens, _ROWS))
        columns = _ROWS if self.activation is None else _ROWS // 2
        out, norm = x.new_zeros(self.tokens, columns), x[0] if self.norm else None
        residual, bias = out if self.residual else None, w[:, 0].contiguous() if self.bias else None
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            run(self.config, x, w, out, LinearFusion(bias, norm, 1e-5, 0.0, self.wide, residual, self.activation))


class KernelPrecompiler:
    """Builds the kernels of the pieces that it is shown; `with` waits for all of them.

    Elsewhere than on a GPU it does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: set[LinearKernel | OpCall] = set()
        self._linear_kernels: list[LinearKernel] = []
        self._kernel_specs: list[KernelSpec] = []
        self._to_load: list[KernelSpec] = []
        self._workers: KernelWorkers | None = None

    def __enter__(self) -> KernelPrecompiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._workers is not None:
            with self._workers:
                if kind is None:
                    self._workers.finish()
        if kind is None and self._seen:
            self._load_on_gpu()

    def submit_piece(self, piece: Piece) -> None:
        """Begin to build what the piece's calls will run by."""
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
        """Order what a launch would need, once. What cannot be seen is left to the launch itself."""
        with suppress(Exception):  # of what Triton raises
            wanted = kernel_specs(launch)
            not_built = missing_kernels([spec for spec in wanted if spec not in self._kernel_specs])
            self._kernel_specs += wanted
            if not_built and self._workers is None:
                self._workers = KernelWorkers()
            if self._workers is not None:
                self._workers.begin(not_built)
            return wanted
        return []

    def _load_on_gpu(self) -> None:
        """Load what was built onto the GPU, which must not happen while a graph is recorded; build what is still missing."""
        failed: list[Exception] = []
        for put in (
            *(partial(kernel.launch, self._device) for kernel in self._linear_kernels),
            *(each.load for each in self._to_load),
        ):
            try:
                put()
            except Exception as error:  # what Triton raises
                failed.append(error)
        if failed:
            _log.warning("%d kernels were not built ahead, the first because of: %s", len(failed), failed[0])
        torch.cuda.synchronize(self._device)


def linear_kernels(node: fx.Node) -> Iterator[LinearKernel]:
    """The kernels that a product may run by, alone or as what makes a collective's operand: one for every configuration and padded
    number of tokens."""
    ops = torch.ops.torchweave
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "torchweave":
        return
    given, _ = normalize_call(op, node.args, node.kwargs)
    if op in (ops.linear.default, ops.fused_linear.default):
        _, weight, bias, *rest = given
    elif op._schema.arguments and op._schema.arguments[0].name == "producer" and given[0] == "linear":
        (_, weight, *biases), rest = given[1], [given[2]]
        bias = biases[0] if biases else None
    else:
        return
    norm, _, _, wide, residual, activation, choices = rest if len(rest) > 1 else (*_NO_FUSION, *rest)
    w, above = value(weight), 0
    for most, config in parse_choices(str(choices)):
        if config is not None:
            around = (bias is not None, norm is not None, bool(wide), residual is not None, activation)
            for padded_tokens in sorted({config.padded_tokens(tokens) for tokens in range(above + 1, most + 1)}):
                yield LinearKernel(config, min(padded_tokens, most), w.shape[1], w.dtype, *around)
        above = most
