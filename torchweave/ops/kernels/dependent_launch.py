"""Programmatic dependent launch (sm_90 and later): a kernel starts while the one before it runs, and waits before it reads.

The rule, which Inductor's kernels keep too: a kernel waits for the one before it, and only then lets the one behind it start. So
when a kernel starts, all but its direct predecessor have ended, and when it has waited, that one has as well. Before its wait a
kernel may touch constants only: weights, and nothing that any kernel of the step writes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pdl_wait(DEPENDENT: tl.constexpr):
    """Wait for the kernel before. DEPENDENT 0: nothing of this; 1: then let the one behind start; 2: `pdl_trigger` will."""
    if DEPENDENT > 0:
        gdc_wait()
    if DEPENDENT == 1:
        gdc_launch_dependents()


@triton.jit
def pdl_trigger(DEPENDENT: tl.constexpr):
    """Let the kernel behind start, when all that is left here is to store.

    Programs that start early take the places that become free first: all of a small launch may end up on a few multiprocessors,
    and the others idle. Where a launch is one wave, its predecessor had better let it start at its end.
    """
    if DEPENDENT == 2:
        gdc_launch_dependents()


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched so."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(dependent: bool | int) -> dict[str, Any]:
    """What a launch is given besides its arguments."""
    return {"launch_pdl": True} if dependent else {}
