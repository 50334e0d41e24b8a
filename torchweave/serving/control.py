"""Control calls of the server: in all engines, then in all HTTP processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchweave.serving.service import Service

HttpHandler = Callable[[Service, dict[str, Any], Sequence[Any]], None]
"""`(service, arguments, results by engine)`, what a call changes in an HTTP process."""


def _clear_prefixes(service: Service, arguments: dict[str, Any], results: Sequence[Any]) -> None:
    """The load balancer forgets what the engines have forgotten."""
    service.client.clear_prefixes([number for number, is_empty in enumerate(results) if is_empty])


def _add_adapter(service: Service, arguments: dict[str, Any], results: Sequence[Any]) -> None:
    """Requests may name the adapter as their model."""
    service.adapters[arguments["adapter"]] = arguments["path"]


def _remove_adapter(service: Service, arguments: dict[str, Any], results: Sequence[Any]) -> None:
    service.adapters.pop(arguments["adapter"], None)


HANDLERS: dict[str, HttpHandler] = {
    "load_adapter": _add_adapter,
    "pause": _clear_prefixes,
    "reset_prefix_cache": _clear_prefixes,
    "unload_adapter": _remove_adapter,
}
"""Handlers of HTTP processes by the names of their calls; the other calls have none."""


async def call(service: Service, name: str, **arguments: Any) -> list[Any]:
    """Run a control call; returns the results by engine.

    Raises:
        ControlError: the call failed in an engine or an HTTP process, which the message names if there are several.
        EngineUnavailable: the only engine is not ready.
    """
    results = await service.client.call(name, arguments)
    if (handler := HANDLERS.get(name)) is not None:
        handler(service, arguments, results)
        await service.call_other_frontends(name, arguments, results)
    return results
