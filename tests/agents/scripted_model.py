"""A model that says given texts: its next token depends on the position alone, and its chat template chooses the position.

Each text of a script has a range of positions. The template renders a conversation as a real one does, drops it, and writes as many
padding tokens as the text that is due begins at: the one after as many answers as the conversation has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

CONTEXT = 40_960
_WIDTH = 64
_SPECIAL = ("<|pad|>", "<|end|>")
Turn = str | tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Script:
    """What the model says in the conversations of one client.

    Attributes:
        marker: a text of the client's tools, which tells it from others; empty: conversations without tools.
        turns: texts, or calls as (name, arguments), one a turn.
    """

    marker: str
    turns: Sequence[Turn]


def hermes(name: str, arguments: dict[str, Any]) -> str:
    """A call as Qwen2.5 and Qwen3 write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def functions(name: str, arguments: dict[str, Any]) -> str:
    """A call as Qwen3-Coder writes it."""
    values = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


FORMATS = {"hermes": hermes, "qwen3_coder": functions}
_EXAMPLES = {"hermes": "<tool_call>", "qwen3_coder": "<tool_call>\\n<function=example>"}
TEMPLATES = ("reasoning", "plain", "strict")


def _conversation(kind: str, form: str) -> str:
    """A template of `<|role|>` messages with calls; `strict` takes a system message in the first place only."""
    check = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be first.') }}{% endif %}"
    thought = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    return (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + f"{{{{ '{_EXAMPLES[form]}' if tools }}}}"
        "{% for m in messages %}" + (check if kind == "strict" else "") + "<|{{ m.role }}|>"
        "{% if m.role == 'assistant' %}" + (thought if kind == "reasoning" else "") + "{% endif %}{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )


def template(kind: str, form: str, starts: dict[str, list[int]]) -> str:
    """The chat template; `starts` are the places of each script's texts, by its marker."""
    count = "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'assistant' %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    choice = str(starts[""])
    for marker, places in starts.items():
        if marker:
            choice = f"({places} if '{marker}' in tj else {choice})"
    due = "{{ '<|pad|>' * s[[ns.n, s | length - 1] | min] }}"
    return (
        f"{{%- set dropped %}}{_conversation(kind, form)}{{% endset %}}{count}"
        f"{{%- set tj = tools | tojson if tools else '' %}}{{%- set s = {choice} %}}{due}"
    )


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    return tokenizer


def make(folder: Path, scripts: Sequence[Script], kind: str, form: str) -> Path:
    """Write a model with a template of a kind, whose calls have a format."""
    tokenizer = _tokenizer()
    end = tokenizer.token_to_id("<|end|>")
    starts: dict[str, list[int]] = {}
    said: list[tuple[int, list[int]]] = []
    place = 1
    for script in scripts:
        starts[script.marker] = []
        for turn in script.turns:
            text = turn if isinstance(turn, str) else FORMATS[form](*turn)
            text = f"<think>\nI think.\n</think>\n\n{text}" if kind == "reasoning" else text
            ids = [*tokenizer.encode(text).ids, end]
            starts[script.marker].append(place)
            said.append((place, ids))
            place += len(ids)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_positions=CONTEXT,
        n_embd=_WIDTH,
        n_layer=1,
        n_head=1,
        bos_token_id=end,
        eos_token_id=end,
        tie_word_embeddings=False,
    )
    model = GPT2LMHeadModel(config)
    codes = torch.randint(0, 2, (config.vocab_size, _WIDTH), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "ln" in name and name.endswith("weight") else 0.0)
        for begin, ids in said:
            model.transformer.wpe.weight[begin - 1 : begin - 1 + len(ids)] = codes[ids]
        model.lm_head.weight.copy_(codes)
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = template(kind, form, starts)
    fast.save_pretrained(folder)
    return folder
