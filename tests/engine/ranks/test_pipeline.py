"""Pipeline-parallel engines: the tokens of one rank, and a killed stage ends all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from tests.engine.captured import CAPTURED
from tests.engine.ranks.pipeline_cases import agreed, asked, assert_alike
from tests.engine.ranks.test_ranks import OPTIONS, answers, kill_while_it_generates
from tests.ranks import run_torchrun_ranks
from torchweave.compiler.errors import TraceError
from torchweave.compiler.explain.facts import as_json, explain, schema
from torchweave.config import DeviceFacts, ModelFacts, resolve
from torchweave.config.options import EngineConfig
from torchweave.config.validate import config_from
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.engine.llm import LLM
from torchweave.engine.request import SamplingParams
from torchweave.engine.startup import compile_model as startup
from torchweave.report import Report
from torchweave.verify import zoo


@contextmanager
def pipeline(model: str | Path, stages: int = 2, **options: Any) -> Iterator[LLM]:
    asked = OPTIONS | {"torch_compile_config": replace(CAPTURED, debug=True)} | options
    llm = LLM(str(model), pipeline_parallel_size=stages, **asked)
    try:
        yield llm
    finally:
        llm.shutdown(drain=False)


def test_pipeline_gives_the_tokens_of_one_rank_and_a_killed_stage_ends_all():
    with LLM("demo", **OPTIONS) as alone:
        expected, all_asked = answers(alone), asked(alone)
    with pipeline("demo", max_num_tokens=64) as llm:
        (event,) = llm.report.select("pipeline_parallel")
        assert event["stage"] == 1 and event["layers"] == [3, 5] and event["parameters"] < 0.5 * event["of"]
        facts = explain(llm.plan, llm.report)
        jsonschema.validate(json.loads(as_json(facts)), schema())
        assert facts["pipeline"]["layers"] == [3, 5] and facts["pipeline"]["bytes_per_token"] > 0
        runner: Any = llm.engine.steps
        num_ahead, launch_next = [], runner._launch_next
        runner._launch_next = lambda: (num_ahead.append(len(runner._not_launched)), launch_next())
        assert answers(llm) == expected
        assert max(num_ahead) > 1, "the first stage has the next step while the last one computes"
        assert_alike(asked(llm), all_asked)
        assert agreed(llm, 2)
        kill_while_it_generates(llm)


def _serve(prompts: list[list[int]], model: str, options: dict[str, Any]) -> list[list[int]]:
    with pipeline(model, executor="torchrun", **options) as llm:
        assert sorted(event["rank"] for event in llm.report.select("rank")) == [1, 2, 3]
        greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        found = [list(request.outputs[0].token_ids) for request in llm.generate(prompts, greedy)]
        assert agreed(llm, 4)
    return found


def test_pp_with_tp_gives_the_tokens_of_one_rank(tmp_path: Path):
    entry = zoo.zoo_model("gpt2")
    model = zoo.build(replace(entry, options=entry.options | {"n_layer": 2}))  # a layer in each stage
    zoo.save(model, tmp_path)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, zoo.VOCAB, (size,), generator=generator).tolist() for size in (3, 70, 21)]
    options = {"tensor_parallel_size": 2, "max_num_tokens": 32, "dtype": "float32"}
    found = run_torchrun_ranks(_serve, 4, prompts, str(tmp_path), options)
    assert found == zoo.reference_tokens(model, prompts, 6)


CPU = DeviceFacts("cpu", "a CPU", None, ())
MODEL = ModelFacts("tiny", 512, num_layers=4)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"pipeline_parallel_size": 5}, "pipeline_parallel_size=5 is above the 4 layers of tiny, .*; lower it"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size=0 must be at least 1"),
        ({"pipeline_parallel_size": 2, "kv_offload_gb": 1.0}, "is not supported on 2 ranks"),
        (
            {"pipeline_parallel_size": 2, "torch_compile_config": {"enable_fullgraph": False}},
            "pipeline_parallel_size=2 needs torch_compile_config.enable_fullgraph",
        ),
    ],
)
def test_invalid_pipeline_gives_a_one_line_error(options: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        resolve(config_from(EngineConfig, {"model": "tiny", **options}), CPU, MODEL)


def test_pipeline_with_more_ranks_than_gpus_gives_a_one_line_error():
    config = EngineConfig("tiny", tensor_parallel_size=2, pipeline_parallel_size=2)
    device = DeviceFacts("cuda:0", "a GPU", (9, 0), (), num_gpus=2)
    sentence = (
        "tensor_parallel_size=2 with pipeline_parallel_size=2 needs 4 GPUs, but this machine has 2 from cuda:0 on"
    )
    with pytest.raises(ValueError, match=sentence):
        resolve(config, device, MODEL)


def test_untraceable_model_is_rejected_for_pipelines(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise TraceError("it reads its input on the host")

    monkeypatch.setattr(startup, "compile_model", refuse)
    config = EngineConfig("demo", device="cpu", torch_compile_config=startup.TorchCompileConfig(compile_cache=False))
    plan: Any = type("Plan", (), {"fullgraph": True, "tune": False, "device": "cpu", "config": config})()
    monkeypatch.setattr(startup, "effective_compile_config", lambda plan: plan.config.torch_compile_config)
    stage: Any = object()
    with pytest.raises(
        ValueError, match=r"cannot be divided into stages: it reads its input .*; use pipeline_parallel_size=1"
    ):
        startup.build_forward(torch.nn.Identity(), plan, Report(show=False), ProcessGroups.single_rank(), stage)
