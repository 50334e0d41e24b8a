"""Names that scripts for vLLM import, and what they do with them: engines step by step, option objects, mutable parameters."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import pickle
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

import pytest

import torchweave
from torchweave import LLM, AsyncLLM, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.config.peer_options import read_options
from torchweave.report import Report
from torchweave.utils.argparse_utils import FlexibleArgumentParser

PROMPTS = ["12+30=", "sort: pear fig apple", "907-48="]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
OPTIONS: dict[str, Any] = {"device": "cpu", "enforce_eager": True, "max_num_seqs": 4, "kv_cache_memory_bytes": "8M"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", report=Report(show=False), **OPTIONS) as engine:
        yield engine


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "torchweave",
            "LLM PromptType TextPrompt TokensPrompt SamplingParams RequestOutput CompletionOutput PoolingOutput "
            "PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput ClassificationOutput ClassificationRequestOutput "
            "ScoringOutput ScoringRequestOutput LLMEngine EngineArgs AsyncLLMEngine AsyncEngineArgs PoolingParams",
        ),
        ("torchweave.sampling_params", "SamplingParams BeamSearchParams RequestOutputKind StructuredOutputsParams"),
        ("torchweave.outputs", "RequestOutput CompletionOutput EmbeddingRequestOutput"),
        ("torchweave.lora.request", "LoRARequest"),
        ("torchweave.inputs", "TextPrompt TokensPrompt PromptType"),
        ("torchweave.pooling_params", "PoolingParams"),
        ("torchweave.engine.arg_utils", "EngineArgs AsyncEngineArgs"),
        ("torchweave.engine.async_llm", "AsyncLLM AsyncLLMEngine LLMEngine"),
        ("torchweave.entrypoints.llm", "LLM"),
        ("torchweave.utils.argparse_utils", "FlexibleArgumentParser"),
    ],
)
def test_scripts_find_the_names_of_vllm(module: str, names: str) -> None:
    loaded = importlib.import_module(module)
    for name in names.split():
        assert getattr(loaded, name) is not None
        if hasattr(torchweave, name):
            assert getattr(loaded, name) is getattr(torchweave, name)


def test_parameters_are_mutable_and_checked_again(llm: LLM) -> None:
    params = SamplingParams(temperature=0)
    params.min_tokens, params.max_tokens = 20, 24  # type: ignore[misc]
    assert params.checked() == SamplingParams(temperature=0, min_tokens=20, max_tokens=24)
    assert pickle.loads(pickle.dumps(params)) == params
    params.temperature = -1.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="temperature must be 0"):
        llm.generate(PROMPTS[0], params)
    with pytest.raises(AttributeError, match="did you mean temperature"):
        params.temprature = 0  # type: ignore[attr-defined]


def test_optional_parameters_are_those_of_vllm() -> None:
    assert SamplingParams.from_optional(temperature=None, top_k=None, seed=None, top_p=0.5) == SamplingParams(top_p=0.5)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None


def test_prompts_are_truncated_to_their_last_tokens(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[1])
    params = SamplingParams(temperature=0, max_tokens=2, truncate_prompt_tokens=4)
    (output,) = llm.generate(PROMPTS[1], params)
    assert output.prompt_token_ids == ids[-4:]
    params.truncate_prompt_tokens = -1  # type: ignore[misc]
    assert llm.generate(PROMPTS[1], params)[0].prompt_token_ids == ids
    with pytest.raises(ValueError, match="truncate_prompt_tokens must be at least 1"):
        SamplingParams(truncate_prompt_tokens=0)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_an_engine_runs_step_by_step(llm: LLM, kind: RequestOutputKind) -> None:
    expected = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]
    engine = LLMEngine(llm)
    params = SamplingParams(temperature=0, max_tokens=6, output_kind=kind)
    texts: dict[str, str] = {}
    counts: dict[str, int] = {}
    waiting = list(enumerate(PROMPTS))
    while waiting or engine.has_unfinished_requests():
        if waiting:
            number, prompt = waiting.pop(0)
            engine.add_request(str(number), prompt, params)
        for output in engine.step():
            name = output.request_id
            counts[name] = counts.get(name, 0) + 1
            texts[name] = texts.get(name, "") * (kind == RequestOutputKind.DELTA) + output.outputs[0].text
            assert output.finished == (output.outputs[0].finish_reason is not None)
    assert [texts[str(number)] for number in range(3)] == expected
    assert (set(counts.values()) == {1}) == (kind == RequestOutputKind.FINAL_ONLY)
    assert engine.step() == [] and not engine._stream.completions


def test_a_request_of_a_step_engine_is_aborted(llm: LLM) -> None:
    engine = llm.llm_engine
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    engine.add_request("a", PROMPTS[0], long)
    with pytest.raises(ValueError, match="'a' is unfinished"):
        engine.add_request("a", PROMPTS[0], long)
    engine.add_request("b", PROMPTS[2], GREEDY)
    engine.abort_request(["a", "unknown"])
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {"b"}
    assert outputs[-1].outputs[0].text == llm.generate(PROMPTS[2], GREEDY)[0].outputs[0].text


def test_streams_of_the_event_loop_have_kinds(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
    engine = AsyncLLM.__new__(AsyncLLM)
    engine._init(llm)

    async def texts(kind: RequestOutputKind) -> list[str]:
        params = SamplingParams(temperature=0, max_tokens=6, output_kind=kind)
        return [output.outputs[0].text async for output in engine.generate(PROMPTS[0], params)]

    assert "".join(asyncio.run(texts(RequestOutputKind.DELTA))) == expected
    assert asyncio.run(texts(RequestOutputKind.FINAL_ONLY)) == [expected]
    assert asyncio.run(texts(RequestOutputKind.CUMULATIVE))[-1] == expected


def test_functions_run_on_the_ranks(llm: LLM) -> None:
    assert llm.apply_model(lambda model: type(model).__name__) == ["LlamaForCausalLM"]
    assert llm.collective_rpc(lambda rank, a, b=0: (rank.number, a + b), args=(1,), kwargs={"b": 2}) == [(0, 3)]
    assert llm.collective_rpc("is_paused") == [False]
    with pytest.raises(ValueError, match="no control call 'load'"):
        llm.collective_rpc("load")
    with pytest.raises(RuntimeError, match="division by zero"):
        llm.apply_model(lambda model: 1 / 0)
    assert llm.generate(PROMPTS[0], GREEDY)


def test_options_are_an_object() -> None:
    args = EngineArgs(model="demo", max_num_seqs=8, enforce_eager=True, enable_lora=False, swap_space=4)
    direct = {"model": "demo", "max_num_seqs": 8, "enforce_eager": True}
    assert read_options(asdict(args)) == read_options(vars(args)) == read_options(args.given()) == read_options(direct)
    with pytest.raises(TypeError, match="max_sequences"):
        EngineArgs(model="demo", max_sequences=1)


def test_options_are_read_by_a_scripts_parser() -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("--num-prompts", type=int, default=1)
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="demo")
    argv = ["--max_model_len", "4k", "--enforce-eager", "-tp", "2", "--swap-space", "4", "--num_prompts=3"]
    args = vars(parser.parse_args([*argv, "--hf-overrides", '{"a_b": 1}']))
    assert args.pop("num_prompts") == 3
    config, advice = read_options(args)
    assert (config.model, config.max_model_len, config.tensor_parallel_size) == ("demo", 4000, 2)
    assert config.hf_overrides == {"a_b": 1} and not advice and not config.torch_compile_config.enable_inductor
    assert EngineArgs.from_cli_args(argparse.Namespace(model="m", other=1)).given() == {"model": "m"}


def test_none_is_the_default_of_every_option() -> None:
    for config in (EngineConfig("demo"), ServerConfig()):
        for item in fields(config):
            if "None" in str(item.type):
                assert getattr(config, item.name) is None, item.name
