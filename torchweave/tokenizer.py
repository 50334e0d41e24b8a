"""Text to token ids and back, with text that appears as the ids arrive.

Everything here is lazy: the tokenizer's files are read at the first use, so that an engine fed with token ids needs none.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_WINDOW = 64
"""Ids that are decoded together at most, so that bytes which never become text cost no more and more."""


def import_without_torch() -> None:
    """Import transformers for its tokenizers alone, in a process that runs no model; with torch where that is there already.

    Loading torch's libraries makes every thread of a process wait, from a cold disk for seconds. To transformers torch seems not
    to be installed then, for as long as the process lives.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    advice = logging.getLogger("transformers")  # would tell of the missing torch
    sys.modules["torch"], advice.disabled = None, True  # type: ignore[assignment]
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401
    finally:
        del sys.modules["torch"]
        advice.disabled = False


def check_text(text: str) -> None:
    """Refuse what a tokenizer would fail on: Python reads bytes that are no text as halves of surrogate pairs.

    Raises:
        ValueError: it is no text.
    """
    if not isinstance(text, str):
        raise ValueError(f"A text was expected, but this is {text!r}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The text holds half of a surrogate pair at character {error.start}; send whole characters."
        ) from None


def content_text(content: Any) -> str | None:
    """The text of a message of a conversation; parts of text are joined.

    Raises:
        ValueError: it is neither text nor parts of text.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("expected a text or a list of parts")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None  # type: ignore[union-attr]
        if not isinstance(text, str):
            what = f"a part of type {kind!r}" if isinstance(kind, str) else "something else"
            what += " without a text" if kind in ("text", "refusal") else ""
            raise ValueError(f'the model reads text alone: expected {{"type": "text", "text": ...}}, but found {what}')
        texts.append(text)
    return "\n".join(texts)


def read_eos_token_id(folder: Path) -> int | None:
    """The id of a tokenizer's own end token, by the JSON files of its folder alone; None where they do not say.

    Of `tokenizer.json`, which may be large, only the tokens beside the vocabulary are read.
    """
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        named = config.get("eos_token")
        text = named.get("content") if isinstance(named, dict) else named
        if text is None:
            return None
        added = config.get("added_tokens_decoder") or {}
        for token, entry in added.items():
            if entry.get("content") == text:
                return int(token)
        whole = (folder / "tokenizer.json").read_text(encoding="utf-8")
        begin = whole.index("[", whole.index('"added_tokens"'))
        entries, _ = json.JSONDecoder().raw_decode(whole, begin)
        return next((int(entry["id"]) for entry in entries if entry["content"] == text), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # what is wrong with the files is told where the tokenizer is used


class Tokenizer:
    """The tokenizer of a model folder.

    `from_folder` returns None where a folder has no tokenizer files.

    Args:
        trust_remote_code: run Python code that comes with the folder.
    """

    def __init__(self, folder: Path, trust_remote_code: bool = False) -> None:
        self.folder = folder
        self.trust_remote_code = trust_remote_code
        self._single_token_texts: dict[tuple[int, bool], str] = {}  # of single tokens by themselves

    @classmethod
    def from_folder(cls, folder: Path | None, trust_remote_code: bool = False) -> Tokenizer | None:
        """The tokenizer of `folder`, or None if it has none."""
        if folder is None or not any((folder / name).is_file() for name in _FILES):
            return None
        return cls(folder, trust_remote_code)

    @functools.cached_property
    def hf_tokenizer(self) -> Any:
        """transformers' tokenizer object.

        Raises:
            ValueError: the files are damaged or need a package that is not installed.
        """
        from transformers import AutoTokenizer

        try:
            # Always said: where it is not, transformers asks the terminal, and runs the code if somebody there types yes.
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)
        except Exception as error:
            if not self.trust_remote_code and "trust_remote_code" in str(error):
                raise ValueError(
                    f"The tokenizer in {self.folder} is code that comes with the folder; use trust_remote_code if you trust it."
                ) from error
            raise ValueError(f"The tokenizer in {self.folder} cannot be read: {error}") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the beginning-of-text token where the model has one.

        Raises:
            ValueError: it is no text.
        """
        check_text(text)
        # Not verbose: a text that is too long is told of by the engine, as an error.
        return self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, exactly as the tokens say: spaces before punctuation stay."""
        if self._backend is not None:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self.hf_tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def text(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """`decode`, quick for a token by itself and for none."""
        if len(ids) != 1:
            return self.decode(ids, skip_special_tokens) if ids else ""
        key = ids[0], skip_special_tokens
        found = self._single_token_texts.get(key)
        if found is None:
            found = self._single_token_texts[key] = self.decode(ids, skip_special_tokens)
        return found

    @functools.cached_property
    def _backend(self) -> Any | None:
        """What decodes for transformers' object, where that adds nothing: four times as fast for a few ids."""
        from transformers import PreTrainedTokenizerFast

        plain = getattr(type(self.hf_tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode
        return self.hf_tokenizer.backend_tokenizer if plain else None

    def stream(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A decoder of ids that arrive one after the other, behind `prompt_ids`."""
        return IncrementalDetokenizer(self, prompt_ids, skip_special_tokens)

    def token_text(self, token: int) -> str:
        """The text that one token adds to a text, for logprobs.

        At the beginning of a text, decoders in SentencePiece's manner leave a token's space away; so it is read behind itself.
        """
        alone, twice = self.text([token], False), self.decode([token, token], False)
        return twice[len(alone) :] if twice.startswith(alone) and _REPLACEMENT not in twice else alone

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be used."""
        return getattr(self.hf_tokenizer, "chat_template", None) is not None

    def chat(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation, by the model's own chat template.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first; a content is a text, or a list of parts, which are joined.
            variables: further variables of the template, such as `tools` or `enable_thinking`; `chat_template` is a template in
                the place of the model's own.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        if not (self.has_chat_template or variables.get("chat_template")):
            raise ValueError(f"The tokenizer in {self.folder} has no chat template; use generate with plain text.")
        if not isinstance(messages, Iterable) or not all(
            isinstance(message, Mapping) and "role" in message for message in messages
        ):
            raise ValueError(
                'A message of a conversation is a dict, {"role": ..., "content": ...}; give a list of them.'
            )
        try:
            plain_messages = [
                {**each, "content": content_text(each["content"])} if "content" in each else each for each in messages
            ]
        except ValueError as error:
            raise ValueError(f"The content of a message cannot be read: {error}.") from None
        try:
            text = self.hf_tokenizer.apply_chat_template(
                plain_messages, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        except Exception as error:
            raise ValueError(f"The model's chat template refuses these messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def tokenizer_json(self) -> str | None:
        """The tokenizer as JSON, in the form of Hugging Face's tokenizers; None where it is none of theirs."""
        inner = getattr(self.hf_tokenizer, "backend_tokenizer", None)
        if inner is None:
            return None
        inner = copy.copy(inner)
        inner.no_padding()
        inner.no_truncation()
        return inner.to_str()

    def token_bytes(self) -> list[bytes | None]:
        """The text of each token by itself; None for special tokens and parts of characters."""
        special = set(self.hf_tokenizer.all_special_ids)
        texts = [None if token in special else self.token_text(token) for token in range(len(self))]
        return [None if not text or _REPLACEMENT in text else text.encode() for text in texts]

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-text token."""
        return self.hf_tokenizer.eos_token_id

    def __len__(self) -> int:
        return len(self.hf_tokenizer)


class IncrementalDetokenizer:
    """Text of token ids that arrive one after the other; the pieces joined are the text of all ids.

    A token alone has no certain text: a character may be spread over several tokens, a token may end one and begin
    the next, and a SentencePiece token's leading space depends on what stands before it. So the ids since the last
    certain place are decoded together with the piece before them, and what that adds is given out, less the U+FFFD
    at its end that stand for a character still in the making.
    """

    _CONTEXT = 6
    _MAX_CHAR_BYTES = 4  # of a character

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._text = functools.partial(tokenizer.text, skip_special_tokens=skip_special_tokens)
        self._window = self._context(prompt_ids)
        self._num_stable = len(self._window)  # ids of the window whose text was given out and is certain
        self._stable_text = self._text(self._window)  # their text
        self._num_emitted = len(self._stable_text)  # characters of the window's text

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt's last ids, from the beginning of a character on: a decoder may show all bytes behind half of one broken."""
        for size in range(self._CONTEXT, self._CONTEXT + self._MAX_CHAR_BYTES):
            context = list(prompt_ids[-size:])
            if not self._text(context).startswith(_REPLACEMENT):
                return context
        return list(prompt_ids[-self._CONTEXT :])

    def feed(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; empty while a character is still in the making."""
        window = [*self._window, *ids]
        text = self._decode_window(window)
        if len(ids) > 1 and _REPLACEMENT in text[len(self._stable_text) :]:
            # Bytes that are no text may cost their neighbours too, so these must not be others than if they had come one by one.
            half = len(ids) // 2
            return self.feed(ids[:half]) + self.feed(ids[half:])
        self._window = window
        certain = text.rstrip(_REPLACEMENT)
        if len(certain) == len(text) or len(self._window) > _MAX_WINDOW:
            return self._commit(text)
        new = certain[self._num_emitted :]
        self._num_emitted += len(new)
        return new

    def finish(self) -> str:
        """What is left, with U+FFFD where a character never became whole."""
        return self._commit(self._decode_window(self._window)) if self._window else ""

    def _decode_window(self, window: list[int]) -> str:
        """The text of a window. What was given out stays, if the ids behind it change how it reads: those are read alone then."""
        text = self._decode(window)
        if text.startswith(self._stable_text):
            return text
        return self._stable_text + self._decode(window[self._num_stable :])

    def _commit(self, text: str) -> str:
        """All ids of the window are certain, and `text` is theirs; returns what of it is new."""
        new = text[self._num_emitted :]
        # What came since the last certain place is the context of what follows, unless it has no text (special tokens).
        begin = self._num_stable if new or len(self._window) > _MAX_WINDOW else 0
        self._window = self._window[begin:]
        self._num_stable = len(self._window)
        self._stable_text = self._text(self._window)
        self._num_emitted = len(self._stable_text)
        return new
