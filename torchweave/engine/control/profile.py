"""Traces of steps by torch's profiler, a file for each rank."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path

import torch

from torchweave.engine.control.errors import ControlError
from torchweave.engine.control.host import Host
from torchweave.engine.control.rank import Rank


def start_profile(host: Host, folder: str | None, num_steps: int | None = None) -> None:
    """Record what every rank runs, until `stop_profile` or for `num_steps` steps.

    Args:
        folder: for the traces; it is created if it does not exist. None: profiles are not enabled.

    Raises:
        ValueError: an argument is invalid.
        ControlError: a profile runs already, or a rank cannot write to the folder.
    """
    if folder is None:
        raise ValueError("Profiles are not enabled; set profile_dir to a folder for their traces.")
    if num_steps is not None and (not isinstance(num_steps, int) or isinstance(num_steps, bool) or num_steps < 1):
        raise ValueError(f"num_steps={num_steps!r} must be a whole number, at least 1")
    if "profile" in host.state:
        raise ControlError("A profile runs already; stop it first.", "conflict")
    try:
        host.on_ranks("start_profile", folder=folder)
    except ControlError:
        host.on_ranks("stop_profile", save=False)  # on the ranks where it started
        raise
    host.state.pop("traces", None)
    host.state["profile"] = this_profile = object()
    if num_steps is not None:
        host.run_later(_stop_after(host, this_profile, host.num_launched + num_steps))


def _stop_after(host: Host, profile: object, end: int) -> Generator[None, None, None]:
    while host.num_launched < end:
        yield
        if host.state.get("profile") is not profile:
            return
    host.state["traces"] = stop_profile(host)


def stop_profile(host: Host) -> list[str]:
    """End a profile and write its traces; returns their files by rank. One that has ended by itself is returned once.

    Raises:
        ControlError: no profile was started, or a rank could not write its trace.
    """
    if (traces := host.state.pop("traces", None)) is not None:
        return traces
    if host.state.pop("profile", None) is None:
        raise ControlError("No profile runs; start one first.", "conflict")
    return host.on_ranks("stop_profile")


def start_on_rank(rank: Rank, folder: str) -> None:
    """Begin to record on this rank."""
    Path(folder).expanduser().mkdir(parents=True, exist_ok=True)
    profiler = torch.profiler.profile()  # of the CPU, and of the GPU if there is one
    profiler.start()
    path = Path(folder).expanduser() / f"rank{rank.number}.{os.getpid()}.{time.time_ns()}.pt.trace.json.gz"
    rank.state["profile"] = profiler, path


def stop_on_rank(rank: Rank, save: bool = True) -> str | None:
    """End the record of this rank, if there is one, and write it to its file, whose path is returned."""
    profiler, path = rank.state.pop("profile", (None, None))
    if profiler is None:
        return None
    profiler.stop()
    if save:
        profiler.export_chrome_trace(str(path))
    return str(path)
