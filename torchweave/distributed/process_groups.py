"""Which ranks run one engine, and the process groups between them.

A rank is a process with a device of its own. Ranks are numbered so that those of one tensor-parallel group are neighbours:
`rank = pipeline_rank * tensor_parallel_size + tensor_rank`. Rank 0 leads: it alone knows requests. It has the last stage of a
pipeline, where tokens are drawn, so that all that a request asks about its tokens is there already.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from torchweave.distributed.communicator import ProcessGroupCommunicator
from torchweave.ops.collectives.op import communicator, find_communicator, register_communicator

TENSOR, PIPELINE = "tp", "pp"
"""Names under which a graph knows its groups: the same on every rank, so that all ranks have the same graph."""
PREVIOUS_STAGE, NEXT_STAGE = "pp_previous", "pp_next"
"""Names of the groups of two: with the stage before, and with the one behind."""
_LEAVE_SECONDS, _ABORT_SECONDS = 20.0, 5.0  # until all ranks have left; without ranks that are gone
_log = logging.getLogger("torchweave")

RendezvousStore = Store
"""Where the ranks of a world find each other."""


def create_rendezvous_store(host: str) -> tuple[RendezvousStore, tuple[str, int]]:
    """Rank 0: a meeting point, which lives as long as it is held, and the address at which other ranks reach it."""
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, (host, store.port)


def join_rendezvous_store(address: tuple[str, int]) -> RendezvousStore:
    """Another rank: the meeting point at an address."""
    return TCPStore(*address, is_master=False)


@dataclass(frozen=True)
class ProcessGroups:
    """The ranks of one engine, as one of them sees them.

    Attributes:
        rank: of this process.
        size: ranks in all: `tensor_parallel_size * pipeline_parallel_size`.
        tensor_parallel_size: ranks that share each layer.
        pipeline_parallel_size: stages that the layers are divided into.
        device: of this rank: `cpu` or `cuda:N`.
        groups: process groups by name: `tp`, `pp` (this rank's own ones, where they have several ranks), for tensors on its
            device; also `pp_previous` and `pp_next`, of this stage and a neighbour.
        host: a gloo group of all ranks, for what the host has to tell; None in a world of one rank.
    """

    rank: int = 0
    size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    device: str = "cpu"
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict, compare=False, repr=False)
    host: ProcessGroup | None = field(default=None, compare=False, repr=False)

    @classmethod
    def single_rank(cls) -> ProcessGroups:
        """One rank, which is all there is: nothing is exchanged."""
        return cls()

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def pipeline_rank(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def stage(self) -> int:
        """Which part of the layers this rank has: 0 begins with the embedding, the last draws tokens."""
        return self.pipeline_parallel_size - 1 - self.pipeline_rank

    def rank_of_stage(self, stage: int) -> int:
        """The rank of another stage with which this one exchanges."""
        return (self.pipeline_parallel_size - 1 - stage) * self.tensor_parallel_size + self.tensor_rank

    @property
    def tensor_group(self) -> str:
        """The name that collective ops of a graph carry."""
        return TENSOR

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def all_reduce_min(self, number: int) -> int:
        """The smallest of the numbers that the ranks give, each its own; waits for all of them."""
        if self.host is None:
            return number
        found = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.host)
        return int(found)

    def fault(self) -> str | None:
        """Why what this device computed is worth nothing, if its kernels gave up waiting for another rank; never waits itself."""
        return communicator(TENSOR).fault() if self.tensor_parallel_size > 1 else None

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.host is not None:
            dist.barrier(group=self.host)


def init_process_groups(
    rank: int,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    device: str,
    store: RendezvousStore,
    timeout: float = 1800.0,
) -> ProcessGroups:
    """Join the world; returns once every rank has joined.

    Args:
        rank: of this process.
        device: of this rank; `cpu` takes gloo for everything, `cuda:N` takes NCCL for tensors and gloo for the host.
        store: where the ranks find each other.
        timeout: seconds that ranks wait for each other, here and in collectives of the host.

    Raises:
        ValueError: this process takes part in a `torch.distributed` world already.
    """
    size = tensor_parallel_size * pipeline_parallel_size
    if dist.is_initialized():
        raise ValueError(
            "This process has initialised torch.distributed already, and an engine over several ranks needs it for itself; "
            "call torch.distributed.destroy_process_group() first, or shut the other engine down."
        )
    if device != "cpu":
        torch.cuda.set_device(device)  # NCCL moves pickled objects by way of the current one
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    groups = {}
    for name, members in (
        (TENSOR, _tensor_groups(tensor_parallel_size, size)),
        (PIPELINE, _pipeline_groups(tensor_parallel_size, size)),
    ):
        for ranks in members if len(members[0]) > 1 else ():  # every rank takes part in making every group
            group = _new_group(ranks, device, limit)
            if rank in ranks:
                groups[name] = group
    if pipeline_parallel_size > 1:
        groups |= _neighbor_groups(groups[PIPELINE], rank, tensor_parallel_size, size, device, limit)
    host = dist.group.WORLD
    assert host is not None
    if tensor_parallel_size > 1:
        register_communicator(TENSOR, ProcessGroupCommunicator(groups[TENSOR]))
    return ProcessGroups(rank, size, tensor_parallel_size, pipeline_parallel_size, device, groups, host)


def destroy_process_groups(process_groups: ProcessGroups, abort: bool = False) -> None:
    """Leave the world. The process may join another one afterwards.

    Args:
        abort: other ranks are gone: leave without them.
    """
    if process_groups.host is None or not dist.is_initialized():
        return

    def leave() -> None:
        if abort:
            abort_groups(process_groups)
        register_communicator(TENSOR, None)
        dist.destroy_process_group()

    # NCCL waits for every CUDA graph that holds a collective of the group, and whoever failed or forgot one may still have it.
    leaving = threading.Thread(target=leave, name="torchweave-leave", daemon=True)
    leaving.start()
    leaving.join(_ABORT_SECONDS if abort else _LEAVE_SECONDS)
    if leaving.is_alive():
        _log.warning(
            "Process groups were not left in time: a CUDA graph or a kernel with a collective of theirs is still there."
        )


def abort_groups(process_groups: ProcessGroups) -> None:
    """Give up what is under way on GPUs between ranks, of which some are gone: kernels that wait for them end."""
    if (found := find_communicator(TENSOR)) is not None:
        found.abort()
    # At the same moment: to abort one NCCL waits for the whole GPU, where a kernel of another group may wait for who is gone.
    groups = {
        id(group): group for group in process_groups.groups.values() if group.name() == "nccl"
    }  # two names may be one group
    threads = [threading.Thread(target=group.abort, name="torchweave-abort", daemon=True) for group in groups.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _new_group(ranks: list[int], device: str, limit: datetime.timedelta) -> ProcessGroup | None:
    """A group for tensors on `device`."""
    if device.startswith("cuda"):
        return dist.new_group(ranks, timeout=limit, backend="nccl", device_id=torch.device(device))  # type: ignore[return-value]
    return dist.new_group(ranks, timeout=limit, backend="gloo")  # type: ignore[return-value]


def _neighbor_groups(
    pipeline: ProcessGroup | None, rank: int, tensor: int, size: int, device: str, limit: datetime.timedelta
) -> dict[str, ProcessGroup | None]:
    """The groups of two through which a stage hands over to the next one; a pipeline of two stages is one already."""
    groups = {}
    for later in range(size - tensor):  # the rank of the later stage, which is the lower one
        earlier = later + tensor
        group = pipeline if size == 2 * tensor else _new_group([later, earlier], device, limit)
        if rank == later:
            groups[PREVIOUS_STAGE] = group
        elif rank == earlier:
            groups[NEXT_STAGE] = group
    return groups


def _tensor_groups(tensor_parallel_size: int, size: int) -> list[list[int]]:
    return [list(range(first, first + tensor_parallel_size)) for first in range(0, size, tensor_parallel_size)]


def _pipeline_groups(tensor_parallel_size: int, size: int) -> list[list[int]]:
    return [list(range(first, size, tensor_parallel_size)) for first in range(tensor_parallel_size)]
