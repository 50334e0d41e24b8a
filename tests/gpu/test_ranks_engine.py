"""The whole engine over two GPUs: graphs, one rank that compiles, and an end of all within seconds when one rank dies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.ranks_engine import check_life

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_E3_B9_two_gpus_answer_as_one_and_end_together(tmp_path: Path):
    assert check_life(str(tmp_path))["rank"]["compiled"] == 0
