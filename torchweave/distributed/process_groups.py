"""Ranks of an engine, their process groups and collectives over torch.distributed, and the transport between pipeline stages.

A rank is a process with a device of its own. Ranks of a tensor-parallel group have consecutive numbers:
`rank = pipeline_rank * tensor_parallel_size + tensor_rank`. Rank 0 is the leader, which alone schedules requests. It runs the last
pipeline stage, which samples, so that tokens and log-probabilities need no transfer to it.
"""

from __future__ import annotations

import datetime
import logging
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from torchweave.ops.collectives.all_reduce_norm import NormSpec
from torchweave.ops.collectives.op import communicator, find_communicator, register_communicator

TENSOR, PIPELINE = "tp", "pp"
"""Group names in graphs, the same on every rank so that all ranks have the same graph."""
PREVIOUS_STAGE, NEXT_STAGE = "pp_previous", "pp_next"
"""Names of the two-rank groups with the previous and the next stage."""
_DESTROY_SECONDS, _ABORT_SECONDS = 20.0, 5.0  # for all ranks to leave; if other ranks have ended
_log = logging.getLogger("torchweave")

RendezvousStore = Store


class StoreAddress(NamedTuple):
    """Where the other ranks reach the store. Its keys begin with `secret`: a process without it finds no rank."""

    host: str
    port: int
    secret: str


def create_rendezvous_store(host: str) -> tuple[RendezvousStore, StoreAddress]:
    """Create the store on rank 0; returns it (it closes when dropped) and its address for the other ranks.

    It listens at `host` only; torch's own socket would listen at every address of the machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind, protocol)
    listening.bind(address)
    listening.listen()
    port = listening.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    secret = secrets.token_hex(16)
    return PrefixStore(secret, store), StoreAddress(host, port, secret)


def join_rendezvous_store(address: StoreAddress) -> RendezvousStore:
    """Connect another rank to the store at an address."""
    return PrefixStore(address.secret, TCPStore(address.host, address.port, is_master=False))


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups of an engine, on one of its ranks.

    Attributes:
        rank: of this process.
        size: number of ranks: `tensor_parallel_size * pipeline_parallel_size`.
        tensor_parallel_size: ranks that share each layer.
        pipeline_parallel_size: pipeline stages.
        device: of this rank: `cpu` or `cuda:N`.
        groups: this rank's process groups of several ranks, by name, for tensors on its device: `tp`; `pp` for sampled tokens;
            `pp_previous` and `pp_next` for hidden states of a neighboring stage.
        host: gloo group of all ranks, for host data; None with a single rank.
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
        """The groups of an engine on one rank, without communication."""
        return cls()

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def pipeline_rank(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def stage(self) -> int:
        """This rank's pipeline stage: 0 begins with the embedding, the last one samples."""
        return self.pipeline_parallel_size - 1 - self.pipeline_rank

    def rank_of_stage(self, stage: int) -> int:
        """Rank of the same tensor rank in another stage."""
        return (self.pipeline_parallel_size - 1 - stage) * self.tensor_parallel_size + self.tensor_rank

    def all_reduce_min(self, number: int) -> int:
        """Minimum of all ranks' numbers; waits for every rank."""
        if self.host is None:
            return number
        minimum = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(minimum, op=dist.ReduceOp.MIN, group=self.host)
        return int(minimum)

    def fault(self) -> str | None:
        """Return why results of this device are invalid: its kernels timed out waiting for another rank. Does not block."""
        return communicator(TENSOR).fault() if self.tensor_parallel_size > 1 else None

    def barrier(self) -> None:
        """Wait for every rank."""
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
    """Initialise torch.distributed and create the groups; returns once every rank has joined.

    Args:
        rank: of this process.
        device: of this rank; `cpu` uses gloo for all groups, `cuda:N` NCCL for tensors and gloo for host data.
        timeout: seconds that ranks wait for each other, here and in collectives on host data.

    Raises:
        ValueError: torch.distributed is initialized in this process already.
    """
    size = tensor_parallel_size * pipeline_parallel_size
    if dist.is_initialized():
        raise ValueError(
            "torch.distributed is initialized in this process already, and an engine over several ranks initializes it itself; "
            "call torch.distributed.destroy_process_group() first, or shut the other engine down."
        )
    if device != "cpu":
        torch.cuda.set_device(device)  # NCCL sends pickled objects through the current device
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    groups = {}
    for name, members in (
        (TENSOR, _tensor_groups(tensor_parallel_size, size)),
        (PIPELINE, _pipeline_groups(tensor_parallel_size, size)),
    ):
        for ranks in members if len(members[0]) > 1 else ():  # creating a group is collective over all ranks
            group = _new_group(ranks, device, limit)
            if rank in ranks:
                groups[name] = group
    if pipeline_parallel_size > 1:
        groups |= _neighbor_groups(rank, tensor_parallel_size, size, device, limit)
    host = dist.group.WORLD
    assert host is not None
    if tensor_parallel_size > 1:
        register_communicator(TENSOR, ProcessGroupCommunicator(groups[TENSOR]))
    return ProcessGroups(rank, size, tensor_parallel_size, pipeline_parallel_size, device, groups, host)


def destroy_process_groups(process_groups: ProcessGroups, abort: bool = False) -> None:
    """Destroy the groups; the process can create others afterwards.

    Args:
        abort: do not wait for other ranks, since some have ended.
    """
    if process_groups.host is None or not dist.is_initialized():
        return

    def leave() -> None:
        if abort:
            abort_groups(process_groups)
        register_communicator(TENSOR, None)
        dist.destroy_process_group()

    # NCCL waits for every CUDA graph with a collective of the group; after a failure such a graph may still exist.
    thread = threading.Thread(target=leave, name="torchweave-leave", daemon=True)
    thread.start()
    thread.join(_ABORT_SECONDS if abort else _DESTROY_SECONDS)
    if thread.is_alive():
        _log.warning(
            "Timed out destroying process groups: a CUDA graph or a running kernel still uses their collectives."
        )


def abort_groups(process_groups: ProcessGroups) -> None:
    """Abort running collectives after ranks have ended: kernels that wait for those ranks return."""
    if (tensor_communicator := find_communicator(TENSOR)) is not None:
        tensor_communicator.abort()
    # In parallel: NCCL's abort waits for the whole GPU, where a kernel of another group may wait for a rank that has ended.
    groups = [group for group in process_groups.groups.values() if group.name() == "nccl"]
    threads = [threading.Thread(target=group.abort, name="torchweave-abort", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _new_group(ranks: list[int], device: str, limit: datetime.timedelta) -> ProcessGroup | None:
    """Create a group for tensors on `device`."""
    if device.startswith("cuda"):
        return dist.new_group(ranks, timeout=limit, backend="nccl", device_id=torch.device(device))  # type: ignore[return-value]
    return dist.new_group(ranks, timeout=limit, backend="gloo")  # type: ignore[return-value]


def _neighbor_groups(
    rank: int, tensor: int, size: int, device: str, limit: datetime.timedelta
) -> dict[str, ProcessGroup | None]:
    """Create the two-rank groups between consecutive stages.

    Two stages have one as well: sampled tokens and hidden states take no common order, so they need different groups.
    """
    groups = {}
    for later in range(size - tensor):  # rank of the later stage, which has the lower number
        earlier = later + tensor
        group = _new_group([later, earlier], device, limit)
        if rank == later:
            groups[PREVIOUS_STAGE] = group
        elif rank == earlier:
            groups[NEXT_STAGE] = group
    return groups


def _tensor_groups(tensor_parallel_size: int, size: int) -> list[list[int]]:
    return [list(range(first, first + tensor_parallel_size)) for first in range(0, size, tensor_parallel_size)]


def _pipeline_groups(tensor_parallel_size: int, size: int) -> list[list[int]]:
    return [list(range(first, size, tensor_parallel_size)) for first in range(tensor_parallel_size)]


class PipelineTransport:
    """Transfers of hidden states and tokens between pipeline stages.

    Hidden states are broadcast in a group of two: unlike `send` and `recv` of torch.distributed, which connect on first use, a
    broadcast uses an existing connection and can be recorded into CUDA graphs. It runs on the current stream.

    Args:
        process_groups: of several stages.
    """

    def __init__(self, process_groups: ProcessGroups) -> None:
        self._groups = process_groups
        self._last_stage = process_groups.pipeline_parallel_size - 1
        self.is_first = process_groups.stage == 0
        self.is_last = process_groups.stage == self._last_stage

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Receive a new tensor from the previous stage."""
        x = torch.empty(shape, dtype=dtype, device=self._groups.device)
        previous = self._groups.rank_of_stage(self._groups.stage - 1)
        dist.broadcast(x, src=previous, group=self._groups.groups[PREVIOUS_STAGE])
        return x

    def send(self, x: Tensor) -> None:
        """Send x to the next stage."""
        dist.broadcast(x.contiguous(), src=self._groups.rank, group=self._groups.groups[NEXT_STAGE])

    def send_tokens(self, tokens: Tensor) -> dist.Work:
        """Send tokens from the last stage to all others, which call `receive_tokens` as often and in the same order.

        The current stream continues at once; `wait` of the result holds it until the tokens may be overwritten.
        """
        work = dist.broadcast(tokens, src=self._groups.rank, group=self._groups.groups[PIPELINE], async_op=True)
        assert work is not None
        return work

    def receive_tokens(self, tokens: Tensor) -> None:
        """Overwrite tokens (contiguous) with the next ones of the last stage."""
        last = self._groups.rank_of_stage(self._last_stage)
        dist.broadcast(tokens, src=last, group=self._groups.groups[PIPELINE])


# Renamed in torch 2.13 from `..._into_tensor` and `..._tensor`.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sum_of_ranks(parts: Tensor) -> Tensor:
    """`[size, ...]` -> sum over ranks, added in rank order in float32 and rounded once: the reference for faster sums."""
    wide = torch.float32 if parts.dtype.itemsize < 4 and parts.dtype.is_floating_point else parts.dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts.dtype, copy=len(parts) == 1)


class ProcessGroupCommunicator:
    """Collectives of a torch.distributed group.

    NCCL sums in the dtype of x, in an order that depends on its algorithm, with the same result on all ranks. Over gloo every rank
    gathers all parts and adds them in rank order (`sum_of_ranks`).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self._is_nccl = group.name() == "nccl"

    def all_reduce(self, x: Tensor) -> Tensor:
        if not self._is_nccl:
            return sum_of_ranks(self._gather_parts(x))
        out = x.clone()
        dist.all_reduce(out, group=self.group)
        return out

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        parts = self._gather_parts(x)
        return parts.movedim(0, dim).reshape(*x.shape[:dim], self.size * x.shape[dim], *x.shape[dim + 1 :])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        rows = x.shape[0] // self.size
        if not self._is_nccl:
            return sum_of_ranks(self._gather_parts(x)[:, self.rank * rows : (self.rank + 1) * rows])
        out = x.new_empty(rows, *x.shape[1:])
        _reduce_scatter(out, x, group=self.group)
        return out

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, slot: int) -> None:
        """None: torch.distributed accepts any memory."""

    def fused_all_reduce_norm(self, x: Tensor, norm: NormSpec) -> None:
        """None: not fused."""

    def abort(self) -> None:
        """Nothing: `process_groups.abort_groups` aborts NCCL's groups."""

    def fault(self) -> None:
        """None: torch.distributed raises errors itself."""

    def _gather_parts(self, x: Tensor) -> Tensor:
        """Gather x of all ranks as `[size, ...]`."""
        parts = x.new_empty(self.size, *x.shape)
        _gather(parts.view(-1), x.reshape(-1), group=self.group)
        return parts
