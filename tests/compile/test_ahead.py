"""Kernels built ahead: every kernel that a product may run by, each once, and a failure is a warning."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from torchweave.compile.ahead import Job, KernelsAhead, jobs_of
from torchweave.compile.passes.testing import T, graph_of
from torchweave.compile.split import Piece
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


def test_a_product_has_a_kernel_for_every_configuration_and_padded_number_of_tokens() -> None:
    fused, plain = [list(jobs_of(node)) for node in piece().module.graph.nodes if list(jobs_of(node))]
    assert [(job.config, job.tokens) for job in fused] == [(ROW, 1), (SPLIT, 8), (SPLIT, 16), (SPLIT, 32), (SPLIT, 48)]
    assert {(job.width, job.norm, job.wide, job.residual, job.activation) for job in fused} == {
        (64, True, True, False, "silu")
    }
    assert [(job.config, job.tokens, job.norm, job.activation) for job in plain] == [
        (ROW, 1, False, None),
        (ROW, 2, False, None),
    ]


def test_each_is_built_once_and_what_fails_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Job] = []
    told: list[str] = []

    def launch(job: Job, device: torch.device) -> None:
        built.append(job)
        if job.tokens == 8:
            raise RuntimeError("too much shared memory")

    monkeypatch.setattr(Job, "launch", launch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr("torchweave.compile.ahead._log.warning", lambda text, *args: told.append(text % args))
    ahead = KernelsAhead(torch.device("cpu"))
    ahead._pool = ThreadPoolExecutor(2)
    with ahead:
        ahead.see(piece())
        ahead.see(piece())
    assert len(built) == len(set(built)) == 7
    assert told == ["1 kernels were not built ahead, the first because of: too much shared memory"]


def test_without_a_gpu_nothing_is_built() -> None:
    with KernelsAhead(torch.device("cpu")) as ahead:
        ahead.see(piece())
    assert not ahead._jobs
