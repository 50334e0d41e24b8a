"""`bench profile` on a GPU: kernels inside recordings are seen, and what they take fits into what a step takes."""

from __future__ import annotations

import json

import pytest

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
        "--json",
        "--quiet",
    ]
    assert main(argv) == 0
    decode, mixed = json.loads(capsys.readouterr().out)["steps"]
    assert decode["how"] == {"decode_graph": 4} and decode["rows"] == 4
    assert set(mixed["how"]) <= {"mixed_graph", "piecewise_graph"} and mixed["tokens"] > 200
    for step in (decode, mixed):
        names = " ".join(kernel["name"] for kernel in step["kernels"])
        assert "paged_decode" in names
        assert 0 < step["busy_ms"] <= sum(kernel["us"] for kernel in step["kernels"]) / 1e3 + 1e-6
        assert step["busy_ms"] < 3 * step["ms"], "the profiler slows a step, but not by that much"
