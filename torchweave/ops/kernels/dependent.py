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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def enter():
    """Wait for the kernel before, then let the one behind start."""
    gdc_wait()
    gdc_launch_dependents()


@functools.cache
def takes_part(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched so."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def options(dependent: bool | int) -> dict[str, Any]:
    """What a launch is given besides its arguments."""
    return {"launch_pdl": True} if dependent else {}
