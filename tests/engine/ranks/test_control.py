"""Control calls over the ranks of an engine."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.two_ranks import agreed
from tests.engine.ranks import failing_worker
from tests.engine.ranks.test_ranks import OPTIONS
from torchweave.config.peer_options import engine_config
from torchweave.distributed.launchers.local import WorkerPool
from torchweave.engine.control.calls import CALLS
from torchweave.engine.control.errors import ControlError
from torchweave.engine.llm import LLM
from torchweave.engine.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """Two tensor-parallel ranks, with the calls of `failing_worker`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fail_on", "unpicklable"):
            patch.setitem(CALLS, name, None)
        failing_worker.register()
        config = engine_config({"model": "demo", "tensor_parallel_size": 2, "profile_dir": str(folder), **OPTIONS})
        with LLM.from_config(config, worker_pool=WorkerPool("tests.engine.ranks.failing_worker:run")) as llm:
            yield llm


def check_pause_and_profile(llm: LLM, num_ranks: int) -> None:
    """Requests that are frozen in the middle continue with the same tokens, and each rank writes a trace of its steps."""
    expected = llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids
    stream = llm.stream("Once upon a time", GREEDY)
    tokens = list(next(stream).token_ids)
    llm.pause("keep")
    assert llm.is_paused() and not llm.reset_prefix_cache()
    llm.start_profile()
    llm.resume()
    tokens += [token for output in stream for token in output.token_ids]
    assert tokens == list(expected)
    files = llm.stop_profile()
    assert [Path(file).name.split(".")[0] for file in files] == [f"rank{number}" for number in range(num_ranks)]
    for file in files:
        with gzip.open(file, "rt") as text:
            names = {event.get("name", "") for event in json.load(text)["traceEvents"]}
        assert any(name.startswith("aten::") for name in names), f"{file} has no operations"


def test_requests_are_frozen_and_profiled_on_both_ranks(llm: LLM) -> None:
    check_pause_and_profile(llm, 2)
    assert agreed(llm, steps=60)


def test_a_profile_of_some_steps_ends_by_itself(llm: LLM) -> None:
    llm.start_profile(num_steps=3)
    with pytest.raises(ControlError, match="A profile runs already; stop it first"):
        llm.start_profile()
    llm.generate("Once", GREEDY)
    assert len(llm.stop_profile()) == 2
    with pytest.raises(ControlError, match="No profile runs; start one first"):
        llm.stop_profile()
    with pytest.raises(ValueError, match="num_steps=0 must be a whole number, at least 1"):
        llm.start_profile(num_steps=0)


def test_an_error_names_the_rank_and_the_engine_serves_on(llm: LLM) -> None:
    expected = llm.generate("The cat", GREEDY)[0].outputs[0].token_ids
    stream = llm.stream("The cat", GREEDY)
    tokens = list(next(stream).token_ids)
    for number in (0, 1):
        with pytest.raises(ControlError, match=f"^Rank {number}: OSError: No space left on device$"):
            llm.call("fail_on", number=number)
    with pytest.raises(ControlError, match=r"^Rank 1: .*pickle"):
        llm.call("unpicklable")
    with pytest.raises(ValueError, match=r"The arguments of fail_on cannot be sent to the ranks .*; give plain data"):
        llm.call("fail_on", number=lambda: 1)
    assert llm.call("fail_on", number=2, weights=bytes(8 << 20), seconds=1.0) == [(0, 8 << 20), (1, 8 << 20)]
    tokens += [token for output in stream for token in output.token_ids]
    assert tokens == list(expected) and agreed(llm, steps=60)


def test_profiles_of_a_folder_that_cannot_be_written(llm: LLM, folder: Path) -> None:
    blocked = folder / "blocked"
    blocked.write_text("a file")
    with pytest.raises(ControlError, match=r"^Rank 0: .*blocked.* Rank 1: .*blocked"):
        llm.call("start_profile", folder=str(blocked))
    llm.start_profile(num_steps=1)  # none was left running
    llm.generate("Once", GREEDY)
    assert len(llm.stop_profile()) == 2
    with pytest.raises(ValueError, match="set profile_dir"):
        llm.call("start_profile", folder=None)
