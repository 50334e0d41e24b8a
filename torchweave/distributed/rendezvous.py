"""How ranks that the leader did not start as its children come to it: a TCP port, and a secret that both sides prove to know.

Steps are pickled, so that whoever may send them may run code: nobody without the secret gets as far as that.
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

from torchweave.distributed.channel import Channel

_HANDSHAKE_SECONDS = 5.0
_POLL_SECONDS = 0.5


class RemoteWorker:
    """A rank that came through the door.

    Args:
        process_name: of its process: `process 12 on node-3`.
        kill: ends it, as far as that can be done from here; its connection is broken in any case, and it ends then by itself.
    """

    def __init__(self, rank: int, peer_channel: Channel, process_name: str, kill: Callable[[], None]) -> None:
        self.peer_channel = peer_channel
        self.name = f"Rank {rank} ({process_name})"
        self._kill = kill

    def exit_reason(self) -> str:
        return ""

    def wait(self, seconds: float) -> None:
        """Wait until it has closed its end."""
        deadline = time.monotonic() + seconds
        try:
            while (left := deadline - time.monotonic()) > 0 and self.peer_channel.poll(left):
                self.peer_channel.receive()
        except (EOFError, OSError):
            pass

    def kill(self) -> None:
        self._kill()


class RendezvousServer:
    """The leader's side.

    Args:
        host: an address of this machine that the other ranks can reach.
    """

    def __init__(self, host: str) -> None:
        self.key = secrets.token_bytes(32)
        self._server = socket.create_server((host, 0), family=_family(host))
        self.address: tuple[str, int] = host, self._server.getsockname()[1]

    def accept_ranks(
        self, ranks: set[int], seconds: float, check: Callable[[], None]
    ) -> dict[int, tuple[Channel, str]]:
        """Wait for these ranks; returns the connection of each, and of which process it is. The door is closed then.

        Args:
            check: called now and then; raises where waiting is in vain.

        Raises:
            TimeoutError: some did not come.
        """
        found: dict[int, tuple[Channel, str]] = {}
        deadline = time.monotonic() + seconds
        self._server.settimeout(_POLL_SECONDS)
        with self._server:
            while missing := ranks - set(found):
                check()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {min(missing)} did not connect to {self.address[0]} within {seconds:g} s")
                try:
                    connected, _ = self._server.accept()
                except TimeoutError:
                    continue
                if (accepted := self._authenticate(connected)) is not None:
                    rank, peer_channel, process_name = accepted
                    found[rank] = peer_channel, process_name
        return found

    def _authenticate(self, connected: socket.socket) -> tuple[int, Channel, str] | None:
        """The rank behind a connection; None for a stranger."""
        _set_receive_timeout(connected, _HANDSHAKE_SECONDS)
        connection = Connection(connected.detach())
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            rank, process_name = json.loads(connection.recv_bytes(4096))
        except (AuthenticationError, OSError, EOFError, ValueError):
            connection.close()
            return None
        peer_channel = Channel(connection)
        peer_channel.clear_receive_timeout()
        return int(rank), peer_channel, str(process_name)


def connect_to_rendezvous(address: tuple[str, int], key: bytes, rank: int) -> Channel:
    """Another rank's side: connect to the leader.

    Raises:
        OSError: the leader cannot be reached.
        AuthenticationError: it is not the leader.
    """
    connected = socket.create_connection(address)
    connected.settimeout(None)
    connection = Connection(connected.detach())
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    connection.send_bytes(json.dumps([rank, f"process {os.getpid()} on {socket.gethostname()}"]).encode())
    return Channel(connection)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _set_receive_timeout(connected: socket.socket, seconds: float) -> None:
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))
