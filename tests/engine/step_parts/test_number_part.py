"""A further part of a step is a file for the host and one for the device, found by entry points of an installed package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.ranks.test_ranks import OPTIONS
from tests.engine.step_parts.number_host import NumberPart
from torchweave.engine.llm import LLM
from torchweave.engine.request import SamplingParams

PROMPTS = ["Once upon a time", "The cat sat", "1 + 1 ="]
HOST = "[torchweave.step_parts]\nnumber = tests.engine.step_parts.number_host:PART\n"
DEVICE = "[torchweave.runner_parts]\nnumber = tests.engine.step_parts.number_device:PART\n"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, entry_points: str) -> None:
    """Install a package with entry points; ranks are started with the same `sys.path`."""
    info = folder / "number_part-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: number-part\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=["one rank", "two ranks"])
def test_numbers_travel_and_return(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, HOST + DEVICE)
    ranks = options.get("tensor_parallel_size", 1)
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    seeded = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, seed=3)
    with LLM("demo", **OPTIONS, **options) as llm:
        expected = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, plain)]
        part = llm.engine.scheduler.parts.held["number"]
        assert isinstance(part, NumberPart)
        assert not part.exchanges, "no request used it"
        outputs = llm.generate(PROMPTS, [plain, seeded, plain])
        assert [each.outputs[0].token_ids for each in outputs] == [expected[0], expected[1][:6], expected[2]]
        assert not part.slots and part not in llm.engine.scheduler.parts.active
    exchanges = list(part.exchanges.values())
    assert len(exchanges) >= 6, "steps of the request with a seed"
    assert any(len(each.slots) == 3 for each in exchanges) and all(any(each.sent) for each in exchanges[:6])
    for each in exchanges:
        if each.returned:
            np.testing.assert_allclose(each.returned, ranks * np.array(each.sent))
    assert sum(bool(each.returned) for each in exchanges) >= 6


def test_a_part_without_a_file_for_the_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, HOST)
    with pytest.raises(
        ValueError, match=r"step part number has no runner part; add an entry point torchweave\.runner_parts"
    ):
        LLM("demo", **OPTIONS)


def test_the_option_plugins_leaves_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, HOST + DEVICE)
    with LLM("demo", **OPTIONS, plugins=()) as llm:
        assert "number" not in llm.engine.scheduler.parts.held and "number" not in llm.engine.runner.parts
