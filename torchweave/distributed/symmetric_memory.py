"""Collectives over symmetric memory: the project's kernels up to measured sizes, torch.distributed beyond.

Every rank allocates the same memory and maps that of the others (`torch.distributed._symmetric_memory`: NVLink or PCIe peer access
within a machine), once, before the first CUDA graph is recorded: addresses never change. Multicast is not used. For the
synchronization between ranks see `torchweave.ops.collectives.symmetric_memory` and decision 0087.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchweave.config.options import disable_multicast
from torchweave.distributed.process_groups import TENSOR, ProcessGroupCommunicator, ProcessGroups
from torchweave.ops.collectives.all_reduce_norm import NormOutput, NormSpec
from torchweave.ops.collectives.op import Communicator, find_communicator, register_communicator
from torchweave.ops.collectives.symmetric_memory import (
    SIZES,
    can_gather,
    gather,
    kernels_can_run,
    one_shot,
    one_shot_norm,
    supports_shape,
    two_shot,
)
from torchweave.ops.kernels.collectives.workspace import PROGRAMS, SymmetricLayout, SymmetricWorkspace
from torchweave.report import Report

WAIT_SECONDS = 300.0
"""Timeout of a kernel that waits for another rank, unless the host aborts the wait before."""
_TIMED_OUT, _ABORTED = 1, 2


@dataclass(frozen=True)
class KernelSizeLimits:
    """Largest operand in bytes for each kernel; larger ones use NCCL.

    Attributes:
        slots: operands in slots, which need one synchronization; larger ones need two.
        gather: all-gather.
        one_shot: all-reduce in which every rank adds the whole operand.
        norm: one-shot all-reduce fused with the following norm.
        two_shot: all-reduce in which every rank adds a share.
        measured: file with the measurement; empty for defaults.
    """

    slots: int
    gather: int
    one_shot: int
    norm: int
    two_shot: int
    measured: str = ""

    @property
    def large(self) -> int:
        """The largest of the limits."""
        return max(self.gather, self.one_shot, self.norm, self.two_shot)


KIB, MIB = 1 << 10, 1 << 20
_DEFAULT_LIMITS = {
    2: KernelSizeLimits(512 * KIB, 512 * KIB, 512 * KIB, 512 * KIB, 32 * MIB),
    4: KernelSizeLimits(256 * KIB, 256 * KIB, 256 * KIB, 256 * KIB, 16 * MIB),
    8: KernelSizeLimits(128 * KIB, 128 * KIB, 128 * KIB, 128 * KIB, 8 * MIB),
}
"""By number of ranks. Conservative: one-shot reads `size - 1` operands over the links, NCCL's rings about two."""
_MEASURED_LIMITS: dict[tuple[str, int], KernelSizeLimits] = {
    ("NVIDIA H200", 2): KernelSizeLimits(
        4 * MIB, 64 * MIB, 64 * MIB, 64 * MIB, 64 * MIB, "bench/results/collectives-large-2x_h200_202611.md"
    ),
    ("NVIDIA H200", 4): KernelSizeLimits(
        1 * MIB, 512 * KIB, 512 * KIB, 1 * MIB, 16 * MIB, "bench/results/collectives-4x_h200_202611.json"
    ),
}
"""By GPU and number of ranks; measured with bench/kernels/collectives.py."""


def size_limits_for(gpu: str, size: int) -> KernelSizeLimits | None:
    """Limits for `size` GPUs of the given name; None if the kernels do not support that number."""
    return _MEASURED_LIMITS.get((gpu, size), _DEFAULT_LIMITS.get(size))


class SymmetricCommunicator:
    """`Communicator` of GPUs that map each other's memory; created by every rank together.

    Args:
        workspace: the symmetric memory.
        fallback: runs collectives beyond the size limits.
        status: int32 `[1]` in host memory, which the workspace's table points to.
        mapping: handle that keeps the other ranks' memory mapped.
    """

    def __init__(
        self,
        workspace: SymmetricWorkspace,
        fallback: Communicator,
        size_limits: KernelSizeLimits,
        status: Tensor,
        mapping: object = None,
    ) -> None:
        self.rank, self.size = fallback.rank, fallback.size
        self.workspace, self.size_limits = workspace, size_limits
        self._fallback, self._status, self._mapping = fallback, status.numpy(), mapping

    def all_reduce(self, x: Tensor) -> Tensor:
        if kernels_can_run(x) and x.nbytes <= self.size_limits.one_shot:
            return one_shot(self.workspace, x)
        if kernels_can_run(x) and x.nbytes <= self.size_limits.two_shot:
            return two_shot(self.workspace, x)
        return self._fallback.all_reduce(x)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        if can_gather(x, dim) and x.nbytes <= self.size_limits.gather:
            return gather(self.workspace, x, dim)
        return self._fallback.all_gather(x, dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._fallback.reduce_scatter(x)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, slot: int) -> Tensor | None:
        """See `Communicator.buffer`; None for operands beyond the size limits."""
        size = math.prod(shape) * dtype.itemsize
        workspace, size_limits = self.workspace, self.size_limits
        if not supports_shape(shape, dtype) or size > size_limits.large:
            return None
        return workspace.buffer(
            shape, dtype, workspace.slot(slot) if size <= size_limits.slots else workspace.layout.data
        )

    def fused_all_reduce_norm(self, x: Tensor, norm: NormSpec) -> NormOutput | None:
        if kernels_can_run(x) and x.nbytes <= self.size_limits.norm:
            return one_shot_norm(self.workspace, x, norm)
        return None

    def abort(self) -> None:
        """End current and later waits on this GPU because a rank has ended; results of kernels are invalid from now on."""
        self._status[0] = _ABORTED

    def fault(self) -> str | None:
        """Return the synchronization error, if any; does not access the GPU."""
        status = int(self._status[0])
        if status == _TIMED_OUT:
            return f"a kernel of rank {self.rank} gave up waiting for another rank"
        return "a rank died" if status == _ABORTED else None


def open_symmetric(
    group: dist.ProcessGroup, device: torch.device, size_limits: KernelSizeLimits, wait_seconds: float = WAIT_SECONDS
) -> SymmetricCommunicator:
    """Create the communicator of an NCCL group, collectively; allocates `layout.bytes` on each GPU.

    Raises:
        RuntimeError: the GPUs cannot map each other's memory.
    """
    fallback = ProcessGroupCommunicator(group)
    assert fallback.size in SIZES, f"{fallback.size} ranks"
    layout = SymmetricLayout(fallback.size, size_limits.slots, size_limits.large)
    # In host memory: the GPU writes a timeout there and reads whether to abort.
    status = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    handle, memory = _allocate_symmetric(layout.bytes, group, device)
    table = torch.tensor(
        [*handle.buffer_ptrs, status.data_ptr(), round(wait_seconds * 1e9)], dtype=torch.int64, device=device
    )
    counters = torch.zeros(2, max(PROGRAMS), dtype=torch.int32, device=device)
    workspace = SymmetricWorkspace(fallback.rank, layout, memory, table, counters)
    return SymmetricCommunicator(workspace, fallback, size_limits, status, handle)


def enable_symmetric_memory(process_groups: ProcessGroups, report: Report) -> None:
    """Use symmetric memory for tensor-parallel collectives if all GPUs support it; collective over all ranks."""
    if process_groups.tensor_parallel_size == 1 or not process_groups.device.startswith("cuda"):
        return
    group, device = process_groups.groups[TENSOR], torch.device(process_groups.device)
    size_limits = size_limits_for(torch.cuda.get_device_name(device), group.size())
    if size_limits is None:
        refusal = f"the kernels are built for {', '.join(map(str, SIZES))} ranks"
    else:
        refusal = "" if _all_peers_accessible(group, device) else "not every GPU can read every other's memory"
        refusal = refusal or agreed_refusal(group)
    if size_limits is None or refusal:
        report.event("symmetric_memory", used=False, reason=refusal)
        return
    communicator = open_symmetric(group, device, size_limits)
    _groups_with_symmetric_memory.add(group.group_name)
    register_communicator(TENSOR, communicator)
    report.event("symmetric_memory", used=True, bytes=communicator.workspace.layout.bytes, **asdict(size_limits))


_groups_with_symmetric_memory: set[str] = set()
"""Names of the groups that have used symmetric memory in this process. torch keeps their rendezvous state by name as well, so a
group of a later engine, which has the same name, would deadlock."""


def agreed_refusal(group: dist.ProcessGroup) -> str:
    """Why a group whose GPUs support symmetric memory cannot use it; empty if it can. The same on all ranks."""
    own = (
        "an engine over several GPUs ran in this process before"
        if group.group_name in _groups_with_symmetric_memory
        else ""
    )
    refusals = [""] * group.size()
    dist.all_gather_object(refusals, own, group=group)
    return next(filter(None, refusals), "")


def _all_peers_accessible(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether every rank's GPU can read every other's memory; the same on all ranks."""
    known = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}
    machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    own = next(uuid for uuid, index in known.items() if index == device.index)
    ranks: list[tuple[str, str]] = [("", "")] * group.size()
    dist.all_gather_object(ranks, (machine, own), group=group)
    accessible = all(
        where == machine and uuid in known and (uuid == own or torch.cuda.can_device_access_peer(device, known[uuid]))
        for where, uuid in ranks
    )
    answers = [False] * group.size()
    dist.all_gather_object(answers, accessible, group=group)
    return all(answers) and len({uuid for _, uuid in ranks}) == group.size()


def _allocate_symmetric(size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Any, Tensor]:
    """Allocate `size` zeroed bytes on every rank; returns the handle of the mapping and this rank's memory."""
    disable_multicast()
    import torch.distributed._symmetric_memory as symmetric_memory
    from torch._C._distributed_c10d import _SymmetricMemory

    # Not `symmetric_memory.empty`: a tensor from its pool may begin anywhere within the mapping.
    memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
    handle = symmetric_memory.rendezvous(memory, group.group_name)
    assert handle.buffer_ptrs[group.rank()] == memory.data_ptr(), "the mapping begins at the rank's memory"
    memory.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group=group)  # no rank signals before all signal words are zero
    return handle, memory


class FakeCommunicator(ProcessGroupCommunicator):
    """Collectives without torch.distributed: results have the right shapes, without communication."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x.new_empty(*x.shape[:dim], self.size * x.shape[dim], *x.shape[dim + 1 :])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x.new_empty(x.shape[0] // self.size, *x.shape[1:])


@contextmanager
def fake_collectives(group: str) -> Iterator[bool]:
    """Make collective ops of `group` launch only symmetric-memory kernels and skip torch.distributed in this context.

    Executed kernels would wait for other ranks. Yields whether the group uses symmetric memory: over torch.distributed alone it
    launches no kernel of this project.
    """
    original = find_communicator(group)
    if not isinstance(original, SymmetricCommunicator):
        yield False
        return
    fake = FakeCommunicator(original.rank, original.size)
    status = torch.zeros(1, dtype=torch.int32)
    register_communicator(group, SymmetricCommunicator(original.workspace, fake, original.size_limits, status))
    try:
        yield True
    finally:
        register_communicator(group, original)
