"""Kernels of products are built while Inductor builds the pieces that call them, in processes of their own.

A product says in its choices by which kernels it will run. What each needs is seen from a launch on a small weight of the product's
width; all are built and launched before anything is recorded. What is missed is built when it is first needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import fx

from torchweave.compile.kernel_orders import missing, orders
from torchweave.compile.kernel_workers import KernelWorkers
from torchweave.compile.split import Piece, normalize
from torchweave.compile.symbols import value
from torchweave.ops.linear import Around, run
from torchweave.ops.linear_config import LinearConfig, read_choices

_ROWS = 256  # of the small weights: a number that kernels are specialised for as for real ones
_ALONE = (None, 0.0, 0.0, False, None, None)
"""Around a product with nothing around it: what `fused_linear` takes between bias and choices."""
_log = logging.getLogger("torchweave")


@dataclass(frozen=True)
class Job:
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
            run(self.config, x, w, out, Around(bias, norm, 1e-5, 0.0, self.wide, residual, self.activation))


class KernelsAhead:
    """Builds the kernels of products that it is shown; `with` waits for all of them. Elsewhere than on a GPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: set[Job] = set()
        self._workers: KernelWorkers | None = None

    def __enter__(self) -> KernelsAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._workers is not None:
            with self._workers:
                if kind is None:
                    self._workers.finish()
        if kind is None and self._jobs:
            self._launch()

    def see(self, piece: Piece) -> None:
        """Begin to build what the piece's products will run by."""
        if self._device.type != "cuda":
            return
        for node in piece.module.graph.nodes:
            for job in jobs_of(node):
                if job not in self._jobs:
                    self._jobs.add(job)
                    with suppress(Exception):  # of what Triton raises; the launch at the end will tell it
                        self._begin(job)

    def _begin(self, job: Job) -> None:
        absent = missing(orders(lambda: job.launch(self._device)))
        if absent and self._workers is None:
            self._workers = KernelWorkers()
        if self._workers is not None:
            self._workers.begin(absent)

    def _launch(self) -> None:
        """Load what was built onto the GPU, which must not happen while a graph is recorded; build what is still missing."""
        failed: list[Exception] = []
        for job in self._jobs:
            try:
                job.launch(self._device)
            except Exception as error:  # what Triton raises
                failed.append(error)
        if failed:
            _log.warning("%d kernels were not built ahead, the first because of: %s", len(failed), failed[0])
        torch.cuda.synchronize(self._device)


def jobs_of(node: fx.Node) -> Iterator[Job]:
    """The kernels that a product may run by: one for every configuration and padded number of tokens."""
    ops = torch.ops.torchweave
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op not in (ops.linear.default, ops.fused_linear.default):
        return
    (_, weight, bias, *rest), _ = normalize(op, node.args, node.kwargs)
    norm, _, _, wide, residual, activation, choices = rest if len(rest) > 1 else (*_ALONE, *rest)
    w, above = value(weight), 0
    for most, config in read_choices(str(choices)):
        if config is not None:
            around = (bias is not None, norm is not None, bool(wide), residual is not None, activation)
            for padded in sorted({config.padded(tokens) for tokens in range(above + 1, most + 1)}):
                yield Job(config, min(padded, most), w.shape[1], w.dtype, *around)
        above = most
