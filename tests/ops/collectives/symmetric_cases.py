"""Several ranks in one process, with adjacent memory."""

from __future__ import annotations

import torch

from torchweave.ops.kernels.collectives.workspace import PROGRAMS, SymmetricLayout, SymmetricWorkspace


def workspaces(layout: SymmetricLayout) -> list[SymmetricWorkspace]:
    """The ranks' views of memory filled with NaN, so that reads of unwritten memory show."""
    memories = [torch.full((layout.bytes,), 255, dtype=torch.uint8) for _ in range(layout.size)]
    table = torch.tensor([memory.data_ptr() for memory in memories] + [0, 0])
    return [
        SymmetricWorkspace(rank, layout, memory, table, torch.zeros(2, max(PROGRAMS), dtype=torch.int32))
        for rank, memory in enumerate(memories)
    ]
