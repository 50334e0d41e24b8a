"""msgpack messages between the first HTTP process and the others.

The sockets lie in a folder that only their owner can enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from torchweave.engine.control.errors import Fault
from torchweave.serving.engine_client.request_metrics import RequestMetricsData
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
    """

    number: int
    count: int
    folder: str
    host: str
    port: int
    shared_load_fd: int

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


class Answer(msgspec.Struct, tag=True, array_like=True):
    """`Call` `number` has ended; `fault`: with an error."""

    number: int
    fault: Fault | None = None


FromFrontend = FrontendReady | FrontendFailed | Pong | FrontendMetrics | Answer | PromptRouted

decode_to_frontend = msgspec.msgpack.Decoder(ToFrontend).decode
decode_from_frontend = msgspec.msgpack.Decoder(FromFrontend, dec_hook=from_msgpack).decode
