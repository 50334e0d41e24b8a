"""The control calls by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torchweave.engine.control import adapters, apply, pause, prefix_cache, profile
from torchweave.engine.control.errors import ControlError
from torchweave.engine.control.host import Host


class ControlCall(NamedTuple):
    """Handlers of a control call; at least one is given.

    Attributes:
        host: `(Host, **arguments) -> result`, or a generator that yields until it can return the result. It may call the ranks
            (`Host.on_ranks`). None: every rank is called with the arguments, and the result is a list by rank.
        rank: `(Rank, **arguments) -> result`; arguments and result can be pickled.
    """

    host: Callable[..., Any] | None = None
    rank: Callable[..., Any] | None = None


CALLS: dict[str, ControlCall] = {
    "adapter_refusal": ControlCall(rank=adapters.refusal_on_rank),
    "drop_adapters": ControlCall(rank=adapters.drop_on_rank),
    "apply_model": ControlCall(rank=apply.apply_model),
    "collective_rpc": ControlCall(rank=apply.collective_rpc),
    "is_paused": ControlCall(pause.is_paused),
    "list_adapters": ControlCall(adapters.list_adapters),
    "load_adapter": ControlCall(adapters.load_adapter, adapters.load_on_rank),
    "pause": ControlCall(pause.pause),
    "reset_prefix_cache": ControlCall(prefix_cache.reset_prefix_cache),
    "resume": ControlCall(pause.resume),
    "start_profile": ControlCall(profile.start_profile, profile.start_on_rank),
    "stop_profile": ControlCall(profile.stop_profile, profile.stop_on_rank),
    "unload_adapter": ControlCall(adapters.unload_adapter),
}


def invoke(host: Host, name: str, arguments: dict[str, Any]) -> Any:
    """Run a control call on the loop's thread; returns what its handler returns.

    Raises:
        ControlError: the call does not exist, or has no such arguments; see also the handler.
    """
    call = CALLS.get(name)
    if call is None:
        raise ControlError(f"There is no control call {name!r}; there are {', '.join(CALLS)}.", "invalid")
    handler = call.host or call.rank
    assert handler is not None, f"{name} has no handler"
    parameters = inspect.signature(handler).parameters.values()
    known = [parameter.name for parameter in parameters][1:]  # the first one is the host or the rank
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty][1:]
    if (wrong := [*(set(arguments) - set(known)), *(set(needed) - set(arguments))]) and not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
    ):
        raise ControlError(
            f"The control call {name} takes {', '.join(known) or 'no arguments'}; see {wrong[0]!r}.", "invalid"
        )
    return host.on_ranks(name, **arguments) if call.host is None else call.host(host, **arguments)
