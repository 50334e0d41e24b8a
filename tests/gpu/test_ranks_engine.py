"""The whole engine over two GPUs: graphs, one rank that compiles, and an end of all within seconds when one rank dies."""

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


def test_two_gpus_answer_as_one_and_end_together(tmp_path: Path):
    assert check_life(str(tmp_path))["rank"]["compiled"] == 0


def test_a_second_engine_of_a_process_answers_as_the_first(tmp_path: Path):
    """It leaves sums to NCCL: torch shares memory with one group of a name."""
    command = [sys.executable, "-m", "tests.gpu.ranks_engine", str(tmp_path), "twice"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == {"same": True, "shared": [True, False]}
