"""Memory that all ranks of a group see, as the kernels over it use it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchweave.ops.collectives.all_reduce_norm import NormOutput, NormSpec, empty_norm_output
from torchweave.ops.kernels.collectives.workspace import SymmetricWorkspace

SIZES = (2, 4, 8)
"""Ranks that the kernels are built for."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def kernels_can_run(x: Tensor) -> bool:
    """Whether the kernels can read x: contiguous, of a dtype that they know, in whole 16 bytes."""
    return supports_shape(x.shape, x.dtype) and x.is_contiguous() and x.data_ptr() % 16 == 0


def supports_shape(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether the kernels can read rows of that shape."""
    return dtype in DTYPES and len(shape) > 0 and 0 not in shape and shape[-1] * dtype.itemsize % 16 == 0


def one_shot(workspace: SymmetricWorkspace, x: Tensor) -> Tensor:
    """The sum of x over ranks: every rank reads all of it."""
    from torchweave.ops.kernels.collectives.all_reduce import launch_one_shot

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_one_shot(workspace, x, out, workspace.locate_operand(x))
    return out


def can_gather(x: Tensor, dim: int) -> bool:
    """Whether the kernel can move x: what follows `dim` is contiguous, in whole 16 bytes."""
    inner = math.prod(x.shape[dim:]) * x.dtype.itemsize
    return x.numel() > 0 and x.is_contiguous() and inner % 16 == 0 and x.data_ptr() % 16 == 0


def gather(workspace: SymmetricWorkspace, x: Tensor, dim: int) -> Tensor:
    """x of all ranks one after the other along `dim`."""
    from torchweave.ops.kernels.collectives.all_reduce import launch_gather

    size = workspace.layout.size
    out = torch.empty((*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :]), dtype=x.dtype, device=x.device)
    inner = math.prod(x.shape[dim:]) * x.dtype.itemsize // 4
    launch_gather(workspace, x.view(-1).view(torch.int32), out.view(-1).view(torch.int32), inner)
    return out


def two_shot(workspace: SymmetricWorkspace, x: Tensor) -> Tensor:
    """The sum of x over ranks: every rank adds its share, then all gather the shares."""
    from torchweave.ops.kernels.collectives.all_reduce import launch_two_shot

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_two_shot(workspace, x, out, workspace.locate_in_data(x))
    return out


def one_shot_norm(workspace: SymmetricWorkspace, x: Tensor, norm: NormSpec) -> NormOutput:
    """The sum of x over ranks and what follows it, in one launch."""
    from torchweave.ops.kernels.collectives.all_reduce_norm import launch_one_shot_norm

    out = empty_norm_output(x, norm)
    launch_one_shot_norm(workspace, x, contiguous(norm), out, workspace.locate_operand(x))
    return out


def contiguous(norm: NormSpec) -> NormSpec:
    """The same with a residual whose rows lie behind each other."""
    if norm.residual is None or norm.residual.is_contiguous():
        return norm
    return replace(norm, residual=norm.residual.contiguous())
