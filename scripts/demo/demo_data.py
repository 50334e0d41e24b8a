"""Training stream of the built-in models: question-answer documents packed into rows of tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import demo_tasks as tasks
import numpy as np
import torch
from demo_folder import ASSISTANT, BOS, CHARACTERS, END, EOS, PAD, SPECIALS, SYSTEM, USER, VOCABULARY
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

# In text form, a special token is a character beyond ASCII, so that `bytes.translate` encodes at memory speed.
MARK = {token: chr(0x80 + index) for index, token in enumerate(SPECIALS)}
_BOS, _EOS, _SYSTEM, _USER, _ASSISTANT, _END = (MARK[token] for token in (BOS, EOS, SYSTEM, USER, ASSISTANT, END))
_IDS = bytearray([VOCABULARY["<unk>"]] * 256)
for _token, _mark in MARK.items():
    _IDS[ord(_mark)] = VOCABULARY[_token]
for _character in CHARACTERS:
    _IDS[ord(_character)] = VOCABULARY[_character]
ENCODING = bytes(_IDS)

Document = list[tuple[str, str]]  # (prompt, completion to learn) pairs


def document(rng: random.Random, chat_turns: int, names: Sequence[str] = tasks.TASKS) -> Document:
    """A plain question with its answer, or, half of the time, a conversation of up to `chat_turns` questions."""
    if rng.random() < 0.5:
        asked = tasks.training_question(rng, names)
        return [(_BOS + tasks.plain_prompt(asked), asked.answer + _EOS)]
    turns = 1 if rng.random() < 0.5 else 1 + int(rng.random() * chat_turns)
    start = _BOS
    if rng.random() < 0.1:
        start += _SYSTEM + rng.choice(tasks.SYSTEM_PROMPTS) + _END
    found: Document = []
    for _ in range(turns):
        asked = tasks.training_question(rng, names)
        # The chat template strips user messages.
        found.append((start + _USER + asked.prompt.strip() + _END + _ASSISTANT, asked.answer + _EOS))
        start = ""
    return found


def pack(
    rng: random.Random, rows: int, length: int, names: Sequence[str] = tasks.TASKS
) -> tuple[np.ndarray, np.ndarray]:
    """Pack whole documents into padded rows: tokens and a mask of learnt tokens, both uint8 [rows, length].

    Attention spans the documents of a row, so that the model learns to answer at any position.
    """
    tokens = bytearray()
    learnt = bytearray()
    pad = MARK[PAD].encode("latin-1")
    row_end = length
    refused = 0
    while True:
        # Near the end of a row, try a few single questions before padding the rest.
        parts = document(rng, length // 64 if refused == 0 else 1, names)
        text = "".join(given + answer for given, answer in parts).encode("latin-1")
        if len(tokens) + len(text) > row_end:
            refused += 1
            if refused < 4:
                continue
            refused = 0
            missing = row_end - len(tokens)
            tokens += pad * missing
            learnt += bytes(missing)
            row_end += length
            if row_end > rows * length:
                break
        tokens += text
        for given, answer in parts:
            learnt += bytes(len(given)) + b"\1" * len(answer)
    encoded = bytes(tokens).translate(ENCODING)
    shape = (rows, length)
    return np.frombuffer(encoded, np.uint8).reshape(shape).copy(), np.frombuffer(learnt, np.uint8).reshape(shape).copy()


class Stream(IterableDataset):
    """Endless batches of `tokens` tokens, cycling through row lengths, with a seed per worker."""

    def __init__(self, seed: int, tokens: int, lengths: Sequence[int], names: Sequence[str] = tasks.TASKS) -> None:
        super().__init__()
        self.seed, self.tokens, self.lengths, self.names = seed, tokens, tuple(lengths), tuple(names)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rng = random.Random(f"train {self.seed} {worker}")
        index = worker  # batch number in the whole stream, which determines the row length on all workers
        while True:
            length = self.lengths[index % len(self.lengths)]
            tokens, learnt = pack(rng, self.tokens // length, length, self.names)
            yield torch.from_numpy(tokens), torch.from_numpy(learnt)
            index += workers
