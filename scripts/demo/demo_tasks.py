"""Training tasks of the built-in models: questions with exactly checkable answers.

Seven tasks: `add` and `sub` of numbers from 0 to 999 (differences may be negative), `count` on, `reverse` a word, `sort` words,
`copy` a text, and `sentence`, a question about a templated sentence. A question is drawn in two stages: a fact with a key, then
its wording (spaces, phrasing, capital first letter), which never changes the key.

A hash of the key splits training and held-out questions before wording, so a held-out question never occurs in training in any
wording or order of its operands (`add`) or words (`sort`). Sums and differences of one-digit numbers are never held out, since
they are tables to memorize.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from demo_words import ANIMALS, COLORS, NAMES, OBJECTS, PLACES, THINGS, WORDS

HELD_OUT_ONE_IN = 32
REQUIRED_ACCURACY = {
    "add": 0.99,
    "sub": 0.99,
    "count": 0.95,
    "reverse": 0.95,
    "sort": 0.95,
    "copy": 0.95,
    "sentence": 0.95,
}
TASKS = tuple(REQUIRED_ACCURACY)

# Share of each task in the training stream; harder tasks have more.
SHARES = {"add": 0.22, "sub": 0.24, "count": 0.10, "reverse": 0.10, "sort": 0.15, "copy": 0.07, "sentence": 0.12}

ABOUT = "i am a tiny model. i add, subtract, count, reverse, sort and copy."
SMALL_TALK = (
    ("hello", "hello"),
    ("hi", "hello"),
    ("thank you", "you are welcome"),
    ("thanks", "you are welcome"),
    ("who are you?", ABOUT),
    ("what are you?", ABOUT),
    ("what can you do?", ABOUT),
    ("help", ABOUT),
    ("bye", "bye"),
)
SYSTEM_PROMPTS = (
    "be brief",
    "you are a calculator",
    "you are a helpful assistant",
    "answer the question",
    "you are tiny.",
)


class Question(NamedTuple):
    """A prompt without special tokens, and its exact answer."""

    task: str
    key: str
    prompt: str
    answer: str


class _Task(NamedTuple):
    draw: Callable[[random.Random], tuple[str, Any]]  # key, fact
    word: Callable[[random.Random, Any], tuple[str, str]]  # prompt, answer


def is_held_out(key: str) -> bool:
    """Whether the fact of a key is held out from training."""
    digest = blake2b(key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def question(rng: random.Random, task: str, *, held_out: bool) -> Question:
    """Draw a training or held-out question."""
    draw, word = _TASKS[task]
    while True:
        key, fact = draw(rng)
        if is_held_out(key) == held_out:
            break
    prompt, answer = word(rng, fact)
    if rng.random() < 0.12:
        prompt = prompt[0].upper() + prompt[1:]
    return Question(task, key, prompt, answer)


def training_question(rng: random.Random, tasks: Sequence[str] = TASKS) -> Question:
    """Draw a training question, tasks mixed by `SHARES`."""
    if len(tasks) == len(TASKS) and rng.random() < 0.008:
        prompt, answer = _pick(rng, SMALL_TALK)
        prompt = prompt[0].upper() + prompt[1:] if rng.random() < 0.3 else prompt
        return Question("talk", "talk " + prompt, prompt, answer)
    task = rng.choices(tasks, [SHARES[task] for task in tasks])[0]
    return question(rng, task, held_out=False)


def held_out_questions(task: str, count: int, seed: int = 0) -> list[Question]:
    """`count` held-out questions with distinct prompts, reproducible by seed."""
    rng = random.Random(f"held out {task} {seed}")
    found: dict[str, Question] = {}
    while len(found) < count:
        drawn = question(rng, task, held_out=True)
        found.setdefault(drawn.prompt, drawn)
    return list(found.values())


def plain_prompt(asked: Question) -> str:
    """The prompt outside a chat, with a terminator after a trailing digit, which the answer would continue."""
    if asked.task not in ("add", "sub", "count") or not asked.prompt.rstrip()[-1].isdigit():
        return asked.prompt
    if asked.task == "count":
        return asked.prompt.rstrip() + (":" if "from" in asked.prompt else " ...")
    return asked.prompt.rstrip() + "="


def _below(rng: random.Random, bound: int) -> int:
    return int(
        rng.random() * bound
    )  # several times as fast as randrange, which the training stream calls millions of times


def _pick(rng: random.Random, items: Sequence[Any]) -> Any:
    return items[int(rng.random() * len(items))]


# --- add and sub ----------------------------------------------------------------------------------------------------------


def _number(rng: random.Random) -> int:
    choice = rng.random()
    return _below(rng, 1000 if choice < 0.72 else 100 if choice < 0.92 else 10)


def _pair(rng: random.Random) -> tuple[int, int]:
    return _number(rng), _number(rng)


def _long_carry(rng: random.Random) -> tuple[int, int]:
    """Two numbers whose digits sum to 8..10 in most columns, which gives long carries."""
    a = b = 0
    for place in (1, 10, 100):
        digit = _below(rng, 10)
        other = 8 + _below(rng, 3) - digit if rng.random() < 0.8 else _below(rng, 10)
        a += place * digit
        b += place * min(max(other, 0), 9)
    return a, b


def _near(rng: random.Random) -> tuple[int, int]:
    """Two close numbers, whose sign or leading digits depend on late digits."""
    a = _number(rng)
    return a, min(max(a + _below(rng, 41) - 20, 0), 999)


def _draw_add(rng: random.Random) -> tuple[str, Any]:
    a, b = _long_carry(rng) if rng.random() < 0.25 else _pair(rng)
    low, high = (a, b) if a <= b else (b, a)
    return ("table" if high < 10 else f"add {low} {high}"), (a, b)


def _draw_sub(rng: random.Random) -> tuple[str, Any]:
    choice = rng.random()
    a, b = _near(rng) if choice < 0.15 else _pair(rng)
    if choice >= 0.35 and a < b and rng.random() < 0.5:
        a, b = b, a  # fewer negative differences
    if 0.15 <= choice < 0.35:
        b, rest = _long_carry(rng)  # a - b borrows wherever b + rest carries
        a = min(b + rest, 999)
    return ("table" if max(a, b) < 10 else f"sub {a} {b}"), (a, b)


_FORMS = (
    ("{a}{s}{b}=", 40),
    ("{a} {s} {b} =", 10),
    ("{a} {s} {b} = ", 5),
    ("{a} {s} {b}=", 4),
    ("{a}{s}{b}= ", 3),
    ("{a}{s}{b} =", 3),
    ("{a}{s}{b}", 6),
    ("{a} {s} {b}", 5),
    ("{a}{s}{b}?", 3),
    ("{a}{s}{b}=?", 3),
    ("what is {a}{s}{b}?", 6),
    ("what is {a} {s} {b}?", 6),
    ("what is {a} {w} {b}?", 6),
    ("{a} {w} {b}", 3),
    ("{a} {w} {b} is ", 3),
    ("compute {a}{s}{b}", 2),
    ("how much is {a} {s} {b}?", 2),
)
_FORM_TEXTS = tuple(form for form, weight in _FORMS for _ in range(weight))


def _word_add(rng: random.Random, fact: Any) -> tuple[str, str]:
    a, b = fact
    if rng.random() < 0.02:
        return f"add {a} and {b}", str(a + b)
    return _pick(rng, _FORM_TEXTS).format(a=a, b=b, s="+", w="plus"), str(a + b)


def _word_sub(rng: random.Random, fact: Any) -> tuple[str, str]:
    a, b = fact
    if rng.random() < 0.02:
        return f"subtract {b} from {a}", str(a - b)
    return _pick(rng, _FORM_TEXTS).format(a=a, b=b, s="-", w="minus"), str(a - b)


# --- count ----------------------------------------------------------------------------------------------------------------


def _draw_count(rng: random.Random) -> tuple[str, Any]:
    """Continue a sequence by a step, or count from one number to another."""
    if rng.random() < 0.25:
        start = _below(rng, 200 if rng.random() < 0.5 else 20)
        stop = start + 2 + _below(rng, 10)
        return f"count {start} to {stop}", (start, stop, 0)
    step = _pick(rng, (1, 1, 1, 1, 2, 5, 10))
    last = _below(rng, 900 if rng.random() < 0.6 else 100) + 2 * step
    return f"count {last} by {step}", (last, 0, step)


def _word_count(rng: random.Random, fact: Any) -> tuple[str, str]:
    last, stop, step = fact
    if step == 0:
        return f"count from {last} to {stop}", " ".join(map(str, range(last, stop + 1)))
    answer = f"{last + step} {last + 2 * step} {last + 3 * step}"
    if step == 1 and rng.random() < 0.1:
        return f"count on from {last}", answer
    shown = min(_pick(rng, (3, 3, 3, 4, 5)), last // step + 1)
    numbers = (", " if rng.random() < 0.15 else " ").join(str(last - step * back) for back in reversed(range(shown)))
    return _pick(rng, ("count: ", "count: ", "count: ", "count on: ", "continue: ", "count ")) + numbers + _tail(
        rng
    ), answer


def _tail(rng: random.Random) -> str:
    return " " if rng.random() < 0.3 else ""


# --- reverse, sort, copy ------------------------------------------------------------------------------------------------


def _made_word(rng: random.Random) -> str:
    """A listed word, random syllables, or random letters."""
    choice = rng.random()
    if choice < 0.35:
        return _pick(rng, WORDS)
    if choice < 0.65:
        syllables = 1 + _below(rng, 3)
        word = "".join(_pick(rng, "bcdfghjklmnprstvwz") + _pick(rng, "aeiou") for _ in range(syllables))
        return word + _pick(rng, ("", "n", "r", "s", "t", "l"))
    return "".join(_pick(rng, "abcdefghijklmnopqrstuvwxyz") for _ in range(2 + _below(rng, 8)))


def _draw_reverse(rng: random.Random) -> tuple[str, Any]:
    word = _made_word(rng)
    return "reverse " + word, word


def _word_reverse(rng: random.Random, word: Any) -> tuple[str, str]:
    shown = word.capitalize() if rng.random() < 0.1 else word
    start = _pick(rng, ("reverse: ", "reverse: ", "reverse: ", "reverse:", "reverse ", "reverse the word "))
    return start + shown + (" " if rng.random() < 0.1 else ""), shown[::-1]


def _draw_sort(rng: random.Random) -> tuple[str, Any]:
    words = [_pick(rng, WORDS) if rng.random() < 0.6 else _made_word(rng)[:6] for _ in range(2 + _below(rng, 4))]
    if rng.random() < 0.15:
        words[-1] = words[0][:2] + words[-1][:4]  # a common prefix: a later letter decides
    return "sort " + " ".join(sorted(words)), words


def _word_sort(rng: random.Random, words: Any) -> tuple[str, str]:
    start = _pick(rng, ("sort: ", "sort: ", "sort: ", "sort:", "sort ", "sort these words: ", "sort the words: "))
    listed = (", " if rng.random() < 0.15 else " ").join(words)
    return start + listed + (" " if rng.random() < 0.1 else ""), " ".join(sorted(words))


_PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))


def _draw_copy(rng: random.Random) -> tuple[str, Any]:
    pieces = []
    for _ in range(1 + _below(rng, 5)):
        choice = rng.random()
        if choice < 0.7:
            pieces.append(_made_word(rng))
        elif choice < 0.85:
            pieces.append(str(_number(rng)))
        else:
            pieces.append("".join(_pick(rng, _PRINTABLE) for _ in range(1 + _below(rng, 5))))
    if rng.random() < 0.2:
        pieces[0] = pieces[0].capitalize()
    text = " ".join(pieces) + _pick(rng, ("", "", "", ".", "!", "?"))
    return "copy " + text.lower(), text


def _word_copy(rng: random.Random, text: Any) -> tuple[str, str]:
    return _pick(rng, ("copy: ", "copy: ", "copy: ", "copy:", "repeat: ", "say: ")) + text, text


# --- sentence -------------------------------------------------------------------------------------------------------------


def _two(rng: random.Random, items: Sequence[str]) -> tuple[str, str]:
    first, second = _below(rng, len(items)), _below(rng, len(items) - 1)
    return items[first], items[second + (second >= first)]


def _gains(rng: random.Random) -> tuple[str, str]:
    a, b = 1 + _below(rng, 20), 1 + _below(rng, 20)
    thing = _pick(rng, THINGS)
    return f"{_pick(rng, NAMES)} has {a} {thing} and gets {b} more. how many {thing} now?", str(a + b)


def _loses(rng: random.Random) -> tuple[str, str]:
    b, rest = 1 + _below(rng, 15), _below(rng, 15)
    thing = _pick(rng, THINGS)
    return f"{_pick(rng, NAMES)} had {b + rest} {thing} and lost {b}. how many {thing} are left?", str(rest)


def _color(rng: random.Random) -> tuple[str, str]:
    (one, other), (color, unlike) = _two(rng, ANIMALS), _two(rng, COLORS)
    asked, answer = (one, color) if rng.random() < 0.5 else (other, unlike)
    return f"the {one} is {color}. the {other} is {unlike}. what color is the {asked}?", answer


def _where(rng: random.Random) -> tuple[str, str]:
    (one, other), (here, there) = _two(rng, NAMES), _two(rng, PLACES)
    asked, answer = (one, here) if rng.random() < 0.5 else (other, there)
    return f"{one} is in the {here}. {other} is in the {there}. where is {asked}?", answer


def _owner(rng: random.Random) -> tuple[str, str]:
    (one, other), (mine, yours) = _two(rng, NAMES), _two(rng, OBJECTS)
    asked, answer = (mine, one) if rng.random() < 0.5 else (yours, other)
    return f"{one} has a {mine}. {other} has a {yours}. who has the {asked}?", answer


def _giver(rng: random.Random) -> tuple[str, str]:
    one, other = _two(rng, NAMES)
    thing = _pick(rng, OBJECTS)
    asked, answer = ("has", other) if rng.random() < 0.5 else ("gave away", one)
    return f"{one} gave the {thing} to {other}. who {asked} the {thing}?", answer


def _taller(rng: random.Random) -> tuple[str, str]:
    one, other = _two(rng, NAMES)
    said, unsaid = _pick(rng, (("taller", "shorter"), ("older", "younger"), ("faster", "slower")))
    asked, answer = (said, one) if rng.random() < 0.5 else (unsaid, other)
    return f"{one} is {said} than {other}. who is {asked}?", answer


_TEMPLATES = (_gains, _loses, _color, _where, _owner, _giver, _taller)


def _draw_sentence(rng: random.Random) -> tuple[str, Any]:
    prompt, answer = _pick(rng, _TEMPLATES)(rng)
    return "sentence " + prompt, (prompt, answer)


def _word_sentence(rng: random.Random, fact: Any) -> tuple[str, str]:
    prompt, answer = fact
    return prompt + (" " if rng.random() < 0.1 else ""), answer


_TASKS = {
    "add": _Task(_draw_add, _word_add),
    "sub": _Task(_draw_sub, _word_sub),
    "count": _Task(_draw_count, _word_count),
    "reverse": _Task(_draw_reverse, _word_reverse),
    "sort": _Task(_draw_sort, _word_sort),
    "copy": _Task(_draw_copy, _word_copy),
    "sentence": _Task(_draw_sentence, _word_sentence),
}
