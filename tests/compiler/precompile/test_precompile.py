"""Kernels of linear ops are built in advance, each once; a failure is a warning."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchweave.compiler.partition.split import Piece
from torchweave.compiler.passes.testing import T, graph_of
from torchweave.compiler.precompile.precompile import KernelPrecompiler, LinearKernel, linear_kernels
from torchweave.ops.linear import fused_linear, linear
from torchweave.ops.linear_config import LinearConfig

BF16 = torch.bfloat16
ROW, SPLIT = LinearConfig("row", 4, 1024, 4, 4), LinearConfig("split", 16, 64, 4, 4, norm_apart=True)
CHOICES = f"1={ROW};2=blas;48={SPLIT}"


def two_products(x: Tensor, w: Tensor, norm: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    gated = fused_linear(x, w, None, norm, 1e-5, 0.0, True, None, "silu", CHOICES)
    return gated, linear(x, w, None, f"2={ROW}") + residual


def piece() -> Piece:
    x, residual = torch.randn(1, T, 64).to(BF16), torch.randn(1, T, 32).to(BF16)
    return graph_of(two_products, [x, torch.randn(32, 64).to(BF16), torch.rand(64).to(BF16), residual])


def test_linear_has_a_kernel_per_config_and_padded_token_count() -> None:
    fused, plain = [list(linear_kernels(node)) for node in piece().module.graph.nodes if list(linear_kernels(node))]
    assert [(job.config, job.tokens) for job in fused] == [(ROW, 1), (SPLIT, 8), (SPLIT, 16), (SPLIT, 32), (SPLIT, 48)]
    assert {(job.width, job.norm, job.wide, job.residual, job.activation) for job in fused} == {
        (64, True, True, False, "silu")
    }
    assert [(job.config, job.tokens, job.norm, job.activation) for job in plain] == [
        (ROW, 1, False, None),
        (ROW, 2, False, None),
    ]


def test_scaled_products_and_their_two_residuals_are_kernels_of_their_own() -> None:
    def scaled(x: Tensor, w: Tensor, factors: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        around = (None, None, 0.0, 0.0, False, residual, None, f"1={ROW}")
        both = fused_linear(x, w, *around, 1.0, None, 0.3, 0, 0, residual)
        return both, linear(x, w, None, f"1={ROW}", 1.25, factors)

    examples = [
        torch.randn(1, T, 64).to(BF16),
        torch.randn(32, 64).to(BF16),
        torch.rand(32),
        torch.randn(1, T, 32).to(BF16),
    ]
    fused, plain = [job for node in graph_of(scaled, examples).module.graph.nodes for job in linear_kernels(node)]
    assert (fused.factor, fused.addend, fused.residual, fused.scaled_input, fused.factors) == (
        True,
        True,
        True,
        False,
        None,
    )
    assert (plain.scaled_input, plain.factors, plain.factor, plain.addend) == (True, torch.float32, False, False)


class Workers:
    """A fake of `KernelWorkers` that logs its calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.asked.append("ended")

    def begin(self, kernel_specs: list[str]) -> None:
        self.asked += kernel_specs

    def finish(self) -> list[str]:
        self.asked.append("finished")
        return []


def test_each_kernel_is_built_once_by_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers()
    told: list[str] = []

    def launch(job: LinearKernel, device: torch.device) -> None:
        workers.asked.append(f"launched {job.tokens} {job.norm}")
        if job.tokens == 8:
            raise RuntimeError("too much shared memory")

    def look(launching: Callable[[], None]) -> list[str]:
        launching()
        return [f"built {workers.asked.pop().removeprefix('launched ')}"]

    monkeypatch.setattr(LinearKernel, "launch", launch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr("torchweave.compiler.precompile.precompile.kernel_specs", look)
    monkeypatch.setattr("torchweave.compiler.precompile.precompile.missing_kernels", lambda kernel_specs: kernel_specs)
    monkeypatch.setattr("torchweave.compiler.precompile.precompile.KernelWorkers", lambda: workers)
    monkeypatch.setattr(
        "torchweave.compiler.precompile.precompile._log.warning", lambda text, *args: told.append(text % args)
    )
    with KernelPrecompiler(torch.device("cuda")) as ahead:
        ahead.submit_piece(piece())
        ahead.submit_piece(piece())
        workers.asked.remove("launched 8 True")  # a kernel whose tracing fails is built by its launch
    built, launched = workers.asked[:6], workers.asked[8:]
    assert workers.asked[6:8] == ["finished", "ended"] and len(launched) == 7
    assert {each.replace("built", "launched") for each in built} | {"launched 8 True"} == set(launched)
    assert told == ["1 kernels were not built in advance; the first error: too much shared memory"]


def test_without_a_gpu_nothing_is_built() -> None:
    with KernelPrecompiler(torch.device("cpu")) as ahead:
        ahead.submit_piece(piece())
    assert not ahead._linear_kernels
