"""A kernel that gave up waiting for another rank: the leader says so instead of handing on what it computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.ops.collective_cases import Mirror
from torchweave.config import TorchCompileConfig
from torchweave.distributed.crew import RankFailure
from torchweave.distributed.world import TENSOR, World
from torchweave.engine.lead import LeadRunner
from torchweave.ops.collectives import register_communicator


class GaveUp(Mirror):
    """A group whose kernels have given up after the first step."""

    steps = 0

    def fault(self) -> Any:
        self.steps += 1
        return "rank 0 gave up" if self.steps > 1 else None


def fail_for(error: Exception) -> None:
    raise error


def test_B9_a_kernel_that_gave_up_is_a_failure() -> None:
    runner: Any = SimpleNamespace(
        state=None,
        plan=SimpleNamespace(config=SimpleNamespace(torch_compile_config=TorchCompileConfig())),
        ready=lambda handle: True,
        collect=lambda handle: handle,
    )
    crew: Any = SimpleNamespace(check=lambda: None, fail_for=fail_for)
    lead = LeadRunner(runner, crew, World(size=2, tensor_parallel_size=2))
    register_communicator(TENSOR, GaveUp())
    try:
        step: Any = object()
        assert lead.collect(step) is step
        with pytest.raises(RankFailure, match="gave up"):
            lead.collect(step)
    finally:
        register_communicator(TENSOR, None)
    assert World.single().fault() is None
