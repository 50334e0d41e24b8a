"""The requests of one call of `LLM`: submitted together, and stopped together when the caller leaves early."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchweave.engine.client import Client, Inbox
from torchweave.engine.detokenizer import CompletionBuilder, Detokenizer
from torchweave.engine.request import SamplingParams
from torchweave.engine.responses import Response
from torchweave.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torchweave.engine.batch_manager import BatchManager

_POLL_SECONDS = 1.0  # between checks that the engine is alive while waiting for responses


class RequestStream:
    """Requests and their completions, on one thread. Leaving the context or dropping the object stops unfinished requests.

    Args:
        tokenizer: None if the model has none; completions then have no text.

    Attributes:
        completions: by request id; several for a beam search.
    """

    def __init__(self, client: Client, manager: BatchManager, tokenizer: Tokenizer | None) -> None:
        self.completions: dict[int, list[CompletionBuilder]] = {}
        self._active_ids: set[int] = set()
        self._inbox: Inbox = queue.SimpleQueue()
        self._client = client
        self._manager = manager
        self._tokenizer = tokenizer

    def submit(self, prompt: np.ndarray, params: SamplingParams, streaming: bool) -> list[int]:
        """Queue the `n` completions of a prompt and return their request ids; call `wake_engine` after the last prompt.

        Raises:
            RuntimeError: the engine was shut down.
        """
        completions = [CompletionBuilder(params, self._detokenizer(prompt, params), index) for index in range(params.n)]
        if params.beam_width > 1:
            return [self._submit(prompt, params, streaming, completions)]
        ids = []
        for completion, seeded in zip(completions, params.each(), strict=True):
            ids.append(self._submit(prompt, seeded, streaming, [completion]))
        return ids

    def _submit(
        self, prompt: np.ndarray, params: SamplingParams, streaming: bool, completions: list[CompletionBuilder]
    ) -> int:
        request_id = self._client.submit(prompt, params, self._inbox, streaming)
        self._active_ids.add(request_id)
        self.completions[request_id] = completions
        return request_id

    def _detokenizer(self, prompt: np.ndarray, params: SamplingParams) -> Detokenizer | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.stream(prompt.tolist(), params.skip_special_tokens)

    def wake_engine(self) -> None:
        """Notify the batch manager of new requests.

        Raises:
            RuntimeError: the engine has failed.
        """
        if not self._manager.alive:
            raise self._engine_ended() from self._manager.failure
        self._manager.wake()

    def responses(self) -> Iterator[tuple[int, bool]]:
        """Add responses to their completions as they arrive; yields (request id, whether the response is its last).

        Raises:
            RuntimeError: the engine failed or was shut down.
        """
        while self._active_ids:
            for response in self._next_responses():
                if response.final:
                    self._active_ids.discard(response.id)
                if response.error:
                    raise RuntimeError(response.error) from self._manager.failure
                output = response.output
                completions = self.completions[response.id]
                completions[0].prompt_logprobs += output.prompt_logprobs
                for completion, new_output in zip(completions, output.beams or (output,), strict=False):
                    if completion.add(new_output.token_ids.tolist(), new_output.finish_reason, new_output.logprobs):
                        self._client.stop(response.id)
                yield response.id, response.final

    def _next_responses(self) -> Sequence[Response]:
        while True:
            try:
                return self._inbox.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if not self._manager.alive and self._inbox.empty():
                    raise self._engine_ended() from self._manager.failure

    def _engine_ended(self) -> RuntimeError:
        return RuntimeError(f"The engine has ended: {self._manager.failure or 'it was shut down'}")

    def close(self) -> None:
        """Stop unfinished requests."""
        while self._active_ids:
            self._client.stop(self._active_ids.pop())

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
