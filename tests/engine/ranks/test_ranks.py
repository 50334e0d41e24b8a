"""Tensor-parallel engines over two local ranks: equal steps everywhere, and what happens when a rank dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.two_ranks import agreed
from tests.engine.captured import CAPTURED
from tests.parameters import few
from torchweave.config.options import EngineConfig
from torchweave.engine.llm import LLM
from torchweave.engine.request import SamplingParams
from torchweave.engine.startup import build
from torchweave.engine.startup import open as opening
from torchweave.engine.startup.rank_worker import WorkerTask
from torchweave.images import ImageInput
from torchweave.verify import image_zoo, zoo
from torchweave.verify.verify import _answer, _difference

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "cpu_kv_cache_gib": 0.02,
    "seed": 7,
    "torch_compile_config": {"enable_fullgraph": False, "debug": True},
}
PROMPTS = ["Once upon a time", "The cat sat", "1 + 1 =", "A"]
LONG = SamplingParams(temperature=0.0, max_tokens=450, ignore_eos=True)
LIMIT = 60.0  # seconds: a rank that hangs does so for minutes, and a busy machine takes its time


@contextmanager
def two_ranks(**options: Any) -> Iterator[LLM]:
    llm = LLM("demo", tensor_parallel_size=2, **(OPTIONS | options))
    try:
        yield llm
    finally:
        llm.shutdown(drain=False)


def other_rank(llm: LLM) -> int:
    """The process of rank 1."""
    event = llm.report.select("rank")[0]
    assert event["rank"] == 1
    return int(event["process"])


def gone(pid: int, seconds: float = LIMIT) -> bool:
    end = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


def answers(llm: LLM) -> list[list[int]]:
    """Greedy ones, drawn ones, and ones that are drawn again; prompts are read in parts beside others that generate."""
    drawn = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=24, seed=3, logprobs=2),
        SamplingParams(temperature=0.8, max_tokens=24, repetition_penalty=1.2, seed=4),
        SamplingParams(temperature=0.0, max_tokens=12, beam_width=3),
    ]
    found = llm.generate(PROMPTS, drawn)
    return [list(output.token_ids) for request in found for output in request.outputs]


def test_all_ranks_run_the_same_steps_and_a_killed_one_ends_all():
    with LLM("demo", **OPTIONS) as alone:
        expected = answers(alone)
    with two_ranks(max_num_tokens=64) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected
        assert agreed(llm, steps=48)
        assert llm.report.select("rank")[0]["device"] == "cpu"
        kill_while_it_generates(llm)


def kill_while_it_generates(llm: LLM) -> None:
    pid = other_rank(llm)
    stream = llm.stream_all(["Once upon", "The"], LONG)
    next(stream)
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=rf"Rank 1 \(process {pid}\) has ended unexpectedly \(killed by SIGKILL\)"):
        list(stream)
    with pytest.raises(RuntimeError, match="Rank 1"):  # later calls, too
        llm.generate("The", LONG)
    assert gone(pid) and time.monotonic() - begin < LIMIT


def test_unresponsive_rank_ends_all():
    with two_ranks(rank_timeout=2.0) as llm:
        pid = other_rank(llm)
        stream = llm.stream("Once upon", LONG)
        next(stream)
        begin = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match=r"Rank 1 .* has not answered for 2 s"):
            list(stream)
        assert gone(pid) and time.monotonic() - begin < LIMIT


def test_worker_startup_failure_gives_a_one_line_error(monkeypatch: pytest.MonkeyPatch):
    def with_less_memory(config: EngineConfig, *rest: Any) -> WorkerTask:
        return WorkerTask(replace(config, num_kv_blocks=1), *rest)

    options = OPTIONS | {"max_model_len": 512}
    monkeypatch.setattr(opening, "WorkerTask", with_less_memory)
    with pytest.raises(ValueError, match=r"^The KV cache has room for \d+ tokens"):
        LLM("demo", tensor_parallel_size=2, **options)


def children() -> set[str]:
    return {child for path in Path("/proc/self/task").glob("*/children") for child in path.read_text().split()}


def test_ranks_start_before_model_resolution_and_are_cleaned_up(monkeypatch: pytest.MonkeyPatch):
    before = children()
    seen: list[set[str]] = []

    def look(*_: Any) -> None:
        seen.append(children() - before)
        raise ValueError("no such model")

    monkeypatch.setattr(opening, "resolve_plan", look)
    with pytest.raises(ValueError, match="no such model"):
        LLM("demo", tensor_parallel_size=2, **OPTIONS)
    assert len(seen[0]) == 1 and children() == before
    with pytest.raises(ValueError, match="tensor_parallel_size=0 must be at least 1"):
        LLM("demo", tensor_parallel_size=0, **OPTIONS)
    assert len(seen) == 1 and children() == before


def test_an_engine_is_named_without_torch():
    """A script's imports before it sets the number of ranks."""
    code = "import sys; from torchweave import LLM, SamplingParams; import torchweave.cli.session; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("option", few(["tensor_parallel_size", "pipeline_parallel_size"], ["tensor_parallel_size"]))
def test_images_are_encoded_on_all_ranks(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Qwen3-VL: positions of three axes, features added in layers, a chunk that cuts an image, and one that cannot be encoded.

    Of two stages both add features, with a layer behind them, and the leader launches a step after it has formed the next one,
    whose images take the rows of those of the step.
    """
    monkeypatch.setattr(build, "_MIN_IMAGE_ROWS", 0)
    monkeypatch.setattr(build, "_IMAGE_STEPS", 1)
    entry = image_zoo.zoo_entry("qwen3_vl-images")
    assert isinstance(entry, image_zoo.ImageZooModel)
    text, vision = entry.options["text_config"], entry.options["vision_config"]
    sizes = {
        "text_config": text | {"num_hidden_layers": 4},
        "vision_config": vision | {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]},
    }
    entry = replace(entry, options=entry.options | sizes)
    model = entry.build()
    zoo.save(model, tmp_path)
    prompts = image_zoo.image_prompts(entry, model)
    expected = image_zoo.image_reference_answers(entry, model, prompts, 8)
    bias = {image_zoo.IMAGE_TOKEN: -100.0}
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logit_bias=bias, logprobs=0)
    options = OPTIONS | {"dtype": "float32", "max_num_tokens": 20, "max_batch_size": 4, option: 2}
    if option == "pipeline_parallel_size":  # stages are cut from a graph
        options["torch_compile_config"] = replace(CAPTURED, debug=True)

    def difference() -> str:
        found = [_answer(output.outputs[0]) for output in llm.generate(prompts, greedy)]
        return _difference(found, expected, [len(prompt.token_ids) for prompt in prompts])

    with LLM(str(tmp_path), **options) as llm:
        assert difference() == ""
        assert difference() == "", "behind cached prefixes"
        image = prompts[1].images[0]
        fewer = {**image.tensors, "pixel_values": image.tensors["pixel_values"][:-4]}
        broken = replace(prompts[1], images=(ImageInput(fewer, image.index),))
        with pytest.raises(RuntimeError, match="cannot encode the image"):
            llm.generate([broken, prompts[0]], greedy)
        assert difference() == ""
        assert agreed(llm, steps=30)
