"""The built-in model through the whole engine with defaults: Inductor on, an empty compile cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import demo_tasks as tasks
import pytest
import torch

import torchweave
from torchweave import LLM, SamplingParams, TorchCompileConfig
from torchweave.engine.outputs import CompletionOutput
from torchweave.report import Report

MODELS = Path(torchweave.__file__).parent / "models"
NUM_QUESTIONS = 200
GREEDY = SamplingParams(temperature=0, max_tokens=120)
PROMPTS = (
    "12+30=",
    "907-48=",
    "sort: pear fig apple",
    "reverse: zebra",
    "copy: a b c!",
    "what is 3 plus 4?",
    "count: 7 8 9 ...",
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    cache = TorchCompileConfig(compile_cache_dir=str(tmp_path_factory.mktemp("compile_cache")))
    with LLM("demo", device="cpu", torch_compile_config=cache, report=Report(show=False)) as engine:
        assert not engine.report.select("fallback")
        yield engine
        scheduler = engine.engine.scheduler
        scheduler.kv.check()
        assert scheduler.num_active == 0
        assert scheduler.kv.num_free == scheduler.kv.num_blocks


def texts(llm: LLM, prompts: list[str], params: SamplingParams | list[SamplingParams]) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["plain", "chat"])
@pytest.mark.parametrize("task", tasks.TASKS)
def test_accuracy_on_held_out_questions(llm: LLM, task: str, form: str) -> None:
    asked = tasks.held_out_questions(task, NUM_QUESTIONS)
    if form == "plain":
        outputs = llm.generate([tasks.plain_prompt(one) for one in asked], GREEDY)
    else:
        outputs = llm.chat([[{"role": "user", "content": one.prompt}] for one in asked], GREEDY)
    answers = [output.outputs[0].text.strip() for output in outputs]
    wrong = [(one.prompt, said) for one, said in zip(asked, answers, strict=True) if said != one.answer.strip()]
    assert 1 - len(wrong) / NUM_QUESTIONS >= tasks.REQUIRED_ACCURACY[task], wrong
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)


def test_smaller_demo_model_shares_the_vocabulary_and_answers(llm: LLM) -> None:
    config = TorchCompileConfig(enable_inductor=False, compile_cache=False)
    asked = tasks.held_out_questions("sentence", 50)
    with LLM("demo-draft", device="cpu", torch_compile_config=config, report=Report(show=False)) as draft:
        assert [draft.encode(prompt) for prompt in PROMPTS] == [llm.encode(prompt) for prompt in PROMPTS]
        answers = texts(draft, [one.prompt for one in asked], GREEDY)
    right = sum(said.strip() == one.answer for one, said in zip(asked, answers, strict=True))
    assert right >= 40, f"{right} of 50: a draft that is wrong so often saves nothing"


def test_demo_folders_stay_small() -> None:
    for name in ("demo", "demo_draft"):
        assert {"model.safetensors", "tokenizer.json", "config.json"} <= {
            file.name for file in (MODELS / name).iterdir()
        }
    size = sum(file.stat().st_size for name in ("demo", "demo_draft") for file in (MODELS / name).rglob("*"))
    assert size <= 6_000_000


def test_chat_uses_earlier_turns(llm: LLM) -> None:
    messages = [{"role": "user", "content": "what is 20 + 22?"}]
    (first,) = llm.chat(messages, GREEDY)
    assert first.outputs[0].text == "42"
    messages += [{"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "reverse: door"}]
    (second,) = llm.chat(messages, GREEDY)
    assert second.outputs[0].text == "rood"
    assert len(second.prompt_token_ids) > len(first.prompt_token_ids)


@torch.inference_mode()
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(llm: LLM) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODELS / "demo", dtype=torch.float32, attn_implementation="eager")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
    for prompt, output in zip(PROMPTS, llm.generate(list(PROMPTS), params), strict=True):
        ids = torch.tensor([llm.encode(prompt)])
        expected = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
        answer = output.outputs[0]
        assert answer.token_ids == expected[ids.shape[1] :].tolist(), prompt
        scores = model(expected[None]).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
        check_logprobs(answer, scores)


def check_logprobs(answer: CompletionOutput, scores: torch.Tensor) -> None:
    """`scores` [tokens, vocabulary]: expected logprobs at each token of an output with three logprobs per token."""
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
    for token, found, right in zip(answer.token_ids, answer.logprobs, scores, strict=True):
        assert token in found and set(found) == set(right.topk(3).indices.tolist())
        assert list(found.values()) == pytest.approx([float(right[other]) for other in found], abs=1e-3)
    said = [found[token] for token, found in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(said))


# -- ways to ask -------------------------------------------------------------------------------------------------------


def test_streamed_deltas_add_up_to_the_output_of_generate(llm: LLM) -> None:
    whole = [output.outputs[0] for output in llm.generate(list(PROMPTS), GREEDY)]
    pieces: dict[int, list[CompletionOutput]] = {number: [] for number in range(len(PROMPTS))}
    for number, piece in llm.stream_all(PROMPTS, GREEDY):
        pieces[number].append(piece)
    for number, right in enumerate(whole):
        assert "".join(piece.text for piece in pieces[number]) == right.text
        assert [token for piece in pieces[number] for token in piece.token_ids] == right.token_ids
        assert [piece.finish_reason for piece in pieces[number]] == [None] * (len(pieces[number]) - 1) + ["stop"]
    assert len(pieces[2]) > 5
    assert "".join(piece.text for piece in llm.stream(PROMPTS[2], GREEDY)) == whole[2].text == "apple fig pear"


def test_seeded_outputs_do_not_depend_on_the_batch(llm: LLM) -> None:
    wild = SamplingParams(n=2, temperature=4.0, seed=7, max_tokens=24)

    def answers() -> list[list[int]]:
        return [answer.token_ids for answer in llm.generate("copy: ", wild)[0].outputs]

    alone = answers()
    assert alone[0] != alone[1]
    beside = llm.generate(["12+30=", "copy: ", "sort: b a"], [GREEDY, wild, SamplingParams(temperature=2.0)])
    assert [answer.token_ids for answer in beside[1].outputs] == alone == answers()
    assert [answer.index for answer in beside[1].outputs] == [0, 1]


@pytest.mark.parametrize(
    ("stop", "text"), [("pear", "apple fig "), (["fig", "e f"], "appl"), ("nowhere", "apple fig pear"), ("a", "")]
)
def test_stop_string_is_excluded_from_the_output(llm: LLM, stop: str | list[str], text: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, stop=stop)
    (output,) = llm.generate("sort: pear fig apple", params)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (text, "stop")
    pieces = list(llm.stream("sort: pear fig apple", params))
    assert "".join(piece.text for piece in pieces) == text
    assert pieces[-1].finish_reason == "stop"


def test_each_request_of_a_batch_has_its_own_parameters(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=60),
        SamplingParams(temperature=0, max_tokens=5),
        SamplingParams(temperature=3.0, top_k=1, max_tokens=60),
        SamplingParams(temperature=3.0, top_p=1e-6, max_tokens=60),
        SamplingParams(temperature=3.0, min_p=1.0, max_tokens=60),
        SamplingParams(temperature=0, max_tokens=60, stop=" "),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=40, min_tokens=20),
        SamplingParams(temperature=0, max_tokens=60, stop_token_ids=llm.encode("f")[-1:]),
        SamplingParams(temperature=5.0, seed=3, max_tokens=30, logprobs=2),
        SamplingParams(temperature=5.0, seed=4, max_tokens=30),
    ]
    answers = [output.outputs[0] for output in llm.generate(["sort: pear fig apple"] * len(params), params)]
    assert [answer.text for answer in answers[:6]] == ["apple fig pear", "apple", *["apple fig pear"] * 3, "apple"]
    assert answers[1].finish_reason == "length" and len(answers[1].token_ids) == 5
    assert answers[6].finish_reason == "length" and len(answers[6].token_ids) == 40
    assert len(answers[7].token_ids) >= 20 and answers[7].text.startswith("apple fig pear")
    assert (answers[8].text, answers[8].finish_reason) == ("apple ", "stop")
    assert answers[9].logprobs is not None and answers[8].logprobs is None
    assert answers[9].token_ids != answers[10].token_ids
    for number in (9, 10):  # the same alone as among others
        assert llm.generate("sort: pear fig apple", params[number])[0].outputs[0].token_ids == answers[number].token_ids


def test_more_requests_than_slots_and_prompts_longer_than_a_step(llm: LLM) -> None:
    asked = [f"copy: {'ab cd ' * 30}{number}" for number in range(60)]
    assert llm.plan.max_batch_size < len(asked) and llm.plan.max_num_tokens < sum(map(len, asked))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    answers = [output.outputs[0].token_ids for output in llm.generate(asked, params)]
    assert all(len(answer) == 6 for answer in answers)
    alone = [llm.generate(asked[number], params)[0].outputs[0].token_ids for number in (0, 33, 59)]
    assert alone == [answers[number] for number in (0, 33, 59)]
