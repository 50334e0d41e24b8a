"""Answers of a given form: a grammar says before each token which ones it allows. By llguidance, on threads beside the loop.

A request's `Constraint` is either at work, on a worker, or ready, and then the loop's. The loop hands over a step's tokens when it
has been taken in; meanwhile these requests rest and the others run on. So nobody waits for a grammar but who asked for one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from torchweave.engine.request import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_MAX_CACHED_GRAMMARS = 64
_MAX_THREADS = 8
_MAX_ERROR_CHARS = 300
_MISSING = "structured_outputs needs the package llguidance; install torchweave[structured]."
_WHITE_SPACE = r"[ \n\r\t]{0,24}"
"""Between two parts of JSON: room for lines and indents, but not for the white space without end that small models fall into."""
_DEAD_END = "none of the model's tokens can go on here."
_HELD_BACK = "stop tokens alone can go on here, which min_tokens holds back."


class Vocabulary(Protocol):
    """What a grammar has to know of a tokenizer; `torchweave.tokenizer.Tokenizer` is one."""

    def tokenizer_json(self) -> str | None:
        """The tokenizer as JSON, in the form of Hugging Face's tokenizers; None where it has none."""
        ...

    def token_bytes(self) -> list[bytes | None]:
        """The text of each token by itself; None for special tokens and parts of characters."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    @property
    def eos_token_id(self) -> int | None: ...


def rejection_reason(structured: StructuredOutputs) -> str:
    """Why a form cannot be had, in one sentence; empty when it can. Needs no model; may take a while for a large schema."""
    if importlib.util.find_spec("llguidance") is None:
        return _MISSING
    from llguidance import LLMatcher

    try:
        message = LLMatcher.validate_grammar(_grammar(structured), limits=_limits())
    except ValueError as error:
        message = str(error)
    except RecursionError:
        message = "it is nested too deeply."
    return _format_error(structured, message) if message else ""


def _format_error(structured: StructuredOutputs, message: str) -> str:
    fields = ("json", "regex", "choice", "grammar", "json_object")
    name = next(name for name in fields if getattr(structured, name) is not None)
    words = " ".join(message.split())
    words = words if len(words) <= _MAX_ERROR_CHARS else words[: _MAX_ERROR_CHARS - 3] + "..."
    return f"structured_outputs.{name} cannot be used: {words}"


def _limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)  # what is told of an error must not hold the whole grammar


def _grammar(structured: StructuredOutputs) -> str:
    """A form as llguidance takes it.

    Raises:
        ValueError: the JSON schema is no JSON object.
    """
    from llguidance import LLMatcher

    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.choice is not None:  # by the lexer: the parser takes no more than 2000 alternatives
        return LLMatcher.grammar_from_regex("|".join(map(_escape_regex, structured.choice)))
    if structured.grammar is not None:
        return LLMatcher.grammar_from_lark(structured.grammar)
    schema = structured.json if structured.json is not None else {"type": "object"}
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is an object, but this is {json.dumps(schema)}")
    options = (
        {"whitespace_flexible": False} if structured.disable_any_whitespace else {"whitespace_pattern": _WHITE_SPACE}
    )
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]


def _escape_regex(text: str) -> str:
    """The regular expression of nothing but the text."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


class Constraint:
    """One answer's place in its grammar.

    Attributes:
        ready: nothing is at work; else the other attributes belong to a worker.
        mask: int32 [ceil(V / 32)], the tokens that may come next, as bits.
        complete: the answer has its form, and nothing but its end may follow.
        error: why it cannot go on; empty while it can.
    """

    def __init__(self, params: SamplingParams, stops: Sequence[int]) -> None:
        assert params.structured_outputs is not None
        self.structured = params.structured_outputs
        self.ready = False
        self.complete = False
        self.error = ""
        self.mask = np.empty(0, np.int32)
        self._ignore_eos = params.ignore_eos
        self._min_tokens = params.min_tokens
        self._stops = list(stops)
        self._count = 0
        self._matcher: LLMatcher | None = None

    @property
    def matcher(self) -> LLMatcher:
        assert self._matcher is not None
        return self._matcher

    def set_matcher(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fail(self, message: str) -> None:
        self.error = _MISSING if message == _MISSING else _format_error(self.structured, message)

    @property
    def needs_mask(self) -> bool:
        """Whether a mask has to say what may come next. Something may, unless the grammar has an end here or failed."""
        if self.error:
            return False
        if self.matcher.is_error():
            self.fail(self.matcher.get_error())
            return False
        self.complete = self.matcher.is_stopped()
        return not self.complete

    def count_token(self) -> None:
        self._count += 1

    def set_mask(self, mask: np.ndarray, without_end: np.ndarray) -> None:
        """What may come next. `without_end` is the mask without the model's end tokens."""
        if self.matcher.is_error():
            message = self.matcher.get_error()
            self.fail(_DEAD_END if "NoExtension" in message else message)
        elif not without_end.any():
            self.complete = bool(mask.any())
            if not self.complete:
                self.fail(_DEAD_END)
        else:
            self.mask = without_end if self._ignore_eos else mask
            if self._count < self._min_tokens:
                self.mask = self.mask & ~token_bitmask(self._stops, len(mask))
                self.complete = not self.mask.any() and bool((mask & ~without_end).any())
                if not (self.complete or self.mask.any()):
                    self.fail(_HELD_BACK)


def token_bitmask(tokens: Sequence[int], num_words: int) -> np.ndarray:
    """int32 [num_words] with the bits of some tokens."""
    bits = np.zeros(32 * num_words, np.uint8)
    bits[[token for token in tokens if token < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class GrammarManager:
    """Grammars of a model, and the threads that work on them. Both are made when the first request asks.

    Args:
        vocabulary: the model's tokenizer.
        vocab_size: columns of the logits.
        eos: the model's own end tokens; the tokenizer's where there are none.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self._vocabulary = vocabulary
        self._eos = tuple(eos)
        self._on_ready: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None
        self._mask_executor: LLExecutor | None = None

    def on_ready(self, call: Callable[[], None]) -> None:
        """`call` is called, on a worker, each time that constraints become ready."""
        self._on_ready = call

    @property
    def eos(self) -> tuple[int, ...]:
        own = self._vocabulary.eos_token_id
        return self._eos or (() if own is None else (own,))

    def constraint(self, params: SamplingParams, stops: Sequence[int]) -> Constraint:
        """The beginning of an answer, which becomes ready by itself; `stops` are the request's stop tokens."""
        constraint = Constraint(params, stops)
        self._submit(lambda: self._compile(constraint))
        return constraint

    def advance(self, tokens: Sequence[tuple[Constraint, int]]) -> None:
        """Answers go on with a token each; they are not ready until it is known what may follow."""
        for constraint, _ in tokens:
            assert constraint.ready
            constraint.ready = False
        self._submit(lambda: self._advance(tokens))

    def _submit(self, work: Callable[[], None]) -> None:
        if self._threads is None:
            count = min(_MAX_THREADS, max((os.cpu_count() or 1) // 2, 2))
            self._threads = ThreadPoolExecutor(count, thread_name_prefix="torchweave-grammar")
        self._threads.submit(work)

    def _compile(self, constraint: Constraint) -> None:
        try:
            constraint.set_matcher(self.matcher(constraint.structured))
            self._compute_masks([constraint])
        except ImportError:
            constraint.fail(_MISSING)
        except Exception as error:
            constraint.fail(str(error))
        constraint.ready = True
        self._on_ready()

    def _advance(self, tokens: Sequence[tuple[Constraint, int]]) -> None:
        """All together: Python, which the loop needs too, is held for a moment only."""
        constraints = [constraint for constraint, _ in tokens]
        try:
            for constraint, token in tokens:
                constraint.count_token()
                constraint.matcher.consume_token(token)  # what is wrong with it is asked for by `needs_mask`
            self._compute_masks(constraints)
        except Exception as error:
            for constraint in constraints:
                constraint.fail(str(error))
        for constraint in constraints:
            constraint.ready = True
        self._on_ready()

    def _compute_masks(self, constraints: Sequence[Constraint]) -> None:
        constraints = [constraint for constraint in constraints if constraint.needs_mask]
        if not constraints:
            return
        num_words = -(-self.vocab_size // 32)
        masks = np.zeros((len(constraints), num_words), np.int32)
        if len(constraints) == 1:
            constraints[0].matcher.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        else:
            numbered = [(constraint.matcher, number) for number, constraint in enumerate(constraints)]
            self._executor().unsafe_compute_mask_ptr(numbered, masks.ctypes.data, masks[0].nbytes, len(masks))
        without_end = masks & ~token_bitmask(self.eos, num_words)
        for constraint, *both in zip(constraints, masks, without_end, strict=True):
            constraint.set_mask(*both)

    def _executor(self) -> LLExecutor:
        with self._lock:
            if self._mask_executor is None:
                from llguidance import LLExecutor

                self._mask_executor = LLExecutor(min(_MAX_THREADS, max((os.cpu_count() or 1) // 2, 1)))
            return self._mask_executor

    def matcher(self, structured: StructuredOutputs) -> LLMatcher:
        """A form's grammar at its beginning. Grammars are kept, since many requests ask for the same.

        Raises:
            ValueError: it cannot be used.
        """
        from llguidance import LLMatcher

        grammar = _grammar(structured)
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
                return compiled.deep_copy()
            tokenizer = self._open_tokenizer()
        found = LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
        if found.is_error():
            raise ValueError(found.get_error())
        with self._lock:
            self._compiled[grammar] = found
            while len(self._compiled) > _MAX_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            return found.deep_copy()

    def _open_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            if not self.eos:
                raise ValueError("the model has no end token.")
            tokenizer_json = self._vocabulary.tokenizer_json()
            try:
                if tokenizer_json is None:
                    raise ValueError("no JSON")
                self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=self.vocab_size, eos_token=list(self.eos))
            except ValueError:  # a kind of tokenizer that llguidance cannot read: then token by token
                adapter = TokenizerWrapper(TokenizerAdapter(self._vocabulary, self.eos[0]))
                self._tokenizer = LLTokenizer(adapter, n_vocab=self.vocab_size, eos_token=list(self.eos))
        return self._tokenizer


class TokenizerAdapter:
    """A tokenizer as llguidance's `TokenizerWrapper` takes it: the text of each token."""

    def __init__(self, vocabulary: Vocabulary, eos: int) -> None:
        token_bytes = vocabulary.token_bytes()
        self.eos_token_id = eos
        self.bos_token_id = None
        self.special_token_ids = [token for token, text in enumerate(token_bytes) if text is None]
        # A special token's text starts with a byte that no text holds, so that no grammar asks for it.
        self.tokens = [b"\xff<%d>" % token if text is None else text for token, text in enumerate(token_bytes)]
        self._special = frozenset(self.special_token_ids)
        self._vocabulary = vocabulary

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "ignore")
        return [token for token in self._vocabulary.encode(text, False) if token not in self._special]
