"""What the first HTTP process and the others say to each other. Pickled: all are one program, and nobody else can enter the
folder in which their sockets lie."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torchweave.serving.engine_client.client import State
from torchweave.serving.engine_client.load_balancer import PromptRouted
from torchweave.serving.engine_client.request_metrics import RequestMetrics
from torchweave.serving.ipc.messages import Addresses, ModelCard


@dataclass(frozen=True)
class FrontendInfo:
    """Which HTTP process it is (1, 2, ... of `count`; the first one is 0), and where all of them meet.

    Attributes:
        folder: of their sockets.
        host, port: where all of them listen.
    """

    number: int
    count: int
    folder: str
    host: str
    port: int

    @property
    def proxy_socket(self) -> str:
        """The first one's Unix socket for HTTP."""
        return f"{self.folder}/http"

    @property
    def to_first(self) -> str:
        return f"ipc://{self.folder}/first"

    @property
    def from_first(self) -> str:
        return f"ipc://{self.folder}/{self.number}"


@dataclass(frozen=True)
class EngineStarted:
    """A life of engine number `engine` has begun; that is where it will be heard."""

    engine: int
    addresses: Addresses


@dataclass(frozen=True)
class EngineStateChanged:
    """What it is now, why it failed or was stopped, how often it was started again, and what it serves once it is ready."""

    engine: int
    state: State
    failure: str
    restarts: int
    model: ModelCard | None


@dataclass(frozen=True)
class EngineExited:
    """Its life has ended, and it says no more. Comes behind what it is now."""

    engine: int
    why: str


@dataclass(frozen=True)
class Draining:
    """No further request is taken."""


@dataclass(frozen=True)
class MetricsRequest:
    """Answered with `FrontendMetrics` of the same number."""

    number: int


@dataclass(frozen=True)
class End:
    """The process is to end."""


ToFrontend = EngineStarted | EngineStateChanged | EngineExited | Draining | MetricsRequest | PromptRouted | End


@dataclass(frozen=True)
class FrontendReady:
    """This HTTP process listens."""


@dataclass(frozen=True)
class FrontendFailed:
    """It listens, and will never have what answers take. `why` may be empty."""

    why: str


@dataclass(frozen=True)
class FrontendMetrics:
    """What one has seen so far: its requests to each engine, and its HTTP requests by method, path and status."""

    number: int
    request_metrics: tuple[RequestMetrics, ...]
    http: Counter[tuple[str, str, str]]


FromFrontend = FrontendReady | FrontendFailed | FrontendMetrics | PromptRouted
"""Sent with the number of the HTTP process that says it."""
