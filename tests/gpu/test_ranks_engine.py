"""The whole engine over two GPUs: graphs, one compiling rank, and shutdown within seconds of a rank's death."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.ranks_engine import check_life

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_two_gpus_give_the_tokens_of_one_and_shut_down_together(tmp_path: Path):
    seen = check_life(str(tmp_path))
    assert seen["rank"]["compiled"] == 0, (seen["rank"]["why"], seen["built by the leader"])


def test_second_engine_in_a_process_gives_the_same_tokens(tmp_path: Path):
    """The second engine uses NCCL: torch shares symmetric memory with one group of a name only."""
    command = [sys.executable, "-m", "tests.gpu.ranks_engine", str(tmp_path), "twice"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == {"same": True, "shared": [True, False]}
