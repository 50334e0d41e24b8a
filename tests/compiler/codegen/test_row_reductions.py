"""Reductions of rows in registers, in the Triton code that Inductor writes for an absent GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from torch._inductor.virtualized import V

from tests.compiler.toy import BOUNDARY, DYNAMIC, example, toy
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.codegen.pieces import build_inductor
from torchweave.compiler.partition.split import split
from torchweave.config.options import TorchCompileConfig


@pytest.fixture(scope="module")
def codes() -> dict[str, tuple[str, str]]:
    """Inductor's own code, and that with rows in registers."""
    command = [sys.executable, "-m", "tests.compiler.codegen.hopper_code"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("rows", ["rows of SigLIP", "the longest rows"])
def test_rows_are_read_once(rows: str, codes: dict[str, tuple[str, str]]) -> None:
    loop, registers = codes[rows]
    assert "@triton_heuristics.reduction(" in loop and "for r0_offset in" in loop
    assert "@triton_heuristics.persistent_reduction(" in registers and "for r0_offset in" not in registers
    assert (loop.count("tl.load(in_ptr0"), registers.count("tl.load(in_ptr0")) == (2, 1)


@pytest.mark.parametrize("case", ["longer rows", "a sum of columns", "a softmax of columns"])
def test_other_reductions_are_inductors(case: str, codes: dict[str, tuple[str, str]]) -> None:
    default, ours = codes[case]
    assert default == ours and "@triton_heuristics.reduction(" in ours


def test_pieces_are_built_with_these_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor as inductor

    own, seen = inductor.standalone_compile, []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        seen.append("should_use_persistent_reduction" in vars(V.choices))
        return own(*args, **kwargs)

    monkeypatch.setattr(inductor, "standalone_compile", recorded)
    graph = capture(toy(1), example(), DYNAMIC, "backed_size_oblivious")
    graph.boundary_ops = BOUNDARY
    build_inductor(split(graph)[-1], TorchCompileConfig())
    assert seen == [True] and "should_use_persistent_reduction" not in vars(V.choices)
