"""Ranks started by torchrun, all with the same script."""

from __future__ import annotations

import json
import socket

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from torchweave.config.options import TorchrunEnv
from torchweave.distributed.rendezvous import RemoteWorker, RendezvousServer, connect_to_rendezvous
from torchweave.distributed.worker_group import Channel, WorkerGroup

_LEADER_KEY = "torchweave/leader"
_JOIN_SECONDS = 300.0  # scripts may do other work first


def torchrun_store() -> Store:
    """The store shared by torchrun's ranks."""
    store, _, _ = next(rendezvous("env://"))
    return store


def accept_workers(launched: TorchrunEnv, store: Store, rank_timeout: float) -> WorkerGroup:
    """On rank 0, wait until the other ranks have connected.

    Raises:
        TimeoutError: a rank did not connect.
    """
    server = RendezvousServer(socket.gethostbyname(launched.address))
    store.set(_LEADER_KEY, json.dumps([*server.address, server.key.hex()]))
    accepted = server.accept_ranks(set(range(1, launched.size)), _JOIN_SECONDS, lambda: None)
    # torchrun's agent kills ranks.
    workers = [RemoteWorker(rank, *accepted[rank], kill=lambda: None) for rank in sorted(accepted)]
    return WorkerGroup(workers, rank_timeout)


def connect_to_leader(launched: TorchrunEnv, store: Store) -> Channel:
    """On another rank, connect to rank 0."""
    host, port, key = json.loads(store.get(_LEADER_KEY))
    return connect_to_rendezvous((host, port), bytes.fromhex(key), launched.rank)
