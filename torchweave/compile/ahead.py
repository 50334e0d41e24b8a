"""Kernels of products are built while Inductor builds the pieces that call them: both mostly wait for other programs.

A product says in its choices by which kernels it will run. Each is built by a launch on a small weight of the product's width, on
threads of its own; all are done before anything is recorded. What is missed is built when it is first needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import fx

from torchweave.compile.split import Piece, normalize
from torchweave.compile.symbols import value
from torchweave.ops.linear import Around, run
from torchweave.ops.linear_config import LinearConfig, read_choices

_THREADS = 4
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
        with torch.cuda.device(device):  # each thread has a current GPU of its own
            self._launch(device)

    def _launch(self, device: torch.device) -> None:
        x, w = (torch.zeros(rows, self.width, dtype=self.dtype, device=device) for rows in (self.tokens, _ROWS))
        columns = _ROWS if self.activation is None else _ROWS // 2
        out, norm = x.new_zeros(self.tokens, columns), x[0] if self.norm else None
        residual, bias = out if self.residual else None, w[:, 0].contiguous() if self.bias else None
        run(self.config, x, w, out, Around(bias, norm, 1e-5, 0.0, self.wide, residual, self.activation))


class KernelsAhead:
    """Builds the kernels of products that it is shown; `with` waits for all of them. Elsewhere than on a GPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(_THREADS, "torchweave-kernels") if device.type == "cuda" else None
        self._jobs: dict[Job, Future[None]] = {}

    def __enter__(self) -> KernelsAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(cancel_futures=kind is not None)
        failed = [
            each.exception() for each in self._jobs.values() if not each.cancelled() and each.exception() is not None
        ]
        if failed:
            _log.warning("%d kernels were not built ahead, the first because of: %s", len(failed), failed[0])
        torch.cuda.synchronize(self._device)

    def see(self, piece: Piece) -> None:
        """Begin to build what the piece's products will run by."""
        if self._pool is None:
            return
        for node in piece.module.graph.nodes:
            for job in jobs_of(node):
                if job not in self._jobs:
                    self._jobs[job] = self._pool.submit(job.launch, self._device)


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
