"""Rendezvous of the leader with ranks that are not its children: a TCP port and a secret that both sides prove to have.

Steps are pickled, and unpickling runs code: connections without the secret are closed before the first message.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from torchweave.distributed.worker_group import Channel

_HANDSHAKE_SECONDS = 5.0
_POLL_SECONDS = 0.5


class RemoteWorker:
    """A rank that connected through the rendezvous (`Worker`).

    Args:
        process_name: `process 12 on node-3`.
        kill: ends it, as far as the launcher allows; it also ends by itself when its connection breaks.
    """

    def __init__(self, rank: int, channel: Channel, process_name: str, kill: Callable[[], None]) -> None:
        self.channel = channel
        self.name = f"Rank {rank} ({process_name})"
        self.kill = kill

    def exit_reason(self) -> str:
        return ""

    def wait(self, seconds: float) -> None:
        """Wait until it has closed its end."""
        deadline = time.monotonic() + seconds
        try:
            while (left := deadline - time.monotonic()) > 0 and self.channel.poll(left):
                self.channel.receive()
        except (EOFError, OSError):
            pass


class RendezvousServer:
    """The leader's side.

    Args:
        host: an address of this machine that the other ranks can reach.
    """

    def __init__(self, host: str) -> None:
        self.key = secrets.token_bytes(32)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family)
        self.address: tuple[str, int] = host, self._server.getsockname()[1]

    def accept_ranks(
        self, ranks: set[int], seconds: float, check: Callable[[], None]
    ) -> dict[int, tuple[Channel, str]]:
        """Wait for connections of `ranks`, then close the port; returns channel and process name by rank.

        Args:
            check: called at least every half second; raises if a rank cannot come.

        Raises:
            TimeoutError: a rank did not connect in time.
        """
        accepted: dict[int, tuple[Channel, str]] = {}
        deadline = time.monotonic() + seconds
        self._server.settimeout(_POLL_SECONDS)
        with self._server:
            while missing := ranks - set(accepted):
                check()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {min(missing)} did not connect to {self.address[0]} within {seconds:g} s")
                try:
                    connected, _ = self._server.accept()
                except TimeoutError:
                    continue
                if (worker := self._authenticate(connected)) is not None:
                    rank, channel, process_name = worker
                    accepted[rank] = channel, process_name
        return accepted

    def _authenticate(self, connected: socket.socket) -> tuple[int, Channel, str] | None:
        """Return rank, channel and process name of a connection; None if it fails the challenge."""
        connected.settimeout(None)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_HANDSHAKE_SECONDS), 0))
        connection = Connection(connected.detach())
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            rank, process_name = json.loads(connection.recv_bytes(4096))
        except (AuthenticationError, OSError, EOFError, ValueError):
            connection.close()
            return None
        channel = Channel(connection)
        channel.clear_receive_timeout()
        return int(rank), channel, str(process_name)


def connect_to_rendezvous(address: tuple[str, int], key: bytes, rank: int) -> Channel:
    """Connect another rank to the leader.

    Raises:
        OSError: the leader cannot be reached.
        AuthenticationError: the server does not have the secret.
    """
    connected = socket.create_connection(address)
    connected.settimeout(None)
    connection = Connection(connected.detach())
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    connection.send_bytes(json.dumps([rank, f"process {os.getpid()} on {socket.gethostname()}"]).encode())
    return Channel(connection)
