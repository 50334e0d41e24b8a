"""Exact-match evaluation of a built-in model on held-out questions."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import demo_tasks as tasks
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

# A plain question, one in the chat template, and one after one to three other turns.
FORMS = ("plain", "chat", "dialogue")


@torch.inference_mode()
def greedy(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], max_new_tokens: int
) -> list[str]:
    """Greedy completions up to `<eos>`, as text; `?` marks an unfinished answer.

    Right padding is invisible to a causal model; no cache, since the model is tiny.
    """
    device = next(model.parameters()).device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    ids = torch.full((len(prompts), int(lengths.max()) + max_new_tokens), tokenizer.pad_token_id, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    rows = torch.arange(len(prompts), device=device)
    ends = lengths.clone()
    running = torch.ones_like(rows, dtype=torch.bool)
    for _ in range(max_new_tokens):
        width = int(ends.max())
        logits: Tensor = model(input_ids=ids[running, :width], use_cache=False).logits
        chosen = logits[torch.arange(len(logits), device=device), ends[running] - 1].argmax(-1)
        ids[rows[running], ends[running]] = chosen
        ends[running] += 1
        running[running.clone()] = chosen != tokenizer.eos_token_id
        if not running.any():
            break
    answers = [
        ids[row, start:end].tolist()
        for row, (start, end) in enumerate(zip(lengths.tolist(), ends.tolist(), strict=True))
    ]
    return [
        tokenizer.decode(answer, skip_special_tokens=True) + ("" if answer[-1] == tokenizer.eos_token_id else "?")
        for answer in answers
    ]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, asked: tasks.Question, form: str, rng: random.Random) -> list[int]:
    """The prompt in a form; earlier turns of a dialogue are correct training examples."""
    if form == "plain":
        return tokenizer.encode(tasks.plain_prompt(asked))
    messages = []
    for _ in range(1 + rng.randrange(3) if form == "dialogue" else 0):
        earlier = tasks.training_question(rng)
        messages += [{"role": "user", "content": earlier.prompt}, {"role": "assistant", "content": earlier.answer}]
    messages.append({"role": "user", "content": asked.prompt})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def evaluate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    seed: int = 0,
    batch: int = 1536,
    names: Sequence[str] = tasks.TASKS,
) -> dict[str, Any]:
    """Accuracy by task and form on `count` held-out questions per task, the same in every form.

    Returns `{"accuracy": {task: {form: share}}, "questions": count, "facts": {task: distinct facts}, "wrong": {task: [...]}}`.
    """
    accuracy: dict[str, dict[str, float]] = {}
    facts: dict[str, int] = {}
    wrong: dict[str, list[dict[str, str]]] = defaultdict(list)
    for task in names:
        questions = tasks.held_out_questions(task, count, seed)
        facts[task] = len({asked.key for asked in questions})
        right = dict.fromkeys(FORMS, 0)
        rng = random.Random(f"{task} {seed}")
        every = [(form, asked) for form in FORMS for asked in questions]
        for begin in range(0, len(every), batch):
            chunk = every[begin : begin + batch]
            longest = max(len(asked.answer) for _, asked in chunk)  # one token a character
            prompts = [prompt_ids(tokenizer, asked, form, rng) for form, asked in chunk]
            for (form, asked), answer in zip(chunk, greedy(model, tokenizer, prompts, longest + 2), strict=True):
                right[form] += answer == asked.answer
                if answer != asked.answer and len(wrong[task]) < 3:
                    wrong[task].append({"form": form, "prompt": asked.prompt, "expected": asked.answer, "got": answer})
        accuracy[task] = {form: right[form] / count for form in FORMS}
    return {"accuracy": accuracy, "questions": count, "facts": facts, "wrong": dict(wrong)}


def missed(accuracy: dict[str, dict[str, float]]) -> list[str]:
    """Tasks and forms below the required accuracy."""
    return [
        f"{task} ({form}): {share:.2%} < {tasks.REQUIRED_ACCURACY[task]:.0%}"
        for task, forms in accuracy.items()
        for form, share in forms.items()
        if share < tasks.REQUIRED_ACCURACY[task]
    ]


def score(accuracy: dict[str, dict[str, float]]) -> float:
    """Mean accuracy over tasks and forms, the criterion of the best snapshot."""
    shares = [share for forms in accuracy.values() for share in forms.values()]
    return sum(shares) / len(shares)
