"""Incremental detokenization with stop strings, on the caller's thread, never on the engine's."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from torchweave.engine.outputs import CompletionOutput, Logprob, Logprobs
from torchweave.engine.request import FinishReason, SamplingParams, TokenLogprobs
from torchweave.tokenizer import IncrementalDetokenizer
from torchweave.utils.stop_regex import RegexMatcher

_CLIENT_REASONS = {"complete": "stop", "cancelled": "abort"}
"""The engine's finish reasons that have another name in completions, that of vLLM."""


def encode_bad_words(params: SamplingParams, encode: Callable[[str], Sequence[int]]) -> SamplingParams:
    """Replace the strings in `bad_words` by token ids.

    A word is excluded at the beginning of a text and, if that is an equal number of different tokens, after a space; as in vLLM.

    Args:
        encode: returns a text's token ids without special tokens.
    """
    if not any(isinstance(word, str) for word in params.bad_words or ()):
        return params
    encoded: list[str | list[int]] = []
    for word in params.bad_words or ():
        if isinstance(word, str):
            bare = word.lstrip() or word
            plain, spaced = list(encode(bare)), list(encode(" " + bare))
            encoded += [plain] if plain else []
            if plain and len(spaced) == len(plain) and spaced[0] != plain[0]:
                encoded.append(spaced)
        else:
            encoded.append(word)
    return replace(params, bad_words=encoded)


class StopMatcher:
    """Aho-Corasick automaton of stop strings: a text is matched in one pass, however many strings there are.

    A state is the longest end of the text read so far that begins a string; 0 is the empty one.

    (Aho and Corasick, "Efficient string matching: an aid to bibliographic search", CACM 1975)
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._longest = [0]  # length of the longest string that ends in a state; 0 for none
        for string in strings:
            state = 0
            for char in string:
                following = self._next[state].get(char)
                if following is None:
                    following = self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._longest.append(0)
                state = following
            self._longest[state] = len(string)
        self._fallback = [0] * len(self._next)  # state of the longest proper end
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self._longest[state] = self._longest[state] or self._longest[self._fallback[state]]
            for char, following in self._next[state].items():
                self._fallback[following] = self.advance(self._fallback[state], char)
                queue.append(following)

    def advance(self, state: int, char: str) -> int:
        """Return the state after a further character."""
        while (following := self._next[state].get(char)) is None and state:
            state = self._fallback[state]
        return following or 0

    def find(self, text: str, state: int) -> tuple[int, tuple[int, int] | None]:
        """Read text; returns the new state, and begin and end of the first string that ends in the text.

        Of several the one that begins first, then the shortest. The begin is negative for one that begins in earlier text.
        """
        match = None
        for end, char in enumerate(text, 1):
            state = self.advance(state, char)
            length = self._longest[state]
            if length and (match is None or end - length < match[0]):
                match = end - length, end
        return state, match


@functools.lru_cache(maxsize=4)  # the answers to one request, and to concurrent requests of one client, share it
def _stop_matcher(strings: tuple[str, ...]) -> StopMatcher:
    return StopMatcher(strings)


class CompletionBuilder:
    """Builds a completion from its tokens.

    Args:
        params: of its request; stop strings end the completion.
        detokenizer: None if the model has no tokenizer; the text is then empty.
        index: of the `n` completions.
        token_text: text of a token, for log-probabilities; None: they have none.

    Attributes:
        prompt_logprobs: of the prompt's tokens except the first, in the completion that carries them.
        stop_reason: the stop string, the pattern of `stop_regex` or the token of `stop_token_ids` that ended the completion.
        matched_stop: the same, or the model's end token.
    """

    def __init__(
        self,
        params: SamplingParams,
        detokenizer: IncrementalDetokenizer | None,
        index: int,
        token_text: Callable[[int], str] | None = None,
    ) -> None:
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.matched_stop: str | int | None = None
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._params = params
        self._detokenizer = detokenizer
        self._token_text = token_text
        self._logprobs: list[TokenLogprobs] = []
        self._num_chars_taken = 0  # returned by `take_delta`
        self._num_tokens_taken = 0  # returned by `take_delta`
        self._sum = 0.0  # of their log-probabilities
        self._stops = params.stop_strings
        self._holdback = max((len(text) for text in self._stops), default=1) - 1
        self._matcher = _stop_matcher(self._stops) if self._stops else None
        self._match_state = 0
        self._stops_in_text = params.stops_in_text
        self._regexes = [RegexMatcher(pattern) for pattern in params.stop_regexes]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def add(
        self, token_ids: Sequence[int], reason: FinishReason | None, logprobs: Sequence[TokenLogprobs] = ()
    ) -> bool:
        """Add new tokens; return True if a stop string ended the completion, so that the caller stops the request."""
        if self.finish_reason is not None:
            return False
        ids = list(map(int, token_ids))
        self._logprobs += logprobs
        drop_stop_token = reason == "stop" and not self._params.include_stop_str_in_output  # a stop token has no text
        if self._detokenizer is not None and self._append_text(ids[:-1] if drop_stop_token else ids):
            return True
        self.token_ids += ids
        if reason is not None and self._detokenizer is not None:
            self._append_and_match(self._detokenizer.finish())
        self.finish_reason = self.finish_reason or _CLIENT_REASONS.get(reason or "", reason)
        if reason == "stop" and self.stop_reason is None and ids:
            self.matched_stop = ids[-1]
            if ids[-1] in (self._params.stop_token_ids or ()):
                self.stop_reason = ids[-1]
        return False

    def _append_text(self, ids: list[int]) -> bool:
        """Add the text of `ids`, one by one if there are stop strings, so that the tokens end with the text."""
        assert self._detokenizer is not None
        if not self._stops_in_text:
            self.text += self._detokenizer.feed(ids)
            return False
        num_before_min = self._params.min_tokens - len(self.token_ids)
        for at in range(len(ids)):
            if self._append_and_match(self._detokenizer.feed(ids[at : at + 1]), at >= num_before_min):
                self.token_ids += ids[: at + 1]
                return True
        return False

    def _append_and_match(self, text: str, may_stop: bool = True) -> bool:
        """Add text; if a stop string ends in it, end the text before that or (`include_stop_str_in_output`) after it.

        A match of `stop_regex` ends the text after itself.
        """
        begin = len(self.text)
        self.text += text
        match = None
        if self._matcher is not None:
            self._match_state, match = self._matcher.find(text, self._match_state)
        if match is not None and may_stop:
            self.stop_reason = self.text[begin + match[0] : begin + match[1]]
            self._end_text(begin + match[self._params.include_stop_str_in_output])
            return True
        ends = [(end, each.pattern) for each in self._regexes if (end := each.find(text)) is not None]
        if not ends or not may_stop:
            return False
        end, self.stop_reason = min(ends)
        self._end_text(begin + end)
        return True

    def _end_text(self, end: int) -> None:
        self.text, self.matched_stop, self.finish_reason = self.text[:end], self.stop_reason, "stop"

    def new(self) -> tuple[str, list[int]]:
        """Text and tokens since the last call, without text that may begin a stop string."""
        begin, end = self._num_chars_taken, len(self.text)
        if self._holdback and self.finish_reason is None:
            end = max(end - self._holdback, begin)
        self._num_chars_taken = end
        first, self._num_tokens_taken = self._num_tokens_taken, len(self.token_ids)
        return self.text[begin:end], self.token_ids[first:]

    def take_delta(self) -> CompletionOutput:
        """The same as an output, with the tokens' log-probabilities if requested, and their sum from the beginning."""
        first = self._num_tokens_taken
        return self._with_logprobs(CompletionOutput(self.index, *self.new(), self.finish_reason), first)

    def result(self) -> CompletionOutput:
        """The whole completion."""
        token_ids = self.token_ids.copy()  # the completion may go on
        return self._with_logprobs(CompletionOutput(self.index, self.text, token_ids, self.finish_reason), 0)

    def _with_logprobs(self, output: CompletionOutput, first: int) -> CompletionOutput:
        """Add log-probabilities to `output`, whose tokens begin at index `first`."""
        output.stop_reason = self.stop_reason
        if self._params.logprobs is not None:
            new = self._logprobs[first : first + len(output.token_ids)]
            output.logprobs = [self._by_token(entry) for entry in new]
            self._sum = sum((entry.logprob for entry in new), self._sum if first else 0.0)
            output.cumulative_logprob = self._sum
        return output

    def prompt_logprob_dicts(self) -> list[Logprobs | None] | None:
        """Log-probabilities of each token of the prompt, None for the first; None if not requested."""
        if self._params.prompt_logprobs is None:
            return None
        return [None, *map(self._by_token, self.prompt_logprobs)]

    def _by_token(self, entry: TokenLogprobs) -> Logprobs:
        text = self._token_text or _no_text
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
        for rank, (token, logprob) in enumerate(entry.top.items(), 1):
            if token not in found:
                found[token] = Logprob(logprob, rank, text(token))
        return found


def _no_text(_: int) -> None:
    return None
