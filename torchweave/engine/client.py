"""Clients of the batch manager: requests of any thread, their inboxes, and the stream of one call of `LLM`."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from torchweave.engine.detokenizer import CompletionBuilder
from torchweave.engine.lora_request import LoRARequest
from torchweave.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from torchweave.engine.request import (
    NO_TOKENS,
    POOLING_PARAMS,
    InferenceRequest,
    Output,
    RequestOutputKind,
    Response,
    Responses,
    SamplingParams,
    refusal,
)
from torchweave.images import EncodedPrompt
from torchweave.tokenizer import IncrementalDetokenizer, Tokenizer

if TYPE_CHECKING:
    from torchweave.engine.batch_manager import BatchManager


class Inbox(Protocol):
    """Where the responses of a stream arrive."""

    def put(self, batch: Sequence[Response], /) -> None:
        """Add responses, from any thread."""
        ...


class AsyncInbox:
    """An inbox for the event loop that creates it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._batches: deque[Sequence[Response]] = deque()
        self._arrived = asyncio.Event()

    def put(self, batch: Sequence[Response]) -> None:
        """Add responses, from any thread; dropped after the loop's end."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._add, batch)

    def _add(self, batch: Sequence[Response]) -> None:
        self._batches.append(batch)
        self._arrived.set()

    async def get(self) -> Sequence[Response]:
        """Wait for the next responses."""
        while not self._batches:
            self._arrived.clear()
            await self._arrived.wait()
        return self._batches.popleft()


class Client:
    """The batch manager's callbacks, and `submit`, `stop` and `close` for other threads.

    Attributes:
        metrics: times of the requests in flight, by id.
        num_prompt_tokens, num_generated_tokens: of requests that have their first token; so far.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a finalizer may call `stop` anywhere
        self._ids = itertools.count()
        self._queue: OrderedDict[int, InferenceRequest] = OrderedDict()  # not yet fetched by the batch manager
        self._inboxes: dict[int, Inbox] = {}
        self._stops: set[int] = set()
        self.metrics: dict[int, RequestMetrics] = {}
        self._prompt_lengths: dict[int, int] = {}  # of requests without a token
        self.num_prompt_tokens = self.num_generated_tokens = 0
        self._closed = False
        self._all_answered = threading.Condition(self._lock)

    def submit(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        inbox: Inbox,
        streaming: bool,
        metrics: RequestMetrics | None = None,
        pooling: bool = False,
        priority: int = 0,
        adapter: str = "",
    ) -> int:
        """Queue a request whose responses go to `inbox` and return its id; the caller then wakes the batch manager.

        Args:
            metrics: receives the request's times.
            adapter: see `InferenceRequest`.

        Raises:
            RuntimeError: after `close`.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("The engine was shut down; make a new one.")
            ids, images = prompt.token_ids, prompt.images
            request = InferenceRequest(
                next(self._ids), ids, params, streaming, priority, images=images, pooling=pooling, adapter=adapter
            )
            self._inboxes[request.id] = inbox
            self.metrics[request.id] = metrics or RequestMetrics()
            self._prompt_lengths[request.id] = len(request.input_ids)
            self._queue[request.id] = request
        return request.id

    def stop(self, request_id: int) -> None:
        """Request that a request is stopped; its final response still arrives."""
        with self._lock:
            pending = self._queue.pop(request_id, None)
            if pending is None and request_id in self._inboxes:
                self._stops.add(request_id)
        if pending is not None:  # never fetched by the batch manager
            self.send_responses(Responses([Response(request_id, Output(NO_TOKENS, "cancelled"), final=True)]))

    def close(self) -> None:
        """Refuse further requests."""
        with self._lock:
            self._closed = True

    def fail_all(self, message: str) -> None:
        """Answer all unfinished requests with an error, after the batch manager has ended."""
        with self._lock:
            self._queue.clear()
            pending = list(self._inboxes)
        self.send_responses(Responses(refusal(request_id, message) for request_id in pending))

    def wait_until_answered(self, timeout: float) -> bool:
        """Wait until every request has its final response; return False after `timeout` seconds."""
        with self._all_answered:
            return self._all_answered.wait_for(lambda: not self._inboxes, timeout)

    # -- the batch manager's callbacks ---------------------------------------------------------------------------------

    def get_requests(self, max_num: int) -> list[InferenceRequest]:
        if not self._queue:
            return []
        with self._lock:
            requests = []
            while self._queue and (max_num < 0 or len(requests) < max_num):
                requests.append(self._queue.popitem(last=False)[1])
            return requests

    def send_responses(self, responses: Sequence[Response]) -> None:
        """Put responses into the inboxes of their requests, one message an inbox."""
        batch = responses if isinstance(responses, Responses) else Responses(responses)
        self._count(batch)
        inboxes = {id(inbox): inbox for inbox in map(self._inboxes.get, batch.request_ids()) if inbox is not None}
        if len(inboxes) == 1:
            next(iter(inboxes.values())).put(batch)
        elif inboxes:
            parts: dict[int, list[Response]] = {key: [] for key in inboxes}
            for response in batch:
                if (inbox := self._inboxes.get(response.id)) is not None:
                    parts[id(inbox)].append(response)
            for key, part in parts.items():
                inboxes[key].put(part)
        if ended := [response.id for response in batch.others if response.final]:
            self._remove(ended)

    def notify_state_changes(self, changes: Sequence[tuple[int, str]]) -> None:
        """Take the times of requests that started or have their first token."""
        now = time.monotonic()
        for request_id, change in changes:
            metrics = self.metrics.get(request_id)
            if metrics is not None and change == "started":
                metrics.scheduled_ts = metrics.scheduled_ts or now
            elif metrics is not None and change == "answering":
                metrics.first_token_ts = metrics.first_token_ts or now
                self.num_prompt_tokens += self._prompt_lengths.pop(request_id, 0)

    def _count(self, batch: Responses) -> None:
        """Count tokens, and take the time of final responses."""
        count = len(batch.ids)
        for response in batch.others:
            output = response.output
            count += sum(len(answer.token_ids) for answer in output.beams or (output,))
            metrics = self.metrics.get(response.id) if response.final else None
            if metrics is not None:
                metrics.last_token_ts = time.monotonic()
        if count:  # only on the batch manager's thread: others send responses without tokens
            self.num_generated_tokens += count

    def _remove(self, request_ids: Sequence[int]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._inboxes.pop(request_id, None)
                self.metrics.pop(request_id, None)
                self._prompt_lengths.pop(request_id, None)
                self._stops.discard(request_id)
            if not self._inboxes:
                self._all_answered.notify_all()

    def poll_stop(self) -> set[int]:
        if not self._stops:
            return set()
        with self._lock:
            stops, self._stops = self._stops, set()
        return stops


_POLL_SECONDS = 1.0  # between checks that the engine is alive while waiting for responses


class CompletionStream:
    """Requests and their completions, on one thread. Leaving the context or dropping the object stops unfinished requests.

    Args:
        tokenizer: None if the model has none; completions then have no text.
        inbox: an `AsyncInbox` for `next_responses`, else for `responses`.

    Attributes:
        completions: by request id; several for a beam search.
        metrics: times, by request id.
        num_cached_tokens: prompt tokens found in the prefix cache, by id of the requests that have ended.
        pooled: rows of requests that pool, by id.
    """

    def __init__(
        self,
        client: Client,
        manager: BatchManager,
        tokenizer: Tokenizer | None,
        inbox: queue.SimpleQueue[Sequence[Response]] | AsyncInbox,
    ) -> None:
        self.completions: dict[int, list[CompletionBuilder]] = {}
        self.metrics: dict[int, RequestMetrics] = {}
        self.num_cached_tokens: dict[int, int] = {}
        self.pooled: dict[int, np.ndarray] = {}
        self._active_ids: set[int] = set()
        self._inbox = inbox
        self._client = client
        self._manager = manager
        self._tokenizer = tokenizer

    @property
    def is_active(self) -> bool:
        """Whether a request has not had its last response."""
        return bool(self._active_ids)

    def submit(
        self, prompt: EncodedPrompt, params: SamplingParams, streaming: bool, priority: int = 0, adapter: str = ""
    ) -> list[int]:
        """Queue the `n` completions of a prompt and return their request ids; call `wake_engine` after the last prompt.

        Args:
            adapter: see `InferenceRequest`.

        Raises:
            RuntimeError: the engine was shut down.
        """
        ids = prompt.token_ids
        text = None if self._tokenizer is None or not params.detokenize else self._tokenizer.token_text
        completions = [
            CompletionBuilder(params, self._detokenizer(ids, params), index, text) for index in range(params.n)
        ]
        if params.beam_width > 1:
            return [self._submit(prompt, params, streaming, completions, priority, adapter=adapter)]
        request_ids = []
        for completion, seeded in zip(completions, params.each(), strict=True):
            request_ids.append(self._submit(prompt, seeded, streaming, [completion], priority, adapter=adapter))
        return request_ids

    def submit_pooling(self, prompt: EncodedPrompt, priority: int = 0) -> int:
        """Queue a prompt that pools and return its request id; see `submit`."""
        return self._submit(prompt, POOLING_PARAMS, False, [CompletionBuilder(POOLING_PARAMS, None, 0)], priority, True)

    def _submit(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        streaming: bool,
        completions: list[CompletionBuilder],
        priority: int,
        pooling: bool = False,
        adapter: str = "",
    ) -> int:
        metrics = RequestMetrics()
        request_id = self._client.submit(prompt, params, self._inbox, streaming, metrics, pooling, priority, adapter)
        self._active_ids.add(request_id)
        self.metrics[request_id] = metrics
        self.completions[request_id] = completions
        return request_id

    def _detokenizer(self, prompt: np.ndarray, params: SamplingParams) -> IncrementalDetokenizer | None:
        if self._tokenizer is None or not params.detokenize:
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
            for response in self._wait():
                self._add(response)
                yield response.id, response.final

    def next_batch(self) -> list[tuple[int, bool]]:
        """Wait for the next responses and add them to their completions, as `responses` does."""
        responses = [response for response in self._wait() if response.id in self.completions]
        for response in responses:
            self._add(response)
        return [(response.id, response.final) for response in responses]

    async def next_responses(self) -> None:
        """Wait for responses of an `AsyncInbox`, and add them to their completions; errors as those of `responses`."""
        assert isinstance(self._inbox, AsyncInbox)
        while True:
            was_alive = self._manager.alive
            try:
                async with asyncio.timeout(_POLL_SECONDS):
                    responses = await self._inbox.get()
                break
            except TimeoutError:
                if not was_alive:
                    raise self._engine_ended() from self._manager.failure
        for response in responses:
            self._add(response)

    def _add(self, response: Response) -> None:
        if response.final:
            self._active_ids.discard(response.id)
        if response.error:
            raise RuntimeError(response.error) from self._manager.failure
        output = response.output
        completions = self.completions[response.id]
        if response.final:
            self.num_cached_tokens[response.id] = output.num_cached_tokens
            if output.pooled:
                self.pooled[response.id] = np.frombuffer(output.pooled, np.float32)
        completions[0].prompt_logprobs += output.prompt_logprobs
        for completion, new_output in zip(completions, output.beams or (output,), strict=False):
            if completion.add(new_output.token_ids.tolist(), new_output.finish_reason, new_output.logprobs):
                self._client.stop(response.id)

    def _wait(self) -> Sequence[Response]:
        assert not isinstance(self._inbox, AsyncInbox)
        while True:
            try:
                return self._inbox.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if not self._manager.alive and self._inbox.empty():
                    raise self._engine_ended() from self._manager.failure

    def _engine_ended(self) -> RuntimeError:
        return RuntimeError(f"The engine has ended: {self._manager.end_reason}")

    def abort(self) -> None:
        """Stop unfinished requests; their final responses still arrive."""
        for request_id in self._active_ids:
            self._client.stop(request_id)

    def stop(self, request_ids: Iterable[int]) -> None:
        """Stop some requests."""
        for request_id in self._active_ids.intersection(request_ids):
            self._client.stop(request_id)

    def forget(self, request_id: int) -> None:
        """Drop what is kept of a request; its further responses are ignored."""
        self._active_ids.discard(request_id)
        for kept in (self.completions, self.metrics, self.num_cached_tokens, self.pooled):
            kept.pop(request_id, None)

    def close(self) -> None:
        """Stop unfinished requests, and ignore their further responses."""
        while self._active_ids:
            self._client.stop(self._active_ids.pop())

    def __enter__(self) -> CompletionStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def stream_deltas(
    stream: CompletionStream, prompt_of: dict[int, int], llm: object
) -> Iterator[tuple[int, CompletionOutput]]:
    """Yield new output of each completion with the index of its prompt, until all have finished.

    Args:
        llm: of the stream; held, since its engine ends with its last reference.
    """
    done: set[tuple[int, int]] = set()
    with stream:
        for request_id, _ in stream.responses():
            for completion in stream.completions[request_id]:
                delta = completion.take_delta()
                key = request_id, completion.index
                if key not in done and (delta.text or delta.token_ids or delta.finish_reason):
                    yield prompt_of[request_id], delta
                if completion.finished:
                    done.add(key)


class _LLM(Protocol):
    """What a `RequestLoop` uses of an `LLM`."""

    def default_sampling_params(self) -> SamplingParams: ...
    def get_tokenizer(self) -> Any: ...
    def load_requested(self, requests: LoRARequest | None, count: int) -> list[str]: ...
    def _open_stream(self) -> CompletionStream: ...
    def _prepare(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], adapters: Sequence[str]
    ) -> tuple[list[EncodedPrompt], list[SamplingParams]]: ...
    def _request_output(
        self,
        stream: CompletionStream,
        given: Any,
        prompt: EncodedPrompt,
        request_ids: Sequence[int],
        delta: bool = False,
    ) -> RequestOutput: ...


class _Request(NamedTuple):
    given: Any
    prompt: EncodedPrompt
    params: SamplingParams
    ids: list[int]
    unfinished: set[int]


class RequestLoop:
    """Requests that are added one by one, and their outputs step by step, with the methods of vLLM's `LLMEngine`.

    The engine runs meanwhile on its own thread; `step` waits for what it sends next.
    """

    def __init__(self, llm: _LLM) -> None:
        self._llm = llm
        self._stream = llm._open_stream()
        self._requests: dict[str, _Request] = {}
        self._names: dict[int, str] = {}  # of the requests by the ids of their answers

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a prompt; see `LLM.generate` for the arguments.

        Raises:
            ValueError: the prompt or its parameters are not supported, or an unfinished request has the same id.
            RuntimeError: the engine failed or was shut down.
        """
        if request_id in self._requests:
            raise ValueError(f"A request with the id {request_id!r} is unfinished; use another id.")
        adapters = self._llm.load_requested(lora_request, 1)
        (encoded,), (checked,) = self._llm._prepare([prompt], [params or self._llm.default_sampling_params()], adapters)
        streaming = checked.beam_width == 1 and (
            checked.stops_in_text or checked.output_kind != RequestOutputKind.FINAL_ONLY
        )
        ids = self._stream.submit(encoded, checked, streaming, priority, adapters[0])
        self._requests[request_id] = _Request(prompt, encoded, checked, ids, {*ids})
        self._names |= dict.fromkeys(ids, request_id)
        self._stream.wake_engine()

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def step(self) -> list[RequestOutput]:
        """Wait for the engine's next tokens; returns an output for each request that has any, as its `output_kind` says.

        Raises:
            RuntimeError: the engine failed or was shut down.
        """
        if not self._requests:
            return []
        arrived: dict[str, None] = {}
        for number, final in self._stream.next_batch():
            if (name := self._names.get(number)) is None:  # of an aborted request
                continue
            arrived[name] = None
            if final:
                self._requests[name].unfinished.discard(number)
        return [output for name in arrived if (output := self._output(name)) is not None]

    def _output(self, name: str) -> RequestOutput | None:
        request = self._requests[name]
        kind, finished = request.params.output_kind, not request.unfinished
        if not finished and kind == RequestOutputKind.FINAL_ONLY:
            return None
        delta = kind == RequestOutputKind.DELTA
        output = self._llm._request_output(self._stream, request.given, request.prompt, request.ids, delta)
        output.request_id, output.finished = name, finished
        if finished:
            self._forget(name)
        return output

    def abort_request(self, request_id: str | Sequence[str]) -> None:
        """End requests without a further output; ids of none are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if name in self._requests:
                self._stream.stop(self._requests[name].ids)
                self._forget(name)

    def _forget(self, name: str) -> None:
        for number in self._requests.pop(name).ids:
            del self._names[number]
            self._stream.forget(number)

    def get_tokenizer(self) -> Any:
        """See `LLM.get_tokenizer`."""
        return self._llm.get_tokenizer()
