"""Environments of results: the command that repeats a measurement."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchweave.bench.result import environment

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("program", "recorded"),
    [
        (str(CHECKOUT / "bench" / "serving" / "soak.py"), "python bench/serving/soak.py"),
        (str(CHECKOUT / "bench" / "kernels" / "linear.py"), "python bench/kernels/linear.py"),
        ("/usr/bin/torchweave", "torchweave"),
        (str(CHECKOUT / "torchweave" / "__main__.py"), "torchweave"),
    ],
)
def test_command_names_the_script_that_ran(program: str, recorded: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", [program, "--seconds", "60"])
    assert environment("cpu")["command"] == f"{recorded} --seconds 60"
