"""Replicas kept by Ray Serve, on one machine or on many: each is a server's application with an engine of its own.

from ray import serve
from torchweave.serving.ray_serve import app

serve.run(app("Qwen/Qwen3-8B", num_replicas=8))

Ray Serve's proxy takes the requests, starts and ends replicas, and drains those that it ends; nothing of that is done here.
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
from torchweave.config.validate import check_limits, check_names, check_value_ranges, config_from
from torchweave.serving.engine_client.engine_supervisor import create_replicas
from torchweave.serving.http.app import create_app

if TYPE_CHECKING:
    from ray.serve import Application

_UNSUPPORTED_OPTIONS = {
    "host": "serve.start(http_options=...) says where Ray Serve listens",
    "port": "serve.start(http_options=...) says where Ray Serve listens",
    "data_parallel_size": "num_replicas says how many replicas there are",
    "api_server_count": "each replica has the HTTP process that Ray Serve gives it",
    "restart_engine": "Ray Serve starts a replica anew whose engine has failed",
}
_EXIT_DELAY_SECONDS = 0.5  # for those who ask to hear that the engine has failed
_END_SECONDS = 10.0  # for an engine to end, behind the drain
_DEFAULT_BATCH = 512  # requests of a step on a GPU, where `max_batch_size` says nothing


def app(
    model: str, num_replicas: int | None = 1, deployment: Mapping[str, Any] | None = None, **options: Any
) -> Application:
    """A Ray Serve application, to be given to `serve.run`.

    A replica is ready once its engine takes requests. One whose engine fails ends, and Ray Serve starts another.

    Args:
        model: a folder, a hub id or a built-in model, that every machine finds under this name.
        num_replicas: None where `deployment` brings an `autoscaling_config`.
        deployment: options of Ray Serve's deployment, over those that are derived: GPUs (one for each rank, none with
            device="cpu") and CPUs of a replica, requests that it is given at once, and the drain (`drain_timeout`).
        options: of the engine (`EngineConfig`) and of the server (`ServerConfig`).

    Raises:
        ValueError: Ray Serve is not installed, or an option cannot be; one sentence says why and what to do.
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
    """What Ray Serve asks of a replica, beside its application."""

    app: FastAPI  # of the class that Ray Serve makes of this one

    async def check_health(self) -> None:
        """Raises, with the reason, where the engine could not start or is gone, so that Ray Serve starts the replica anew."""
        service = self.app.state.service
        if service.startup_error or not service.client.alive:
            raise RuntimeError(service.startup_error or service.client.failure)


def replica_app(config: EngineConfig, settings: ServerConfig) -> FastAPI:
    """The application of one replica, in its process, which ends with the engine."""
    client = create_replicas(config)

    def follow(kind: str, facts: dict[str, Any]) -> None:
        if kind == "engine_ended":
            logging.getLogger("ray.serve").error("%s The replica ends.", facts["why"])
            asyncio.get_running_loop().call_later(_EXIT_DELAY_SECONDS, os._exit, 1)

    client.listen(follow)
    return create_app(client, settings, wait=True)


def _configs(model: str, options: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """Both configs, from options that are told apart by name.

    Raises:
        ValueError: one is unknown, or cannot be here.
    """
    for name, instead in _UNSUPPORTED_OPTIONS.items():
        if name in options:
            raise ValueError(f"{name} has no effect behind Ray Serve: {instead}; leave it out")
    of_server = {item.name for item in fields(ServerConfig)}
    settings = config_from(ServerConfig, {name: value for name, value in options.items() if name in of_server})
    others = {name: value for name, value in options.items() if name not in of_server}
    config = config_from(EngineConfig, {"model": model, **others})
    check_names(config, None)
    check_value_ranges(config)
    check_limits(settings)
    if config.executor != "local":
        raise ValueError(
            f"executor={config.executor!r} cannot be had behind Ray Serve: all ranks of a replica are on the machine where Ray "
            "Serve puts it; leave it out"
        )
    if config.device not in ("auto", "cpu", "cuda"):
        raise ValueError(
            f"device={config.device!r} cannot be had behind Ray Serve, which gives out GPUs; use cuda or cpu"
        )
    device = "cpu" if config.device == "cpu" else "cuda"  # a replica sees the GPUs that Ray gave to it, and no others
    return replace(config, device=device), settings


def _deployment_options(config: EngineConfig, settings: ServerConfig) -> dict[str, Any]:
    """What a replica needs, as options of its deployment. An actor's GPUs are always on one machine."""
    ranks = config.num_ranks
    needed = {"num_cpus": 1 + ranks, "num_gpus": 0 if config.device == "cpu" else ranks}
    return {
        "ray_actor_options": needed,
        "max_ongoing_requests": settings.max_waiting_requests + (config.max_batch_size or _DEFAULT_BATCH),
        "graceful_shutdown_timeout_s": settings.drain_timeout + _END_SECONDS,
        "health_check_period_s": 2.0,
    }
