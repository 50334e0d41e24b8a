"""Structured outputs: token masks from grammars, computed by llguidance on worker threads. Others compile the grammars.

A request's `Constraint` belongs to a worker until it is ready, and then to the loop, which passes the sampled tokens of a completed
step to the workers. These requests skip steps until their token mask is ready; other requests do not wait for them.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from torchweave.engine.request import SamplingParams, StructuredOutputs
from torchweave.engine.sampling.json_schema import endless_ref, loosen
from torchweave.engine.sampling.structural_tag import escape_regex, structural_lark
from torchweave.tokenizer import Tokenizer
from torchweave.utils.fair_threads import FairThreads
from torchweave.utils.stop_regex import one_line_reason

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_MAX_CACHED_GRAMMARS = 64
_NO_TOKENS: Mapping[str, int] = {}
_MAX_THREADS = 8
_MAX_ERROR_CHARS = 300
_MISSING = "structured_outputs needs the package llguidance; install torchweave[structured]."
_WHITE_SPACE = r"[ \n\r\t]{0,24}"
"""White space between two parts of JSON: enough for indents, but bounded, because small models repeat it endlessly."""
_PANIC = "the grammar library fails on it; simplify it."
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*(\d{1,400}(?:\.\d{0,400})?(?:[eE][+-]?\d{1,3})?)')
_MAX_MULTIPLE = 20_000
"""Of the least common multiple of a schema's `multipleOf`, each without its factors 10: the automaton of a number has a state
for each remainder, and takes time and memory by the square of their number: 10 MB for 20,000, 5 GB for a million."""
_MAX_CHARACTERS = 1 << 18
"""Of a schema or another constraint: llguidance takes a second for some of this size, and more by the square for others."""
_MAX_REGEX_CHARACTERS, _MAX_CHOICE_CHARACTERS = 1 << 16, 1 << 14
"""A mask takes time by the length of the text that must follow: 0.5 s for 260,000 characters, for which other answers wait."""
_MAX_CACHED_BYTES = 256 << 20
"""Of compiled grammars, as far as the memory of the process grew while they were compiled."""
_DEAD_END = "none of the model's tokens can continue the answer here."
_STOPS_BANNED = "only stop tokens can follow here, but min_tokens bans them; lower min_tokens."


def rejection_reason(structured: StructuredOutputs) -> str:
    """Why structured outputs are invalid, in a sentence; empty if they are valid. Needs no model; slow for large schemas."""
    if importlib.util.find_spec("llguidance") is None:
        return _MISSING
    from llguidance import LLMatcher

    try:
        message = LLMatcher.validate_grammar(_grammar(structured), limits=_limits())
    except ValueError as error:
        message = str(error)
    except RecursionError:
        message = "it is nested too deeply."
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        message = _PANIC  # of Rust, which derives from BaseException
    return _format_error(structured, message) if message else ""


def _format_error(structured: StructuredOutputs, message: str) -> str:
    fields = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    name = next(name for name in fields if getattr(structured, name) is not None)
    message = _PANIC if "panic" in message.lower() else message
    message = one_line_reason(message, with_place=name == "grammar" and "::=" not in (structured.grammar or ""))
    message = message if len(message) <= _MAX_ERROR_CHARS else message[: _MAX_ERROR_CHARS - 3] + "..."
    return f"structured_outputs.{name} cannot be used: {message}{'' if message.endswith('.') else '.'}"


def _limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)  # without the whole grammar in error messages


def _grammar(structured: StructuredOutputs, tokens: Mapping[str, int] = _NO_TOKENS) -> str:
    """The grammar in llguidance's format.

    Args:
        tokens: special tokens of the model, by their texts.

    Raises:
        ValueError: the constraint is too long, the JSON schema is not a JSON object, or refers to itself without end, or a
            structural tag is invalid.
    """
    from llguidance import LLMatcher

    _check_length(structured)
    if structured.structural_tag is not None:
        _check_multiples(json.dumps(structured.structural_tag, default=str).replace('\\"', '"'))
        options = _json_options(structured)
        return LLMatcher.grammar_from_lark(structural_lark(structured.structural_tag, tokens, options, _as_lark))
    if structured.regex is not None:
        return _spelled(LLMatcher.grammar_from_regex(structured.regex), structured.regex.replace("\\", ""), tokens)
    if structured.choice is not None:  # a regex, because the parser is limited to 2000 alternatives
        pattern = "|".join(map(escape_regex, structured.choice))
        return _spelled(LLMatcher.grammar_from_regex(pattern), "\n".join(structured.choice), tokens)
    if structured.grammar is not None:
        return LLMatcher.grammar_from_lark(_check_multiples(_as_lark(structured.grammar)))
    schema = _schema(structured)
    _check_multiples(json.dumps(schema))
    if ref := endless_ref(schema):
        raise ValueError(f"the reference {ref[:80]!r} leads back to itself, so that no value satisfies it.")
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_json_options(structured))  # type: ignore[arg-type]
    return _spelled(grammar, json.dumps(schema, ensure_ascii=False), tokens)


def _check_length(structured: StructuredOutputs) -> None:
    """Raise ValueError for a constraint that would take long to compile."""
    given = (structured.json, structured.regex, structured.choice, structured.grammar, structured.structural_tag)
    value = next((each for each in given if each is not None), "")
    if isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False, default=str)
    size = len(value) if isinstance(value, str) else sum(map(len, value))
    most = _MAX_REGEX_CHARACTERS if structured.regex is not None else _MAX_CHARACTERS
    if size > most:
        raise ValueError(f"it has {size} characters; send at most {most}.")
    longest = max(map(len, structured.choice or ("",)))
    if longest > _MAX_CHOICE_CHARACTERS:
        raise ValueError(f"one of them has {longest} characters; send choices of at most {_MAX_CHOICE_CHARACTERS}.")


def _spelled(grammar: str, text: str, tokens: Mapping[str, int]) -> str:
    """A grammar whose `text` may hold texts of special tokens: they are spelled, since the tokens would not be text.

    llguidance would otherwise allow only the special token, and then refuse it.
    """
    if not any(special in text for special in tokens):
        return grammar
    whole = json.loads(grammar)
    for each in whole["grammars"]:
        if each.get("lark_grammar") is not None:
            each["lark_grammar"] = '%llguidance {"no_forcing": true}\n' + each["lark_grammar"]
        else:
            schema = json.dumps(each.pop("json_schema"))
            each["lark_grammar"] = f'%llguidance {{"no_forcing": true}}\nstart: %json {schema}'
    return json.dumps(whole)


def _json_options(structured: StructuredOutputs) -> dict[str, Any]:
    """llguidance's options of JSON."""
    if structured.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": _WHITE_SPACE}


def _schema(structured: StructuredOutputs) -> dict[str, Any]:
    schema = structured.json if structured.json is not None else {"type": "object"}
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema must be an object, but is {json.dumps(schema)}")
    return schema


def loosen_schema(schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What a grammar can hold of a JSON schema, and what it cannot; see `loosen`. All of it where llguidance is missing.

    Raises:
        ValueError: the schema is invalid, or no value satisfies it.
    """
    if importlib.util.find_spec("llguidance") is None:
        return schema, []
    from llguidance import LLMatcher

    def errors(schema: dict[str, Any], lenient: bool) -> tuple[str, list[str]]:
        options: Any = {"lenient": lenient}
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=options)
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_limits())
        return (messages[0], []) if failed else ("", messages)

    if ref := endless_ref(schema):
        raise ValueError(f"the reference {ref[:80]!r} leads back to itself, so that no value satisfies it.")
    return loosen(schema, errors)


def _check_multiples(grammar: str) -> str:
    """Return a grammar whose numbers have few enough remainders.

    Raises:
        ValueError: it has too many.
    """
    multiples = [Fraction(text) for text in _MULTIPLE.findall(grammar) if text.strip("0.eE+-")]
    least = math.lcm(*(_without_tens(multiple.numerator) for multiple in multiples))
    if least > _MAX_MULTIPLE:
        raise ValueError(
            f"the least common multiple of its multipleOf, without factors 10, is above {_MAX_MULTIPLE}, so that a number would "
            "have too many states; use smaller ones, or fewer without a common factor."
        )
    return grammar


def _without_tens(number: int) -> int:
    while number and number % 10 == 0:
        number //= 10
    return number


def _as_lark(grammar: str) -> str:
    """A grammar in Lark's syntax; one in EBNF is converted.

    Raises:
        ValueError: the EBNF is invalid.
    """
    from llguidance import gbnf_to_lark

    if "::=" not in grammar or gbnf_to_lark.is_lark_syntax(grammar):
        return grammar
    try:
        return gbnf_to_lark.gbnf_to_lark(grammar)
    except Exception as error:  # it raises plain ones
        raise ValueError(f"as EBNF, {error}") from None


class Constraint:
    """The grammar state of one answer.

    Attributes:
        ready: the other attributes are valid; else they belong to a worker.
        mask: int32 [ceil(V / 32)], bit mask of the allowed next tokens.
        complete: the answer is complete, and only its end may follow.
        error: why the answer cannot continue; empty while it can.
        matcher: state of the compiled grammar; set once it is compiled.
        num_tokens: tokens of the answer so far.
    """

    matcher: LLMatcher

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
        self.num_tokens = 0

    def fail(self, message: str) -> None:
        self.error = _MISSING if message == _MISSING else _format_error(self.structured, message)

    @property
    def needs_mask(self) -> bool:
        """Whether the next token needs a mask: the grammar has neither ended nor failed. Sets `complete` or `error`."""
        if self.error:
            return False
        if self.matcher.is_error():
            self.fail(self.matcher.get_error())
            return False
        self.complete = self.matcher.is_stopped()
        return not self.complete

    def set_mask(self, mask: np.ndarray, without_end: np.ndarray) -> None:
        """Set the mask of the next token; `without_end` is `mask` without end-of-sequence tokens."""
        if self.matcher.is_error():
            message = self.matcher.get_error()
            self.fail(_DEAD_END if "NoExtension" in message else message)
        elif not without_end.any():
            self.complete = bool(mask.any())
            if not self.complete:
                self.fail(_DEAD_END)
        else:
            self.mask = without_end if self._ignore_eos else mask
            if self.num_tokens < self._min_tokens:
                self.mask = self.mask & ~token_bitmask(self._stops, len(mask))
                self.complete = not self.mask.any() and bool((mask & ~without_end).any())
                if not (self.complete or self.mask.any()):
                    self.fail(_STOPS_BANNED)


def token_bitmask(tokens: Sequence[int], num_words: int) -> np.ndarray:
    """Bit mask of `tokens`, int32 [num_words]."""
    bits = np.zeros(32 * num_words, np.uint8)
    bits[[token for token in tokens if token < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _resident_bytes() -> int:
    """Memory of this process; 0 on systems that do not tell it in a file."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class GrammarManager:
    """Compiled grammars of a model and their worker threads, both created on the first request.

    Args:
        tokenizer: of the model.
        vocab_size: width of the logits.
        eos: end-of-sequence tokens of the model; if empty, that of the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self._model_tokenizer = tokenizer
        self._eos = tuple(eos)
        self._on_ready: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._special: dict[str, int] | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._sizes: dict[str, int] = {}
        num_threads = min(_MAX_THREADS, max((os.cpu_count() or 1) // 2, 2))
        self._compile_threads = FairThreads(num_threads, "torchweave-compile-grammar")
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="torchweave-grammar")
        self._mask_executor: LLExecutor | None = None

    def on_ready(self, call: Callable[[], None]) -> None:
        """Register a callback for constraints that become ready; it is called on a worker thread."""
        self._on_ready = call

    @property
    def eos(self) -> tuple[int, ...]:
        own = self._model_tokenizer.eos_token_id
        return self._eos or (() if own is None else (own,))

    def constraint(self, params: SamplingParams, stops: Sequence[int], client: str = "") -> Constraint:
        """A new constraint, compiled on a worker when it is the turn of its client; `stops` are the request's stop tokens."""
        constraint = Constraint(params, stops)
        kept = weakref.ref(constraint)  # gone with its request, so that nothing is compiled for a client that has left
        self._compile_threads.submit(client, lambda: self._compile(kept()))
        return constraint

    def advance(self, tokens: Sequence[tuple[Constraint, int]]) -> None:
        """Advance each constraint by a token on a worker; they are not ready until their next mask is."""
        for constraint, _ in tokens:
            assert constraint.ready
            constraint.ready = False
        self._threads.submit(lambda: self._advance(tokens))  # not those that compile: the next token waits for it

    def _compile(self, constraint: Constraint | None) -> None:
        if constraint is None:
            return
        try:
            constraint.matcher = self.matcher(constraint.structured)
            self._compute_masks([constraint])
        except ImportError:
            constraint.fail(_MISSING)
        except BaseException as error:  # a panic of Rust is none of Exception, and the request would wait for ever
            constraint.fail(str(error) if isinstance(error, Exception) else _PANIC)
        constraint.ready = True
        self._on_ready()

    def _advance(self, tokens: Sequence[tuple[Constraint, int]]) -> None:
        """Advance all constraints together, so that the worker holds the GIL, which the loop needs too, only briefly."""
        constraints = [constraint for constraint, _ in tokens]
        try:
            for constraint, token in tokens:
                constraint.num_tokens += 1
                constraint.matcher.consume_token(token)  # `needs_mask` reports errors
            self._compute_masks(constraints)
        except BaseException as error:
            for constraint in constraints:
                constraint.fail(str(error) if isinstance(error, Exception) else _PANIC)
        for constraint in constraints:
            constraint.ready = True
        self._on_ready()

    def _compute_masks(self, constraints: Sequence[Constraint]) -> None:
        constraints = [constraint for constraint in constraints if constraint.needs_mask]
        if not constraints:
            return
        num_words, all_words = (-(-size // 32) for size in (self.vocab_size, self._num_tokens))
        masks = np.zeros((len(constraints), all_words), np.int32)
        if len(constraints) == 1:
            constraints[0].matcher.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        else:
            numbered = [(constraint.matcher, number) for number, constraint in enumerate(constraints)]
            self._executor().unsafe_compute_mask_ptr(numbered, masks.ctypes.data, masks[0].nbytes, len(masks))
        if self._num_tokens > self.vocab_size:
            masks = masks[:, :num_words] & token_bitmask(range(self.vocab_size), num_words)
        without_end = masks & ~token_bitmask(self.eos, num_words)
        for constraint, *mask_args in zip(constraints, masks, without_end, strict=True):
            constraint.set_mask(*mask_args)

    @property
    def _num_tokens(self) -> int:
        """Tokens of llguidance's masks: those of the logits, or of a tokenizer that has more (Llama 3.2 Vision's image token)."""
        return self.vocab_size if self._tokenizer is None else max(self._tokenizer.vocab_size, self.vocab_size)

    def _executor(self) -> LLExecutor:
        with self._lock:
            if self._mask_executor is None:
                from llguidance import LLExecutor

                self._mask_executor = LLExecutor(min(_MAX_THREADS, max((os.cpu_count() or 1) // 2, 1)))
            return self._mask_executor

    def matcher(self, structured: StructuredOutputs) -> LLMatcher:
        """A matcher at the start of a grammar. Compiled grammars are cached, because many requests use the same.

        Raises:
            ValueError: the grammar is invalid.
        """
        from llguidance import LLMatcher

        tokens = self._special_tokens()
        grammar = _grammar(structured, tokens)
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
                return compiled.deep_copy()
            tokenizer = self._open_tokenizer()
        before = _resident_bytes()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        size = max(_resident_bytes() - before, len(grammar))
        with self._lock:
            self._compiled[grammar], self._sizes[grammar] = matcher, size
            while len(self._compiled) > _MAX_CACHED_GRAMMARS or sum(self._sizes.values()) > _MAX_CACHED_BYTES:
                oldest, _ = self._compiled.popitem(last=False)
                del self._sizes[oldest]
            return matcher.deep_copy()

    def _special_tokens(self) -> dict[str, int]:
        """Added tokens that are no text to llguidance, by their texts."""
        with self._lock:
            if self._special is None:
                tokenizer, added = self._open_tokenizer(), self._model_tokenizer.added_tokens()
                self._special = {text: token for text, token in added.items() if tokenizer.is_special_token(token)}
            return self._special

    def _open_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            if not self.eos:
                raise ValueError("the model has no end-of-sequence token.")
            tokenizer_json = self._model_tokenizer.tokenizer_json()
            try:
                if tokenizer_json is None:
                    raise ValueError("no JSON")
                self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=self.vocab_size, eos_token=list(self.eos))
            except ValueError:  # llguidance cannot read this tokenizer: pass each token
                adapter = TokenizerWrapper(TokenizerAdapter(self._model_tokenizer, self.eos[0], self.vocab_size))
                self._tokenizer = LLTokenizer(adapter, n_vocab=self.vocab_size, eos_token=list(self.eos))
        return self._tokenizer


class TokenizerAdapter:
    """A tokenizer in the format of llguidance's `TokenizerWrapper`: the text of each token of the logits.

    Logits may be wider than the tokenizer, whose masks llguidance then makes too short, whatever `n_vocab` is.
    """

    def __init__(self, tokenizer: Tokenizer, eos: int, vocab_size: int) -> None:
        token_bytes = tokenizer.token_bytes()
        token_bytes += [None] * (vocab_size - len(token_bytes))
        self.eos_token_id = eos
        self.bos_token_id = None
        self.special_token_ids = [token for token, text in enumerate(token_bytes) if text is None]
        # The text of a special token starts with a byte that occurs in no UTF-8 text, so no grammar matches it.
        self.tokens = [b"\xff<%d>" % token if text is None else text for token, text in enumerate(token_bytes)]
        self._special = frozenset(self.special_token_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "ignore")
        return [token for token in self._tokenizer.encode(text, False) if token not in self._special]
