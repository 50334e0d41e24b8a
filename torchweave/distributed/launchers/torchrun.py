"""Ranks that torchrun has started, all with the same script."""

from __future__ import annotations

import json
import socket

from torch.distributed import Store
from torch.distributed.rendezvous import rendezvous

from torchweave.config.options import Launched
from torchweave.distributed.channel import Link
from torchweave.distributed.rendezvous import Door, RemoteMember, enter
from torchweave.distributed.worker_group import Crew

_WHERE = "torchweave/leader"
_SECONDS = 300.0  # scripts may do other things first


def meet() -> Store:
    """The store that torchrun's ranks have in common."""
    store, _, _ = next(rendezvous("env://"))
    return store


def gather(launched: Launched, store: Store, rank_timeout: float) -> Crew:
    """Rank 0: wait until the other ranks have come.

    Raises:
        TimeoutError: some did not.
    """
    door = Door(socket.gethostbyname(launched.address))
    store.set(_WHERE, json.dumps([*door.address, door.key.hex()]))
    found = door.admit(set(range(1, launched.size)), _SECONDS, lambda: None)
    members = [
        RemoteMember(rank, *found[rank], kill=lambda: None) for rank in sorted(found)
    ]  # torchrun's agent does that
    return Crew(members, rank_timeout)


def report_to_leader(launched: Launched, store: Store) -> Link:
    """Another rank: connect to rank 0."""
    host, port, key = json.loads(store.get(_WHERE))
    return enter((host, port), bytes.fromhex(key), launched.rank)
