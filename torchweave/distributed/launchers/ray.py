"""Ranks as actors of a Ray cluster, on one machine or several.

The calling process is the leader; Ray starts the other ranks and reserves their devices. Steps do not pass through Ray: each actor
connects to the leader once, and a step is one message over that socket.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torchweave.distributed.launchers.local import resolve_function
from torchweave.distributed.rendezvous import RemoteWorker, RendezvousServer, connect_to_rendezvous
from torchweave.distributed.worker_group import RankFailure, WorkerGroup

_PLACEMENT_SECONDS = 60.0  # for the placement group, once the cluster's total resources suffice
_JOIN_SECONDS = 300.0  # for the actors to start and connect: each imports torch


@dataclass(frozen=True)
class RankPlacement:
    """Resources reserved in a cluster, for every rank.

    Attributes:
        host: this machine's address within the cluster.
        device: reserved for the leader.
    """

    host: str
    device: str
    on_gpus: bool
    group: Any
    leader_actor: Any
    owns_ray: bool

    def release(self) -> None:
        """Release the resources."""
        import ray

        ray.util.remove_placement_group(self.group)
        if self.owns_ray:
            ray.shutdown()


def reserve_placement(num_ranks: int, on_gpus: bool) -> RankPlacement:
    """Reserve a CPU, and a GPU with `on_gpus`, for each rank: rank 0 on this machine, the others as near as possible.

    Uses the cluster that this process is connected to or can find; otherwise starts a local one.

    Raises:
        ValueError: Ray is not installed, or the cluster has too few resources.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("executor=ray needs Ray; install it with: pip install 'torchweave[ray]'") from None
    owns_ray = not ray.is_initialized()
    if owns_ray:
        ray.init(logging_level=logging.ERROR, include_dashboard=False)
    host = ray.util.get_node_ip_address()
    resources = {"CPU": 1.0} | ({"GPU": 1.0} if on_gpus else {})
    group = ray.util.placement_group(
        [resources | {f"node:{host}": 0.001}, *[resources] * (num_ranks - 1)], strategy="PACK"
    )
    available = ray.cluster_resources()
    has_resources = all(available.get(kind, 0.0) >= number * num_ranks for kind, number in resources.items())
    if not has_resources or not group.wait(_PLACEMENT_SECONDS):
        ray.util.remove_placement_group(group)
        if owns_ray:
            ray.shutdown()
        raise ValueError(
            f"The Ray cluster has no room for {num_ranks} ranks with {'a GPU' if on_gpus else 'a CPU'} each, one of them on this "
            f"machine (it has {available.get('CPU', 0):g} CPUs and {available.get('GPU', 0):g} GPUs); add machines, or "
            f"end what uses them"
        )
    leader_actor = _options(ray, group, 0, on_gpus)(ray.remote(_LeaderActor)).remote()
    gpus = ray.get(leader_actor.gpus.remote())
    return RankPlacement(host, f"cuda:{gpus[0]}" if on_gpus else "cpu", on_gpus, group, leader_actor, owns_ray)


def start_on_ray(placement: RankPlacement, function: str, tasks: list[Any], rank_timeout: float) -> WorkerGroup:
    """Start an actor for each of `tasks`, as ranks 1, 2, ...; each calls `function` (`module:name`) with its channel and task.

    Raises:
        RankFailure: an actor could not start.
    """
    import ray

    server = RendezvousServer(placement.host)
    actors, runs = {}, []
    for rank, task in enumerate(tasks, 1):
        actors[rank] = _options(ray, placement.group, rank, placement.on_gpus)(ray.remote(_WorkerActor)).remote()
        runs.append(actors[rank].run.remote(function, server.address, server.key, rank, task))

    def check() -> None:
        ended, _ = ray.wait(runs, num_returns=1, timeout=0)
        if ended:
            try:
                ray.get(ended)
            except Exception as error:
                raise RankFailure(f"An actor of Ray could not start its rank: {str(error).splitlines()[-1]}") from error

    try:
        accepted = server.accept_ranks(set(actors), _JOIN_SECONDS, check)
    except BaseException:
        for actor in actors.values():
            ray.kill(actor)
        raise
    return WorkerGroup(
        [RemoteWorker(rank, *accepted[rank], kill=_KillActor(actors[rank])) for rank in sorted(accepted)],
        rank_timeout,
    )


def _options(ray: Any, group: Any, bundle: int, on_gpus: bool) -> Any:
    """Return a function that sets an actor's resources and placement."""
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, bundle)
    return lambda actor: actor.options(num_cpus=1, num_gpus=1 if on_gpus else 0, scheduling_strategy=strategy)


class _KillActor:
    """Kills an actor on the first call."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __call__(self) -> None:
        import ray

        actor, self._actor = self._actor, None
        if actor is not None and ray.is_initialized():
            ray.kill(actor)


class _LeaderActor:
    """Holds the leader's device reservation."""

    def gpus(self) -> list[int]:
        import ray

        return [int(number) for number in ray.get_gpu_ids()]


class _WorkerActor:
    """Runs a rank other than the leader."""

    def run(self, function: str, address: tuple[str, int], key: bytes, rank: int, task: Any) -> None:
        resolve_function(function)(connect_to_rendezvous(address, key, rank), task)
