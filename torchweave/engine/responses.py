"""What there is to say after an iteration, made so that a token for each of hundreds of streams costs no Python for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np

from torchweave.engine.request import Output


class Response(NamedTuple):
    """What the batch manager says to the client about one request."""

    id: int
    output: Output
    final: bool
    error: str = ""


NO_TOKENS = np.empty(0, np.int32)
_NO_IDS = np.empty(0, np.uint64)


def refusal(request_id: int, error: str) -> Response:
    """The only and final response to a request that will not run (any further)."""
    return Response(request_id, Output(NO_TOKENS, "error"), final=True, error=error)


class Responses(Sequence[Response]):
    """Responses of one iteration: those with one more token of a stream, then all others.

    The first kind is kept as arrays, and made into `Response`s when somebody looks at them one by one; who does not need to
    (to write them to a socket, say) takes `ids`, `tokens` and `others` as they are.

    Attributes:
        ids: uint64 [n], requests with exactly one new token, no log-probabilities, and not at their end.
        tokens: int32 [n], that token.
        others: every other response.
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
