"""The tasks of the built-in models: right answers, a split that holds, and a stream that encodes as the tokenizer does."""

from __future__ import annotations

import random
import re
from hashlib import sha256

import demo_data
import demo_tasks as tasks
import numpy as np
import pytest
from demo_eval import missed
from demo_folder import BOS, EOS, VOCABULARY, build_tokenizer
from demo_training import learning_rate


def solve(prompt: str) -> tuple[str, str]:
    """The task and answer of a prompt, read from the prompt alone: not how the generator found them."""
    text = prompt.strip()
    low = text[0].lower() + text[1:]
    numbers = [int(number) for number in re.findall(r"\d+", low)]
    if match := re.match(r"(copy|repeat|say): ?(.*)", low):
        return "copy", match[2]
    if match := re.match(r"reverse(?:: ?| the word | )(.*)", low):
        return "reverse", match[1][::-1]
    if match := re.match(r"sort(?: these words| the words)?:? ?(.*)", low):
        return "sort", " ".join(sorted(match[1].replace(",", "").split()))
    if low.startswith("count from"):
        return "count", " ".join(str(number) for number in range(numbers[0], numbers[1] + 1))
    if low.startswith("co") and not low.startswith("compute"):
        step = numbers[-1] - numbers[-2] if len(numbers) > 1 else 1
        return "count", " ".join(str(numbers[-1] + step * ahead) for ahead in (1, 2, 3))
    if low.startswith("subtract"):
        return "sub", str(numbers[1] - numbers[0])
    if re.search(r"\d ?\+|plus|add ", low):
        return "add", str(numbers[0] + numbers[1])
    assert re.search(r"\d ?-|minus", low), prompt
    return "sub", str(numbers[0] - numbers[1])


@pytest.mark.parametrize("task", [task for task in tasks.TASKS if task != "sentence"])
def test_answers_agree_with_an_independent_reading_of_the_prompt(task: str) -> None:
    rng = random.Random(5)
    for held_out in (False, True):
        for _ in range(400):
            asked = tasks.question(rng, task, held_out=held_out)
            assert solve(asked.prompt) == (task, asked.answer), asked


def solve_sentence(prompt: str) -> str:
    told, _, question = prompt.lower().strip().rstrip("?").rpartition(". ")
    words, asked = told.replace(".", "").split(), question.split()
    if asked[0] == "how":
        numbers = [int(word) for word in words if word.isdigit()]
        return str(numbers[0] + numbers[1] if "gets" in words else numbers[0] - numbers[1])
    if "gave" in words:
        return words[0] if "gave" in asked else words[-1]
    if "than" in words:
        return words[0] if asked[-1] in words else words[-1]
    if asked[0] == "who":  # NAME has a THING NAME has a THING
        return words[words.index(asked[-1]) - 3]
    if asked[0] == "where":  # NAME is in the PLACE
        return words[words.index(asked[-1]) + 4]
    return words[words.index(asked[-1]) + 2]  # the ANIMAL is COLOR


def test_sentences_are_answered_from_the_sentence() -> None:
    rng = random.Random(11)
    asked = [tasks.question(rng, "sentence", held_out=held_out) for held_out in (False, True) for _ in range(300)]
    assert [solve_sentence(one.prompt) for one in asked] == [one.answer for one in asked]


@pytest.mark.parametrize("task", tasks.TASKS)
def test_held_out_prompts_never_come_in_the_training_stream(task: str) -> None:
    held = {asked.prompt.strip().lower() for asked in tasks.held_out_questions(task, 500)}
    rng = random.Random(3)
    trained = {tasks.question(rng, task, held_out=False).prompt.strip().lower() for _ in range(10_000)}
    assert len(held) > 200
    assert not held & trained


def test_an_operand_pair_held_out_is_held_out_in_both_orders_and_every_wording() -> None:
    held = {frozenset(map(int, re.findall(r"\d+", asked.prompt))) for asked in tasks.held_out_questions("add", 300)}
    rng = random.Random(4)
    for _ in range(20_000):
        prompt = tasks.question(rng, "add", held_out=False).prompt
        assert frozenset(map(int, re.findall(r"\d+", prompt))) not in held, prompt


def test_the_split_is_by_key_and_keeps_about_its_share() -> None:
    share = sum(tasks.is_held_out(f"add {a} {b}") for a in range(100) for b in range(a, 100)) / 5050
    assert 0.5 / tasks.HELD_OUT_ONE_IN < share < 2 / tasks.HELD_OUT_ONE_IN
    assert not tasks.is_held_out("table")
    assert tasks.held_out_questions("sort", 20, seed=2) == tasks.held_out_questions("sort", 20, seed=2)
    assert tasks.held_out_questions("sort", 20, seed=2) != tasks.held_out_questions("sort", 20, seed=3)


def test_the_stream_is_what_the_tokenizer_makes_of_the_text() -> None:
    tokenizer = build_tokenizer()
    tokens, learnt = demo_data.pack(random.Random(8), rows=8, length=256)
    assert tokens.shape == learnt.shape == (8, 256)
    documents = 0
    for row, mask in zip(tokens.tolist(), learnt.tolist(), strict=True):
        assert row[0] == VOCABULARY[BOS]
        text = tokenizer.decode(row)
        assert tokenizer.encode(text, add_special_tokens=False) == row
        documents += text.count(BOS)
        # What is learnt is the answers, each with its <eos>; never what is given, never padding.
        answers = tokenizer.decode(
            [token if marked else VOCABULARY[BOS] for token, marked in zip(row, mask, strict=True)]
        )
        assert answers.count(EOS) == text.count(EOS)
        assert "<|" not in answers
        assert "<pad>" not in answers
    assert documents > 20


def test_answers_marked_in_the_stream_are_right() -> None:
    tokenizer = build_tokenizer()
    tokens, _ = demo_data.pack(random.Random(9), rows=16, length=512, names=("add", "count", "sort"))
    checked = 0
    for row in tokens.tolist():
        for prompt, answer in re.findall(r"<\|user\|>(.*?)<\|end\|><\|assistant\|>(.*?)<eos>", tokenizer.decode(row)):
            assert solve(prompt)[1] == answer
            checked += 1
    assert checked > 50


def test_workers_and_seeds_draw_different_batches() -> None:
    def first(seed: int) -> np.ndarray:
        return next(iter(demo_data.Stream(seed, 1024, (256, 512))))[0].numpy()

    assert (first(0) == first(0)).all()
    assert (first(0) != first(1)).any()
    stream = iter(demo_data.Stream(0, 1024, (256, 512)))
    assert [tuple(next(stream)[0].shape) for _ in range(3)] == [(4, 256), (2, 512), (4, 256)]


def test_tokenizer_round_trip_and_chat_template() -> None:
    tokenizer = build_tokenizer()
    text = "".join(map(chr, range(0x20, 0x7F))) + "\n  two  spaces , kept ."
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == len(text) + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.encode("né", add_special_tokens=False)[1] == tokenizer.unk_token_id
    assert len(tokenizer) == len(VOCABULARY) < 200
    messages = [
        {"role": "user", "content": " 1+1= "},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2="},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<bos><|user|>1+1=<|end|><|assistant|>2<eos><|user|>2+2=<|end|><|assistant|>"
    )


def test_the_learning_rate_rises_then_falls_to_zero() -> None:
    rates = [learning_rate(1.0, progress, 0.1) for progress in (0.0, 0.05, 0.1, 0.55, 1.0)]
    assert rates[0] < rates[1] < rates[2] == 1.0
    assert rates[3] == pytest.approx(0.5)
    assert rates[4] == pytest.approx(0.0)


def test_a_missed_accuracy_is_named() -> None:
    accuracy = {"add": {"plain": 0.995, "chat": 0.98}, "copy": {"plain": 0.96}}
    assert missed(accuracy) == ["add (chat): 98.00% < 99%"]


# What the committed models were trained on: a change of words, wordings or draws is a change of the training stream.
FIRST_OF_SEED_1 = {
    "add": ("748 + 150 =", "898", "05e734b51654a61a"),
    "sub": ("76 - 66 =", "10", "e115404fe92d6b6b"),
    "count": ("count from 15 to 19", "15 16 17 18 19", "226313be3e2e3ec3"),
    "reverse": ("reverse: sun", "nus", "b0013d4e7e323da5"),
    "sort": ("sort:mlqu bag ", "bag mlqu", "60cb087677ab90bc"),
    "copy": ("copy:25", "25", "5f107403c7947d46"),
    "sentence": ("kim has 17 coins and gets 16 more. how many coins now?", "33", "ed6cafe464994d0e"),
}


@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_generator_gives_the_questions_that_the_models_were_trained_on(task: str) -> None:
    rng = random.Random(1)
    drawn = [tasks.question(rng, task, held_out=False) for _ in range(200)]
    prompt, answer, digest = FIRST_OF_SEED_1[task]
    assert (drawn[0].prompt, drawn[0].answer) == (prompt, answer)
    assert sha256("".join(repr(tuple(one)) for one in drawn).encode()).hexdigest()[:16] == digest


def test_the_training_stream_is_the_one_that_the_models_were_trained_on() -> None:
    rng = random.Random(1)
    drawn = "".join(repr(tuple(tasks.training_question(rng))) for _ in range(2000))
    assert sha256(drawn.encode()).hexdigest()[:16] == "f83ac2da8bfce80d"
