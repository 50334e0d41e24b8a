"""The whole engine over two GPUs: graphs, one rank that compiles, and an end of all within seconds when one rank dies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.ranks_engine import answers, options
from torchweave.engine.llm import LLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_E3_B9_two_gpus_answer_as_one_and_end_together(tmp_path: Path):
    with LLM("demo", **options(str(tmp_path))) as alone:
        expected = answers(alone)
    # A process of its own: one that has lost a rank may hold kernels that never end.
    command = [sys.executable, "-m", "tests.gpu.ranks_engine", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    seen = json.loads(run.stdout.splitlines()[-1])
    assert seen["tokens"] == expected
    assert set(seen["counts"]) <= {"decode_graph", "mixed_graph"}, seen["counts"]
    assert seen["agreed"]
    assert seen["rank"]["device"] == "cuda:1" and seen["rank"]["loaded"] > 0 and seen["rank"]["compiled"] == 0
    killed = seen["killed"]
    assert "killed by SIGKILL" in killed["error"] and max(killed["heard"], killed["gone"]) < 10, killed
    assert seen["shutdown"] < 10
