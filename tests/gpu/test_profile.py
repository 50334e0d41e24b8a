"""`bench profile` on a GPU: kernels inside CUDA graphs are counted, and their time fits into the step's."""

from __future__ import annotations

import json

import pytest
import torch

from torchweave.cli.main import main

pytestmark = pytest.mark.gpu


def test_kernels_of_recorded_steps(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "bench",
        "profile",
        "--model",
        "demo",
        "--running",
        "4",
        "--input_len",
        "100",
        "--steps",
        "4",
        "--attention_backend",
        "triton",  # whose kernels have names of ours
        "--json",
        "--quiet",
    ]
    before = torch.cuda.current_stream()
    assert main(argv) == 0
    assert torch.cuda.current_stream() == before
    decode, mixed = json.loads(capsys.readouterr().out)["steps"]
    assert decode["how"] == {"decode_graph": 4} and decode["rows"] == 4
    assert set(mixed["how"]) <= {"mixed_graph", "piecewise_graph"} and mixed["tokens"] > 200
    launches = sum(kernel["launches"] for kernel in decode["kernels"] if "paged_decode" in kernel["name"])
    assert launches >= 1 and launches == int(launches), "one graph, four times: no kernel was missed"
    for step in (decode, mixed):
        names = " ".join(kernel["name"] for kernel in step["kernels"])
        assert "paged_decode" in names and "ProfilerStep" not in names
        assert 0 < step["busy_ms"] <= sum(kernel["us"] for kernel in step["kernels"]) / 1e3 + 1e-6
        assert step["idle"], "nobody keeps a GPU busy without a gap"
        assert step["busy_ms"] < 3 * step["ms"], "the profiler slows a step, but not by that much"
