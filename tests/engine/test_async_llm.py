"""`AsyncLLM`: outputs in an event loop, next to the same requests of `LLM`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

import torchweave
from torchweave import AsyncLLM, RequestOutput, SamplingParams
from torchweave.engine.outputs import PoolingRequestOutput

OPTIONS = {"device": "cpu", "cpu_kv_cache_gib": 0.02, "torch_compile_config": {"enable_fullgraph": False}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=450, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    with AsyncLLM("demo", **OPTIONS) as engine:
        yield engine


async def outputs_of(engine: AsyncLLM, prompt: str, params: SamplingParams, **options: object) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **options)]  # type: ignore[arg-type]


def test_requests_run_together_and_outputs_grow_to_those_of_llm(engine: AsyncLLM) -> None:
    prompts = ["Once upon a time", "The cat sat", "1 + 1 ="]
    sampled = SamplingParams(temperature=0.9, seed=3, max_tokens=24, n=2, logprobs=1, ignore_eos=True)
    params = [GREEDY, sampled, GREEDY]

    async def ask() -> list[list[RequestOutput]]:
        requests = [outputs_of(engine, *each) for each in zip(prompts, params, strict=True)]
        return await asyncio.gather(*requests)

    answers = asyncio.run(ask())
    expected = engine._llm.generate(prompts, params)
    for outputs, whole in zip(answers, expected, strict=True):
        last = outputs[-1]
        assert last.prompt == whole.prompt and last.prompt_token_ids == whole.prompt_token_ids
        assert [answer.token_ids for answer in last.outputs] == [answer.token_ids for answer in whole.outputs]
        assert [answer.text for answer in last.outputs] == [answer.text for answer in whole.outputs]
        assert [answer.logprobs for answer in last.outputs] == [answer.logprobs for answer in whole.outputs]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert last.metrics is not None and last.metrics.num_generation_tokens == 24 * len(last.outputs)
        for before, after in pairwise(outputs):
            for earlier, later in zip(before.outputs, after.outputs, strict=True):
                assert later.text.startswith(earlier.text) and len(later.token_ids) >= len(earlier.token_ids)
    assert len(answers[0]) > 1, "outputs come while the request runs"


def test_stop_strings_and_structured_outputs(engine: AsyncLLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, stop=["e"])
    last = asyncio.run(outputs_of(engine, "Once upon a time", params))[-1]
    assert last.outputs[0] == engine._llm.generate("Once upon a time", params)[0].outputs[0]
    assert last.outputs[0].stop_reason == "e" and "e" not in last.outputs[0].text
    guided = SamplingParams(temperature=0.0, structured_outputs={"regex": "[0-9]{3}"})  # type: ignore[arg-type]
    assert asyncio.run(outputs_of(engine, "1+1=", guided))[-1].outputs[0].text.isdigit()


def test_abort_ends_requests_and_leaves_the_others(engine: AsyncLLM) -> None:
    async def ask() -> None:
        expected = await outputs_of(engine, "The cat", GREEDY)
        begun, other = asyncio.Event(), asyncio.create_task(outputs_of(engine, "The cat", GREEDY, request_id="c"))

        async def read(name: str) -> RequestOutput:
            outputs = []
            async for output in engine.generate("Once upon", LONG, request_id=name):
                outputs.append(output)
                begun.set()
            return outputs[-1]

        reading = [asyncio.create_task(read(name)) for name in ("a", "b")]
        await begun.wait()
        with pytest.raises(ValueError, match="A request with the id 'a' is in flight"):
            await outputs_of(engine, "The", GREEDY, request_id="a")
        await engine.abort("a")
        await engine.abort(["b", "unknown"])
        for name, last in zip(("a", "b"), await asyncio.gather(*reading), strict=True):
            assert last.request_id == name and last.finished and last.outputs[0].finish_reason == "abort"
            assert len(last.outputs[0].token_ids) < 450
        assert (await other)[-1].outputs == expected[-1].outputs

    asyncio.run(ask())


def test_leaving_early_or_cancelling_stops_the_request(engine: AsyncLLM) -> None:
    async def ask() -> None:
        generated = engine.generate("Once upon", LONG, request_id="left")
        await anext(generated)
        await generated.aclose()
        task = asyncio.create_task(outputs_of(engine, "Once upon", LONG, request_id="cancelled"))
        await outputs_of(engine, "The", GREEDY)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for name in ("left", "cancelled"):  # their ids are free
            assert (await outputs_of(engine, "The", GREEDY, request_id=name))[-1].request_id == name
        await engine.pause("wait")  # which ends as soon as nothing runs
        await engine.resume()

    asyncio.run(ask())


def test_pause_and_other_control_calls(engine: AsyncLLM) -> None:
    async def ask() -> None:
        expected = await outputs_of(engine, "Once upon", LONG)
        generated = engine.generate("Once upon", LONG)
        await anext(generated)
        await engine.pause_generation("keep")
        assert await engine.is_paused() and not await engine.reset_prefix_cache()
        waiting = asyncio.create_task(outputs_of(engine, "The cat", GREEDY))
        await engine.call("is_paused")
        assert not waiting.done()
        await engine.resume_generation()
        last = [output async for output in generated][-1]
        assert last.outputs == expected[-1].outputs and (await waiting)[-1].finished
        with pytest.raises(ValueError, match="mode='stop' is not known"):
            await engine.pause("stop")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="set profile_dir"):
            await engine.start_profile()
        await engine.check_health()
        assert not engine.errored

    asyncio.run(ask())


def test_errors_are_those_of_llm(engine: AsyncLLM) -> None:
    too_long = [5] * 5000
    with pytest.raises(ValueError, match="max_model_len"):
        asyncio.run(outputs_of(engine, too_long, GREEDY))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="runner"):
        asyncio.run(anext(engine.encode("a")))  # type: ignore[arg-type]


def test_shutdown_ends_requests_with_an_error() -> None:
    async def ask() -> None:
        async with AsyncLLM("demo", **OPTIONS) as engine:
            generated = engine.generate("Once upon", LONG)
            await anext(generated)
        with pytest.raises(RuntimeError, match="shut down"):
            async for _ in generated:
                pass
        with pytest.raises(RuntimeError, match="shut down"):
            await outputs_of(engine, "The", GREEDY)
        with pytest.raises(RuntimeError, match="The engine has ended"):
            await engine.check_health()

    asyncio.run(ask())


def test_encode_pools_as_llm_does() -> None:
    with AsyncLLM("demo", runner="pooling", **OPTIONS) as engine:

        async def ask() -> list[PoolingRequestOutput]:
            return [output async for output in engine.encode("The cat sat", request_id="one")]

        (output,) = asyncio.run(ask())
        expected = engine._llm.encode("The cat sat", pooling_task="embed")[0]
        assert output.request_id == "one" and output.prompt_token_ids == expected.prompt_token_ids
        np.testing.assert_array_equal(output.outputs.data.numpy(), expected.outputs.data.numpy())
        assert torchweave.AsyncLLM is AsyncLLM
