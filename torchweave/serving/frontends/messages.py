"""msgpack messages between the first HTTP process and the others.

The sockets lie in a folder that only their owner can enter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from torchweave.engine.control.errors import Fault
from torchweave.serving.engine_client.request_metrics import RequestMetricsData, ServingCounters
from torchweave.serving.ipc.messages import (
    EngineExited,
    EngineStarted,
    EngineStateChanged,
    PromptRouted,
    from_msgpack,
)


@dataclass(frozen=True)
class FrontendInfo:
    """Number of an HTTP process (1, 2, ... of `count`; the first one is 0), and its addresses.

    Attributes:
        folder: of the processes' Unix sockets.
        host, port: address of the server.
        shared_load_fd: see `SharedLoad`.
        life: how many processes had this number before.
    """

    number: int
    count: int
    folder: str
    host: str
    port: int
    shared_load_fd: int
    life: int = 0

    @property
    def proxy_socket(self) -> str:
        """Unix socket at which the first process takes HTTP requests of the others."""
        return f"{self.folder}/http"

    @property
    def to_first(self) -> str:
        return f"{self.folder}/to_first.{self.number}"

    @property
    def from_first(self) -> str:
        return f"{self.folder}/from_first.{self.number}"


# -- to a frontend -----------------------------------------------------------------------------------------------------


class Draining(msgspec.Struct, tag=True, array_like=True):
    """The server takes no further requests."""


class MetricsRequest(msgspec.Struct, tag=True, array_like=True):
    """Request for `FrontendMetrics` with the same number."""

    number: int


class Call(msgspec.Struct, tag=True, array_like=True):
    """A control call that the engines have answered with `results`; answered with `Answer`."""

    number: int
    name: str
    arguments: dict[str, Any]
    results: list[Any]


class Ping(msgspec.Struct, tag=True, array_like=True):
    """Answer with `Pong`: a process that hangs does not. Nor does one ask that hangs itself."""


class End(msgspec.Struct, tag=True, array_like=True):
    """Request to end the process."""


ToFrontend = (
    EngineStarted | EngineStateChanged | EngineExited | Draining | MetricsRequest | PromptRouted | Call | Ping | End
)


# -- from a frontend ---------------------------------------------------------------------------------------------------


class FrontendReady(msgspec.Struct, tag=True, array_like=True):
    """The HTTP process listens."""


class FrontendFailed(msgspec.Struct, tag=True, array_like=True):
    """The HTTP process listens but can answer no request, for example without a tokenizer. `why` may be empty."""

    why: str


class Pong(msgspec.Struct, tag=True, array_like=True):
    """The answer to `Ping`."""


class FrontendMetrics(msgspec.Struct, tag=True, array_like=True):
    """Metrics of an HTTP process: its requests by engine, and HTTP requests by (method, path, status), and their
    warnings by kind."""

    number: int
    request_metrics: Sequence[RequestMetricsData]
    http: dict[tuple[str, str, str], int]
    warnings: dict[str, int]

    def ended(self, before: FrontendMetrics | None) -> FrontendMetrics:
        """The counters of a process that has ended, with those of processes that had ended `before`."""
        known = [self] if before is None else [self, before]
        of_engines = zip(*(each.request_metrics for each in known), strict=True)
        counts = [ServingCounters.merge([each.counts for each in of_engine]) for of_engine in of_engines]
        http = sum((Counter(each.http) for each in known), Counter())
        warnings = sum((Counter(each.warnings) for each in known), Counter())
        return FrontendMetrics(0, [RequestMetricsData(each) for each in counts], http, warnings)


class Answer(msgspec.Struct, tag=True, array_like=True):
    """`Call` `number` has ended; `fault`: with an error."""

    number: int
    fault: Fault | None = None


FromFrontend = FrontendReady | FrontendFailed | Pong | FrontendMetrics | Answer | PromptRouted

decode_to_frontend = msgspec.msgpack.Decoder(ToFrontend).decode
decode_from_frontend = msgspec.msgpack.Decoder(FromFrontend, dec_hook=from_msgpack).decode
