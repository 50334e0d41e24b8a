"""Tokenizer and incremental detokenizer.

The tokenizer's files are read at the first use, so that engines that only receive token ids do not need them.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torchweave.chat_template import TemplateTraits, adapt, probe
from torchweave.utils.transformers_import import import_models, postponed

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_WINDOW = 64
"""Most ids decoded together, which bounds the cost of bytes that never become text."""
_CACHED_TEXTS = 1 << 13
"""Texts of single tokens that a process keeps: those of a whole vocabulary take tens of MiB in each HTTP process."""
_CACHED_TEMPLATES = 32
"""Chat templates of which a process remembers what they take; requests may bring their own."""
_MAX_COMPOSED = 4
"""Most characters that Unicode normalization composes to one; tokenizers may normalize a text first."""


@functools.cache
def _byte_level_table() -> dict[str, int]:
    """The byte that a character of a byte-level token stands for: itself if it is printable, else one of those from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def import_without_torch() -> None:
    """Import transformers' tokenizers without torch in a process that runs no model, unless torch is imported already.

    Loading torch's libraries blocks every thread, for seconds from a cold disk. For transformers in this process, torch is then
    not installed.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        with without_advice(), postponed():
            import_models()  # before any other import of transformers
            from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401
    finally:
        del sys.modules["torch"]


@contextmanager
def without_advice() -> Iterator[None]:
    """Drop the advice that transformers' package logs when it is executed, which it is again for processors: to install torch."""
    advice = logging.getLogger("transformers")
    advice.addFilter(_drop)  # `disabled` would not last: uvicorn configures logging meanwhile and resets it
    try:
        yield
    finally:
        advice.removeFilter(_drop)


def _drop(_: logging.LogRecord) -> bool:
    return False


class TextTooLong(ValueError):
    """A text has more tokens than `max_model_len` even if every token is the longest of the vocabulary; it is not encoded."""


_LONG_CHARS, _CHARS_PER_TOKEN = 1 << 16, 8
"""Of a longer text, the beginning is encoded first: it has at least so many characters, and so many for each allowed token."""
_CUT_TOKENS = 64
"""By how many tokens the beginning of a text may exceed the whole: its last word was cut."""
_GENERATION_TAG = re.compile(r"{%[-+]?\s*(end)?generation\s*[-+]?%}")
"""Tag of transformers around the assistant's text, which Jinja does not know."""


def check_chat_template(text: str, what: str) -> None:
    """Raise ValueError with the line where `what` is not valid Jinja."""
    import jinja2  # needed with a template of the user's only

    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAG.sub("", text))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{what} is not valid Jinja: line {error.lineno}: {error.message}") from None


def check_text(text: str) -> None:
    """Check a text for values on which tokenizers fail: Python decodes invalid bytes to lone surrogates.

    Raises:
        ValueError: the value is no text or holds a lone surrogate.
    """
    if not isinstance(text, str):
        raise ValueError(f"Expected a text, but got {text!r}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The text holds half of a surrogate pair at character {error.start}; send whole characters."
        ) from None


def read_eos_token_id(folder: Path) -> int | None:
    """The id of a tokenizer's end token from the JSON files of its folder; None if not declared.

    Only the added tokens of `tokenizer.json` are parsed, since the file may be large.
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
        return None  # errors in the files are reported when the tokenizer is used


def _check_start(text: str, max_tokens: int, encode: Callable[[str], list[int]]) -> None:
    """Refuse a long text whose beginning has too many tokens already: megabytes take a minute, and gigabytes of memory."""
    length = max(_LONG_CHARS, _CHARS_PER_TOKEN * max_tokens)
    if len(text) > 2 * length and (count := len(encode(text[:length]))) > max_tokens + _CUT_TOKENS:
        raise TextTooLong(
            f"This model's maximum context length is {max_tokens} tokens (max_model_len), but the first {length} of the prompt's "
            f"{len(text)} characters have {count}; shorten the prompt."
        )


class Tokenizer:
    """The tokenizer of a model folder.

    Args:
        trust_remote_code: run Python code in the folder.
    """

    def __init__(self, folder: Path, trust_remote_code: bool = False) -> None:
        self.folder = folder
        self.trust_remote_code = trust_remote_code
        self._text_alone = functools.lru_cache(_CACHED_TEXTS)(self._decode_alone)
        self._traits = functools.lru_cache(_CACHED_TEMPLATES)(self._probe)
        self._text_within = functools.lru_cache(_CACHED_TEXTS)(self._decode_within)

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
            ValueError: the files are damaged or need a missing package.
        """
        from transformers import AutoTokenizer

        try:
            # Always explicit: otherwise transformers prompts on the terminal.
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)
        except Exception as error:
            if not self.trust_remote_code and "trust_remote_code" in str(error):
                raise ValueError(
                    f"The tokenizer in {self.folder} is Python code in the folder; use trust_remote_code if you trust it."
                ) from error
            raise ValueError(f"The tokenizer in {self.folder} cannot be read: {error}") from error

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of a text, with the beginning-of-text token if the model has one.

        Args:
            max_tokens: refuse a text that has more even if each of its tokens is the longest one, without encoding it.

        Raises:
            ValueError: see `check_text`.
            TextTooLong: see `max_tokens`.
        """
        self._check_text(text, max_tokens)
        # Not verbose: the engine reports texts that are too long.
        encode = functools.partial(self.hf_tokenizer.encode, add_special_tokens=add_special_tokens, verbose=False)
        if max_tokens is not None:
            _check_start(text, max_tokens, encode)
        return encode(text)

    def _check_text(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is not None and len(text) > max_tokens * self._longest_token * _MAX_COMPOSED:
            raise TextTooLong(
                f"This model's maximum context length is {max_tokens} tokens (max_model_len), but the prompt has {len(text)} "
                f"characters, and a token has at most {self._longest_token}; shorten the prompt."
            )
        check_text(text)

    def encode_pair(self, text: str, other: str, max_tokens: int | None = None) -> list[int]:
        """Token ids of two texts as the tokenizer joins a pair, with its special tokens; otherwise as `encode`."""
        for each in (text, other):
            self._check_text(each, max_tokens)
        return self.hf_tokenizer(text, other, verbose=False)["input_ids"]

    @functools.cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.hf_tokenizer.get_vocab()))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, without cleanup of spaces before punctuation."""
        if self._backend is not None:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self.hf_tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def text(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """`decode` with a cache for single tokens."""
        if len(ids) != 1:
            return self.decode(ids, skip_special_tokens) if ids else ""
        return self._text_alone(ids[0], skip_special_tokens)

    def _decode_alone(self, token: int, skip_special_tokens: bool) -> str:
        return self.decode([token], skip_special_tokens)

    @functools.cached_property
    def _backend(self) -> Any | None:
        """The Rust tokenizer if transformers' decode adds nothing to it: four times as fast for a few ids."""
        from transformers import PreTrainedTokenizerFast

        plain = getattr(type(self.hf_tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode
        return self.hf_tokenizer.backend_tokenizer if plain else None

    def stream(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """An incremental detokenizer of ids that follow `prompt_ids`."""
        return IncrementalDetokenizer(self, prompt_ids, skip_special_tokens)

    def token_text(self, token: int) -> str:
        """The text that a token adds within a text, for logprobs.

        SentencePiece decoders drop a token's leading space at the start of a text, so the token is decoded twice in a row.
        """
        return self._text_within(token)

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes that a token adds to a text; None if it is a part of a character of a tokenizer that does not tell them.

        Consecutive tokens' bytes join to the text. Byte-level tokens write each byte as a character (GPT-2's table), tokens of
        byte fallback as `<0xE2>`.
        """
        text = self.token_text(token)
        if _REPLACEMENT not in text:
            return text.encode()
        piece = self.hf_tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return None
        if fallback := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(fallback[1], 16)])
        table = _byte_level_table()
        return bytes(table[char] for char in piece) if all(char in table for char in piece) else None

    def _decode_within(self, token: int) -> str:
        alone, twice = self.decode([token], False), self.decode([token, token], False)
        return twice[len(alone) :] if twice.startswith(alone) and _REPLACEMENT not in twice else alone

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        *,
        max_prompt_tokens: int | None = None,
        add_special_tokens: bool = False,
        content_format: Literal["auto", "string", "openai"] = "auto",
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation, from the model's chat template.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first; a content is a text or a list of text parts. They are
                brought into the form that the template takes, see `adapt`.
            max_prompt_tokens: see `max_tokens` of `encode`.
            add_special_tokens: add the tokenizer's special tokens to those that the template writes.
            content_format: see `adapt`.
            variables: further variables of the template, such as `tools` or `enable_thinking`; `chat_template` replaces the
                model's template.

        Raises:
            ValueError: the model has no chat template, or the template rejects the messages.
        """
        if variables.get("chat_template"):
            check_chat_template(variables["chat_template"], "chat_template")
        elif not self.has_chat_template():
            raise ValueError(f"The tokenizer in {self.folder} has no chat template; use generate with plain text.")
        if not isinstance(messages, Iterable) or not all(
            isinstance(message, Mapping) and "role" in message for message in messages
        ):
            raise ValueError('Expected a list of messages, each a dict {"role": ..., "content": ...}.')
        try:
            plain_messages = adapt(messages, self.template_traits(variables.get("chat_template")), content_format)
        except ValueError as error:
            raise ValueError(f"Invalid content of a message: {error}.") from None
        try:
            text = self.hf_tokenizer.apply_chat_template(
                plain_messages, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        except Exception as error:
            raise ValueError(f"The model's chat template rejects these messages: {error}") from error
        return self.encode(text, add_special_tokens, max_prompt_tokens)

    def template_traits(self, template: str | None = None) -> TemplateTraits:
        """What a chat template takes; None: the model's own, which it must have."""
        return self._traits(template)

    def _probe(self, template: str | None) -> TemplateTraits:
        def render(messages: list[dict[str, Any]], **variables: Any) -> str:
            return self.hf_tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, chat_template=template, **variables
            )

        return probe(render, template or str(self.hf_tokenizer.chat_template))

    def has_chat_template(self) -> bool:
        """Whether the folder gives a chat template."""
        return getattr(self.hf_tokenizer, "chat_template", None) is not None

    def tokenizer_json(self) -> str | None:
        """The tokenizer as JSON of Hugging Face's tokenizers; None for other tokenizers."""
        inner = getattr(self.hf_tokenizer, "backend_tokenizer", None)
        if inner is None:
            return None
        inner = copy.copy(inner)
        inner.no_padding()
        inner.no_truncation()
        return inner.to_str()

    def added_tokens(self) -> dict[str, int]:
        """Tokens beside the vocabulary that was learned, such as special ones, by their texts."""
        return dict(self.hf_tokenizer.get_added_vocab())

    def token_bytes(self) -> list[bytes | None]:
        """Text of each token in UTF-8; None for special tokens and parts of characters."""
        special = set(self.hf_tokenizer.all_special_ids)
        texts = [None if token in special else self.token_text(token) for token in range(len(self))]
        return [None if not text or _REPLACEMENT in text else text.encode() for text in texts]

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end-of-text token."""
        return self.hf_tokenizer.eos_token_id

    def __len__(self) -> int:
        return len(self.hf_tokenizer)


class IncrementalDetokenizer:
    """Incremental text of a stream of token ids; the concatenated pieces are the text of all ids.

    The text of a single token is ambiguous: characters may span tokens, and a SentencePiece token's leading space depends on its
    predecessor. So the ids since the last stable position are decoded with the preceding piece as context, and the added text is
    emitted without trailing U+FFFD, which mark incomplete characters.
    """

    _CONTEXT = 6
    _MAX_CHAR_BYTES = 4

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._text = functools.partial(tokenizer.text, skip_special_tokens=skip_special_tokens)
        self._window = self._context(prompt_ids)
        self._num_stable = len(self._window)  # ids of the window whose text is emitted and final
        self._stable_text = self._text(self._window)  # their text
        self._num_emitted = len(self._stable_text)  # characters of the window's text

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt's last ids from the start of a character, since a partial character may garble the following bytes."""
        for size in range(self._CONTEXT, self._CONTEXT + self._MAX_CHAR_BYTES):
            context = list(prompt_ids[-size:])
            if not self._text(context).startswith(_REPLACEMENT):
                return context
        return list(prompt_ids[-self._CONTEXT :])

    def feed(self, ids: Sequence[int]) -> str:
        """The text completed by `ids`; empty while a character is incomplete."""
        window = [*self._window, *ids]
        text = self._decode(window)
        if not text.startswith(self._stable_text):
            text = self._decode_window(window)
        if len(ids) > 1 and _REPLACEMENT in text[len(self._stable_text) :]:
            # Invalid bytes may garble their neighbors; split so that the result equals that of feeding ids one by one.
            half = len(ids) // 2
            return self.feed(ids[:half]) + self.feed(ids[half:])
        self._window = window
        complete = text.rstrip(_REPLACEMENT)
        if len(complete) == len(text) or len(self._window) > _MAX_WINDOW:
            return self._commit(text)
        new = complete[self._num_emitted :]
        self._num_emitted += len(new)
        return new

    def finish(self) -> str:
        """The remaining text, with U+FFFD for incomplete characters."""
        return self._commit(self._decode_window(self._window)) if self._window else ""

    def _decode_window(self, window: list[int]) -> str:
        """The text of a window; emitted text stays even if later ids change its decoding, and these are decoded alone then."""
        text = self._decode(window)
        if text.startswith(self._stable_text):
            return text
        return self._stable_text + self._decode(window[self._num_stable :])

    def _commit(self, text: str) -> str:
        """Mark all ids of the window, with text `text`, as stable; returns the new text."""
        new = text[self._num_emitted :]
        # The new ids are the context of the following ones, unless they have no text (special tokens).
        begin = self._num_stable if new or len(self._window) > _MAX_WINDOW else 0
        self._window = self._window[begin:]
        self._num_stable = len(self._window)
        self._stable_text = self._text(self._window)
        self._num_emitted = len(self._stable_text)
        return new
