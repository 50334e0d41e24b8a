"""Programmatic dependent launch (sm_90 and later): a kernel starts while the previous kernel runs, and waits before it reads.

The rule, which Inductor's kernels keep too: a kernel waits for the previous kernel, and only then lets the next kernel start.
So when a kernel starts, all but its direct predecessor have ended, and after its wait that one has ended too. Before its wait a
kernel may read constants (weights), and, past L1 (`.cg`), memory that its direct predecessor does not write: a recurrent state, the
rows of a step, the routing of experts.
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
    """Wait for the previous kernel. DEPENDENT 0: no effect; 1: then let the next kernel start; 2: `pdl_trigger` does that."""
    if DEPENDENT > 0:
        gdc_wait()
    if DEPENDENT == 1:
        gdc_launch_dependents()


@triton.jit
def pdl_trigger(DEPENDENT: tl.constexpr):
    """Let the next kernel start, when only stores are left here.

    Programs that start early occupy the first free multiprocessors: all of a small launch may run on a few of them while the
    others idle. A launch of one wave should therefore trigger its successor at its end.
    """
    if DEPENDENT == 2:
        gdc_launch_dependents()


@triton.jit
def pdl_prefetch(places, DEPENDENT: tl.constexpr):
    """Bring the lines at `places` into the L2 cache, before the wait; the previous kernel may write them.

    One program asks for a line: requests of hundreds for the same one delay the previous kernel.
    """
    if DEPENDENT > 0:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [places.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether `device` supports programmatic dependent launch."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(dependent: bool | int) -> dict[str, Any]:
    """Launch options of a dependent launch."""
    return {"launch_pdl": True} if dependent else {}
