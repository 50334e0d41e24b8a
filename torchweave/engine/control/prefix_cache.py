"""Forget the KV cache of earlier requests, when it would be wrong: after new weights, say."""

from __future__ import annotations

from torchweave.engine.control.host import Host


def reset_prefix_cache(host: Host) -> bool:
    """Forget the KV cache of earlier requests; returns False, and changes nothing, while requests run or wait to continue."""
    host.drain()
    scheduler = host.scheduler
    if scheduler.num_active - scheduler.num_waiting + scheduler.num_paused or scheduler.kv.num_used:
        return False
    scheduler.kv.reset()
    return True
