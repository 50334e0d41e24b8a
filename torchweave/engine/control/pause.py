"""Pause the engine, to change its weights, say: new requests wait, and running ones end or stay where they are."""

from __future__ import annotations

from collections.abc import Generator
from typing import get_args

from torchweave.engine.control.errors import ControlError
from torchweave.engine.control.host import Host, PauseMode
from torchweave.engine.control.prefix_cache import reset_prefix_cache


def pause(host: Host, mode: PauseMode = "abort", clear_cache: bool = True) -> Generator[None, None, bool]:
    """Start no new request until `resume`; returns whether the prefix cache was cleared.

    Args:
        mode: what happens to the requests that run. wait: they finish. abort: they and those that wait end with the reason
            `cancelled`. keep: they stay where they are, and continue after `resume` with the tokens that they would have had.
        clear_cache: forget the prefix cache, except with keep, whose requests use it.

    Raises:
        ValueError: the mode does not exist.
        ControlError: another `pause` or `resume` came before the requests had finished.
    """
    if mode not in get_args(PauseMode):
        raise ValueError(f"mode={mode!r} is not known: it is {', '.join(get_args(PauseMode))}")
    if not isinstance(clear_cache, bool):
        raise ValueError(f"clear_cache={clear_cache!r} must be True or False")
    scheduler = host.scheduler
    host.pause_mode = mode
    host.state["pause"] = this_pause = object()
    scheduler.admit_new(False)
    if mode == "abort":
        host.drain()  # so that all have their final response when this call returns
        host.send([response for request_id in scheduler.request_ids for response in scheduler.cancel(request_id)])
    while mode == "wait" and scheduler.num_active - scheduler.num_waiting + scheduler.num_paused:
        yield
        if host.state.get("pause") is not this_pause:
            raise ControlError("Another pause or resume came before the running requests had finished.", "conflict")
    host.drain()
    return clear_cache and mode != "keep" and reset_prefix_cache(host)


def resume(host: Host) -> None:
    """Continue after `pause`; without one, nothing changes."""
    host.pause_mode = None
    host.state.pop("pause", None)
    host.scheduler.admit_new(True)


def is_paused(host: Host) -> bool:
    """Whether new requests wait, from the beginning of `pause` on."""
    return host.pause_mode is not None
