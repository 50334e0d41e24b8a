"""Forget the KV cache of earlier requests, when it would be wrong: after new weights, say."""

from __future__ import annotations

from torchweave.engine.control.host import Host


def reset_prefix_cache(host: Host, reset_running_requests: bool = False) -> bool:
    """Forget the KV cache of earlier requests; returns False, and changes nothing, while requests run.

    Args:
        reset_running_requests: the running requests forget theirs too, and compute it again from their tokens.

    Raises:
        ValueError: the argument is not True or False.
    """
    if not isinstance(reset_running_requests, bool):
        raise ValueError(f"reset_running_requests={reset_running_requests!r} must be True or False")
    host.drain()
    scheduler = host.scheduler
    if reset_running_requests:
        scheduler.pause_running()
    if scheduler.num_active > scheduler.num_waiting or scheduler.kv.num_used:
        return False
    scheduler.kv.reset()
    return True
