"""Responses of an iteration, stored so that hundreds of streamed tokens cost no Python per token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np

from torchweave.engine.request import Output


class Response(NamedTuple):
    """A response of the batch manager to one request."""

    id: int
    output: Output
    final: bool
    error: str = ""


NO_TOKENS = np.empty(0, np.int32)
_NO_IDS = np.empty(0, np.uint64)


def refusal(request_id: int, error: str) -> Response:
    """The final response to a request that is rejected or aborted."""
    return Response(request_id, Output(NO_TOKENS, "error"), final=True, error=error)


class Responses(Sequence[Response]):
    """Responses of one iteration: those with one more token of a stream, then all others.

    The former are stored as arrays, and become `Response`s on iteration. To serialize them without that cost, read `ids`,
    `tokens` and `others`.

    Attributes:
        ids: uint64 [n], unfinished requests with exactly one new token and no log-probabilities.
        tokens: int32 [n], their tokens.
        others: all other responses.
    """

    def __init__(
        self, others: Iterable[Response] = (), ids: np.ndarray = _NO_IDS, tokens: np.ndarray = NO_TOKENS
    ) -> None:
        self.ids = ids
        self.tokens = tokens
        self.others = list(others)

    def extend(self, responses: Iterable[Response]) -> None:
        self.others.extend(responses)

    def request_ids(self) -> list[int]:
        return [*self.ids.tolist(), *(response.id for response in self.others)]

    @property
    def num_final(self) -> int:
        return sum(response.final for response in self.others)

    def __len__(self) -> int:
        return len(self.ids) + len(self.others)

    def __iter__(self) -> Iterator[Response]:
        for index, request_id in enumerate(self.ids.tolist()):
            yield Response(request_id, Output(self.tokens[index : index + 1]), False)
        yield from self.others

    @overload
    def __getitem__(self, index: int) -> Response: ...
    @overload
    def __getitem__(self, index: slice) -> list[Response]: ...
    def __getitem__(self, index: int | slice) -> Response | list[Response]:
        return list(self)[index]
