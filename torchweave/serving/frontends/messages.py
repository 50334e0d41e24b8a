"""What the first HTTP process and the others say to each other. Pickled: all are one program, and nobody else can enter the
folder in which their sockets lie."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torchweave.serving.engine_client.client import State
from torchweave.serving.engine_client.load_balancer import Sent
from torchweave.serving.engine_client.request_metrics import Traffic
from torchweave.serving.ipc.messages import Addresses, ModelCard


@dataclass(frozen=True)
class Seat:
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
    def relay(self) -> str:
        """The first one's Unix socket for HTTP."""
        return f"{self.folder}/http"

    @property
    def to_first(self) -> str:
        return f"ipc://{self.folder}/first"

    @property
    def from_first(self) -> str:
        return f"ipc://{self.folder}/{self.number}"


@dataclass(frozen=True)
class Began:
    """A life of engine number `engine` has begun; that is where it will be heard."""

    engine: int
    addresses: Addresses


@dataclass(frozen=True)
class Became:
    """What it is now, why it failed or was stopped, how often it was started again, and what it serves once it is ready."""

    engine: int
    state: State
    failure: str
    restarts: int
    model: ModelCard | None


@dataclass(frozen=True)
class Ended:
    """Its life has ended, and it says no more. Comes behind what it is now."""

    engine: int
    why: str


@dataclass(frozen=True)
class Draining:
    """No further request is taken."""


@dataclass(frozen=True)
class Look:
    """Answered with `Seen` of the same number."""

    number: int


@dataclass(frozen=True)
class End:
    """The process is to end."""


ToFrontend = Began | Became | Ended | Draining | Look | Sent | End


@dataclass(frozen=True)
class Joined:
    """This HTTP process listens."""


@dataclass(frozen=True)
class CannotServe:
    """It listens, and will never have what answers take. `why` may be empty."""

    why: str


@dataclass(frozen=True)
class Seen:
    """What one has seen so far: its requests to each engine, and its HTTP requests by method, path and status."""

    number: int
    traffics: tuple[Traffic, ...]
    http: Counter[tuple[str, str, str]]


FromFrontend = Joined | CannotServe | Seen | Sent
"""Sent with the number of the HTTP process that says it."""
