"""`LLM` with many callers: correct answers, no leaks after abandoned requests, and a shutdown that all callers notice."""

from __future__ import annotations

import gc
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from torchweave import LLM, EngineConfig, SamplingParams, TorchCompileConfig
from torchweave.engine.client import CompletionStream
from torchweave.engine.scheduler.step import Step
from torchweave.models import load
from torchweave.models.load import LoadedModel
from torchweave.report import Report

GREEDY = SamplingParams(temperature=0, max_tokens=40)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
PROMPTS = [f"{a}+{b}=" for a in (3, 40, 512) for b in (5, 60, 7)] + [
    "sort: pear fig apple",
    "reverse: zebra",
    "copy: ab c",
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("demo-draft")


@pytest.fixture(scope="module")
def llm(loaded: LoadedModel) -> Iterator[LLM]:
    """Pieces as plain FX code, room for four requests at once, so that others wait."""
    with start(loaded, TorchCompileConfig(enable_inductor=False, compile_cache=False)) as engine:
        yield engine


@pytest.fixture
def fresh(loaded: LoadedModel) -> Iterator[LLM]:
    """An engine that a test may break."""
    engine = start(loaded, TorchCompileConfig(enable_fullgraph=False))
    yield engine
    engine.shutdown(drain=False)


def start(loaded: LoadedModel, config: TorchCompileConfig) -> LLM:
    options = EngineConfig("draft", device="cpu", max_batch_size=4, max_num_tokens=64, torch_compile_config=config)
    return LLM.from_loaded(loaded, options, Report(show=False))


@pytest.fixture(scope="module")
def right(llm: LLM) -> dict[str, str]:
    """The answer to each prompt when it is alone."""
    return {prompt: llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in PROMPTS}


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.002)
    return holds()


def steps(llm: LLM) -> int:
    return sum(llm.manager.counts.values())


def is_empty(llm: LLM) -> bool:
    scheduler = llm.engine.scheduler
    return scheduler.num_active == 0 and scheduler.kv.num_free == scheduler.kv.num_blocks


# -- many callers ------------------------------------------------------------------------------------------------------


def test_concurrent_generate_stream_and_chat_get_their_own_outputs(llm: LLM, right: dict[str, str]) -> None:
    question = [{"role": "user", "content": "12+30="}]
    chatted = llm.chat(question, GREEDY)[0].outputs[0].text

    def ask(number: int) -> None:
        mine = PROMPTS[number % 5 :] + PROMPTS[: number % 5]
        match number % 3:
            case 0:
                outputs = llm.generate(mine, GREEDY)
                assert [output.outputs[0].text for output in outputs] == [right[prompt] for prompt in mine]
            case 1:
                texts = dict.fromkeys(range(len(mine)), "")
                for at, piece in llm.stream_all(mine, GREEDY):
                    texts[at] += piece.text
                assert list(texts.values()) == [right[prompt] for prompt in mine]
            case 2:
                for _ in range(4):
                    assert llm.chat(question, GREEDY)[0].outputs[0].text == chatted

    with ThreadPoolExecutor(9) as pool:
        for done in [pool.submit(ask, number) for number in range(9)]:
            done.result(timeout=60)
    assert wait_until(lambda: is_empty(llm))


def test_answers_are_counted_and_ids_are_taken_as_prompts(fresh: LLM) -> None:
    assert fresh.generate([]) == [] and list(fresh.stream_all([])) == []
    ids = fresh.get_tokenizer().encode("12+30=")
    for prompt in (ids, np.array(ids, np.int32)):
        (output,) = fresh.generate([prompt], GREEDY)
        assert output.prompt is None and output.prompt_token_ids == ids
        assert output.outputs[0].text == "42"
    fresh.generate(PROMPTS, SamplingParams(n=2, temperature=0, max_tokens=2), use_tqdm=True)
    counted = [event for event in fresh.report.select("progress") if event["title"] == "generating"]
    assert (counted[-1]["done"], counted[-1]["total"]) == (24, 24)


# -- cancelled streams ---------------------------------------------------------------------------------------------------


def test_an_idle_engine_costs_less_than_a_hundredth_of_a_core(llm: LLM) -> None:
    """Its own thread: earlier tests of this process may leave others with work."""
    llm.generate("1+1=", GREEDY)
    clock = time.pthread_getcpuclockid(llm.manager._thread.ident or 0)
    begin, used = time.monotonic(), time.clock_gettime(clock)
    time.sleep(2)
    assert time.clock_gettime(clock) - used < (time.monotonic() - begin) / 100


@pytest.mark.parametrize("prompt", [5, None, b"abc", {1, 2}, [b"abc"], [["a", [1]]], torch.tensor([1, 2])], ids=repr)
def test_invalid_prompt_is_rejected(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ValueError, match="A prompt is a text or a list of token ids"):
        llm.generate(prompt, GREEDY)
    if not isinstance(prompt, torch.Tensor):  # a list of numbers is one prompt of token ids
        with pytest.raises(ValueError, match="A prompt is a text or a list of token ids"):
            llm.stream(prompt, GREEDY)


def test_an_output_says_which_stop_string_ended_it(llm: LLM) -> None:
    plain = llm.generate({"prompt": "12+30="}, GREEDY)[0].outputs[0].text
    params = SamplingParams(temperature=0, stop=[plain[1]])
    stopped = llm.generate("12+30=", params)[0].outputs[0]
    assert (stopped.text, stopped.stop_reason) == (plain[0], plain[1])
    assert params.clone() == params and params.clone() is not params


@pytest.mark.parametrize("params", [5, "x", {}, {"temperature": 0}, [None], [{}]], ids=repr)
def test_invalid_sampling_params_are_rejected(llm: LLM, params: Any) -> None:
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
        llm.generate(["1+1="], params)
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
        llm.stream("1+1=", params)


@pytest.mark.parametrize("messages", [None, 5, "hi", {"role": "user", "content": "1+1="}, [None], [[None]]], ids=repr)
def test_invalid_conversation_is_rejected(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match="Expected a list of messages"):
        llm.chat(messages, GREEDY)


def test_parts_of_a_message_are_one_text(llm: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "12+30="}]}]
    whole = [{"role": "user", "content": "12+30="}]
    assert llm.encode_chat(parts) == llm.encode_chat(whole)
    assert llm.chat([parts, whole], GREEDY)[0].outputs[0].text == "42"


def test_variables_of_the_template_are_given_by_vllms_name_too(llm: LLM) -> None:
    question, template = [{"role": "user", "content": "1"}], "{{ messages[0].content }}2+{{ more }}="
    output = llm.chat(question, GREEDY, chat_template=template, chat_template_kwargs={"more": "30"})[0]
    assert output.prompt_token_ids == llm.get_tokenizer().encode("12+30=")[1:]  # the template has no beginning of text
    with pytest.raises(TypeError, match="unexpected keyword argument 'more'"):
        llm.chat(question, GREEDY, chat_template=template, more="30")  # type: ignore[call-arg]


def test_tools_are_refused_by_a_template_without_them(llm: LLM) -> None:
    question = [{"role": "user", "content": "1"}]
    with pytest.raises(ValueError, match="template of this model does not support tools"):
        llm.chat(question, GREEDY, tools=[{"type": "function"}])
    assert repr(llm) == "LLM('demo-draft', device='cpu', dtype='float32')"


def test_the_tokenizer_is_transformers_own(llm: LLM) -> None:
    tokenizer, question = llm.get_tokenizer(), [{"role": "user", "content": "12+30="}]
    assert tokenizer.apply_chat_template(question, add_generation_prompt=True).input_ids == llm.encode_chat(question)
    assert tokenizer("12+30=").input_ids == llm.get_tokenizer().encode("12+30=")


@pytest.mark.parametrize(
    "content", [5, {"type": "text"}, [{"type": "input_audio", "input_audio": "x"}], ["text"]], ids=repr
)
def test_non_text_message_content_is_rejected(llm: LLM, content: Any) -> None:
    with pytest.raises(ValueError, match=r"Invalid content of a message: .*text"):
        llm.chat([{"role": "user", "content": content}], GREEDY)


def test_stream_of_a_string_is_one_prompt(llm: LLM, right: dict[str, str]) -> None:
    found = list(llm.stream_all(PROMPTS[0], GREEDY))
    assert {number for number, _ in found} == {0} and "".join(delta.text for _, delta in found) == right[PROMPTS[0]]


def test_closing_a_stream_cancels_its_request(llm: LLM) -> None:
    before = steps(llm)
    for _ in llm.stream("copy: ", LONG):
        break
    assert wait_until(lambda: is_empty(llm))
    assert steps(llm) - before < 100


def test_garbage_collected_stream_cancels_its_request(llm: LLM) -> None:
    before = steps(llm)
    stream = llm.stream_all(["copy: "] * 10, LONG)  # more than run at once: some are still queued
    assert wait_until(lambda: steps(llm) > before)
    del stream
    assert wait_until(lambda: is_empty(llm))
    assert steps(llm) - before < 200


def test_an_error_of_the_reader_stops_all_requests(llm: LLM) -> None:
    before = steps(llm)
    with pytest.raises(ZeroDivisionError):
        for _, piece in llm.stream_all(["copy: "] * 10, LONG):
            _ = 1 // (len(piece.token_ids) - 1)
    assert wait_until(lambda: is_empty(llm))
    assert steps(llm) - before < 200


def test_an_interrupt_while_generate_waits_stops_all_requests(llm: LLM) -> None:
    before = steps(llm)
    main = threading.main_thread().ident
    assert main is not None and threading.current_thread() is threading.main_thread()

    def interrupt() -> None:
        wait_until(lambda: steps(llm) > before + 3)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    # Python leaves Ctrl-C ignored where it was started so, as a shell starts what runs in its background.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["copy: "] * 12, LONG)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert wait_until(lambda: is_empty(llm))
    assert steps(llm) - before < 200
    assert llm.generate("12+30=", GREEDY)[0].outputs[0].text == "42"


def test_interrupt_during_submission_cancels_submitted_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, seen = CompletionStream.submit, []

    def interrupted(self: CompletionStream, *args: Any, **options: Any) -> list[int]:
        if len(seen) == 7:
            raise KeyboardInterrupt
        seen.append(submit(self, *args, **options))
        return seen[-1]

    monkeypatch.setattr(CompletionStream, "submit", interrupted)
    for ask in (llm.generate, llm.stream_all):
        before = steps(llm)
        seen.clear()
        with pytest.raises(KeyboardInterrupt):
            ask(["copy: "] * 12, LONG)
        assert len(seen) == 7
        assert wait_until(lambda: is_empty(llm))
        assert steps(llm) - before < 200


# -- the end -----------------------------------------------------------------------------------------------------------


def in_threads(*asks: Callable[[], Any]) -> list[Future[Any]]:
    pool = ThreadPoolExecutor(len(asks))
    futures = [pool.submit(ask) for ask in asks]
    pool.shutdown(wait=False)
    return futures


def test_draining_shutdown_finishes_queued_requests(fresh: LLM, right: dict[str, str]) -> None:
    begun = steps(fresh)
    whole, streamed = in_threads(
        lambda: [output.outputs[0].text for output in fresh.generate(PROMPTS * 2, GREEDY)],
        lambda: "".join(piece.text for piece in fresh.stream(PROMPTS[9], GREEDY)),
    )
    assert wait_until(lambda: steps(fresh) > begun and fresh.engine.scheduler.num_waiting > 0)
    fresh.shutdown()
    assert whole.result(timeout=20) == [right[prompt] for prompt in PROMPTS * 2]
    assert streamed.result(timeout=20) == right[PROMPTS[9]]
    assert not fresh.manager.alive and is_empty(fresh)
    with pytest.raises(RuntimeError, match="was shut down; make a new one"):
        fresh.generate("12+30=", GREEDY)
    fresh.shutdown()  # once more is nothing


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that are not notified would look at the engine after the end of the test."""
    for module in ("client", "llm"):
        monkeypatch.setattr(f"torchweave.engine.{module}._POLL_SECONDS", 120.0)


@pytest.mark.usefixtures("no_polling")
def test_immediate_shutdown_is_an_error_for_all_callers(fresh: LLM) -> None:
    whole, streamed = in_threads(
        lambda: fresh.generate(["copy: "] * 20, LONG), lambda: list(fresh.stream("copy: ", LONG))
    )
    assert wait_until(lambda: steps(fresh) > 2 and fresh.engine.scheduler.num_waiting > 0)
    fresh.shutdown(drain=False)
    for future in (whole, streamed):
        with pytest.raises(RuntimeError, match="shut down"):
            future.result(timeout=60)
    assert is_empty(fresh)


def test_an_error_in_the_with_block_does_not_wait_for_others(loaded: LoadedModel) -> None:
    with pytest.raises(ZeroDivisionError), start(loaded, TorchCompileConfig(enable_fullgraph=False)) as llm:
        (waiting,) = in_threads(lambda: llm.generate(["copy: "] * 20, LONG))
        assert wait_until(lambda: steps(llm) > 2)
        _ = 1 // 0
    with pytest.raises(RuntimeError, match="shut down"):
        waiting.result(timeout=20)


def test_unreferenced_engine_shuts_down(loaded: LoadedModel) -> None:
    llm = start(loaded, TorchCompileConfig(enable_fullgraph=False))
    manager = llm.manager
    assert manager.alive
    del llm
    gc.collect()
    assert wait_until(lambda: not manager.alive)


@pytest.mark.usefixtures("no_polling")
def test_device_failure_is_raised_for_every_caller(fresh: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = fresh.engine.runner
    launch, launched = runner.launch, queue.SimpleQueue[int]()

    def failing(step: Step) -> Any:
        if launched.qsize() >= 20:
            raise RuntimeError("the device is gone")
        launched.put(step.index)
        return launch(step)

    monkeypatch.setattr(runner, "launch", failing)
    futures = in_threads(
        lambda: fresh.generate(["copy: "] * 9, LONG),
        lambda: list(fresh.stream("copy: ", LONG)),
        lambda: fresh.generate("copy: ", LONG),
    )
    assert len(futures) == 3
    for future in futures:
        with pytest.raises(RuntimeError, match="engine failed: the device is gone") as error:
            future.result(timeout=60)
        assert str(error.value.__cause__) == "the device is gone"
    assert wait_until(lambda: not fresh.manager.alive)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="has ended: the device is gone"):
        fresh.generate("12+30=", GREEDY)
    assert time.monotonic() - begin < 60, "it waited for its next look at the engine"
    fresh.shutdown()  # does not wait for answers that will not come
    assert is_empty(fresh)


def test_model_without_a_tokenizer_returns_tokens() -> None:
    from torchweave.verify import zoo

    loaded = load(zoo.zoo_model("llama").config().to_dict(), load_format="dummy")
    with start(loaded, TorchCompileConfig(enable_fullgraph=False)) as llm:
        answer = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0].outputs[0]
        assert answer.text == "" and len(answer.token_ids) == 4
        for ask in (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "text"}])):
            with pytest.raises(ValueError, match="has no tokenizer; give the prompt as token ids"):
                ask()


def test_splitting_ops_change_the_pieces_and_not_the_tokens(loaded: LoadedModel, right: dict[str, str]) -> None:
    report = Report(show=False)
    config = TorchCompileConfig(enable_inductor=False, compile_cache=False, splitting_ops=("aten::silu",))
    options = EngineConfig("draft", device="cpu", max_batch_size=4, max_num_tokens=64, torch_compile_config=config)
    with LLM.from_loaded(loaded, options, report) as engine:
        texts = [output.outputs[0].text for output in engine.generate(PROMPTS[::4], GREEDY)]
    assert texts == [right[prompt] for prompt in PROMPTS[::4]]
    (parts,) = report.select("parts")
    num_layers = sum("boundary" in part for part in parts["order"])
    assert sum("piece" in part for part in parts["order"]) == num_layers + 1 + 2 * num_layers
