"""Deployment on Ray Serve: each replica is the server's application with its own engine.

from ray import serve
from torchweave.serving.ray_serve import app

serve.run(app("Qwen/Qwen3-8B", num_replicas=8))

Ray Serve routes requests, and starts, drains and ends replicas.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.config.validate import check_config, check_limits, config_from
from torchweave.serving.engine_client.engine_supervisor import create_replicas
from torchweave.serving.http.app import create_app

if TYPE_CHECKING:
    from ray.serve import Application

_UNSUPPORTED_OPTIONS = {
    "host": "set the address with serve.start(http_options=...)",
    "port": "set the address with serve.start(http_options=...)",
    **dict.fromkeys(("uds", "ssl_certfile", "ssl_keyfile"), "set the address with serve.start(http_options=...)"),
    "data_parallel_size": "set the number of replicas with num_replicas",
    "api_server_count": "each replica has one HTTP process",
    "restart_engine": "Ray Serve restarts a replica whose engine has failed",
}
_EXIT_DELAY_SECONDS = 0.5  # for clients to receive the engine's failure
_END_SECONDS = 10.0  # for an engine to end after the drain
_DEFAULT_BATCH = 512  # default `max_batch_size` on a GPU


def app(
    model: str, num_replicas: int | None = 1, deployment: Mapping[str, Any] | None = None, **options: Any
) -> Application:
    """Create a Ray Serve application for `serve.run`.

    A replica is ready once its engine takes requests. If its engine fails, the replica ends and Ray Serve starts another.

    Args:
        model: a folder, a hub id or a built-in model; must be available on every machine.
        num_replicas: None if `deployment` has an `autoscaling_config`.
        deployment: options of Ray Serve's deployment that override the derived ones: GPUs (one per rank, none with
            device="cpu") and CPUs of a replica, its concurrent requests, and the drain (`drain_timeout`).
        options: of the engine (`EngineConfig`) and of the server (`ServerConfig`).

    Raises:
        ValueError: Ray Serve is not installed, or an option is invalid; the message says what to do.
    """
    try:
        from ray import serve
    except ImportError:
        raise ValueError("Ray Serve is not installed; install it with: pip install 'torchweave[ray-serve]'") from None
    config, settings = _configs(model, options)

    def build() -> FastAPI:
        return replica_app(config, settings)

    ray_deployment: Any = serve.deployment(serve.ingress(build)(Replica), name="torchweave")
    overrides = dict(deployment or {})
    if num_replicas is not None:
        overrides["num_replicas"] = num_replicas
    return ray_deployment.options(**{**_deployment_options(config, settings), **overrides}).bind()


class Replica:
    """Health check for Ray Serve."""

    app: FastAPI  # set by `serve.ingress`

    async def check_health(self) -> None:
        """Raise if the engine failed, so that Ray Serve restarts the replica."""
        service = self.app.state.service
        if service.startup_error or not service.client.alive:
            raise RuntimeError(service.startup_error or service.client.failure)


def replica_app(config: EngineConfig, settings: ServerConfig) -> FastAPI:
    """Create the application of one replica, whose process ends with the engine."""
    client = create_replicas(config)

    def follow(kind: str, facts: dict[str, Any]) -> None:
        if kind == "engine_ended":
            logging.getLogger("ray.serve").error("%s The replica ends.", facts["why"])
            asyncio.get_running_loop().call_later(_EXIT_DELAY_SECONDS, os._exit, 1)

    client.listen(follow)
    return create_app(client, settings, wait=True)


def _configs(model: str, options: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """Split the options into both configs.

    Raises:
        ValueError: an option is unknown, or invalid with Ray Serve.
    """
    for name, instead in _UNSUPPORTED_OPTIONS.items():
        if name in options:
            raise ValueError(f"{name} has no effect with Ray Serve ({instead}); leave it out")
    server_names = {item.name for item in fields(ServerConfig)}
    settings = config_from(ServerConfig, {name: value for name, value in options.items() if name in server_names})
    engine_options = {name: value for name, value in options.items() if name not in server_names}
    config = config_from(EngineConfig, {"model": model, **engine_options})
    check_config(config)
    check_limits(settings, config.plugins)
    if config.executor != "local":
        raise ValueError(
            f"executor={config.executor!r} is not supported with Ray Serve, which places all ranks of a replica on one machine; "
            "leave it out"
        )
    if config.device not in ("auto", "cpu", "cuda"):
        raise ValueError(
            f"device={config.device!r} is not supported with Ray Serve, which assigns the GPUs; use cuda or cpu"
        )
    device = "cpu" if config.device == "cpu" else "cuda"  # a replica sees only the GPUs that Ray assigned
    return replace(config, device=device), settings


def _deployment_options(config: EngineConfig, settings: ServerConfig) -> dict[str, Any]:
    """Deployment options of a replica. An actor's GPUs are always on one machine."""
    ranks = config.num_ranks
    return {
        "ray_actor_options": {"num_cpus": 1 + ranks, "num_gpus": 0 if config.device == "cpu" else ranks},
        "max_ongoing_requests": settings.max_waiting_requests + (config.max_batch_size or _DEFAULT_BATCH),
        "graceful_shutdown_timeout_s": settings.drain_timeout + _END_SECONDS,
        "health_check_period_s": 2.0,
    }
