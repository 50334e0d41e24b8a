"""`torchweave serve MODEL`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torchweave
from torchweave.cli.arguments import COMMON_SERVER_OPTIONS, Parser, config_from_args, engine_config, engine_parser
from torchweave.cli.output import print_advice
from torchweave.config.model_source import local_source
from torchweave.config.options import ServerConfig
from torchweave.config.validate import check_config, check_server
from torchweave.report import progress_bars

if TYPE_CHECKING:
    from torchweave.serving.engine_client.replicas import Replicas
    from torchweave.serving.server import Server

_REQUIRED_PACKAGES = ("fastapi", "uvicorn", "msgspec")
DESCRIPTION = """Serve a model over an OpenAI-compatible HTTP API. GET /ready reports start-up progress and returns 200 once the
server accepts requests. Ctrl-C or SIGTERM rejects new requests, finishes running ones and exits; a second one exits at once."""


def parser() -> Parser:
    cli_parser = engine_parser("serve", DESCRIPTION)
    cli_parser.add_config(ServerConfig, "server", common=COMMON_SERVER_OPTIONS)
    return cli_parser


def run(argv: Sequence[str]) -> int:
    args = parser().parse_argv(argv)
    config, settings = engine_config(args), config_from_args(ServerConfig, args)
    print_advice(args.advice)
    check_config(config)
    local_source(config.model, config.revision)
    check_server(config, settings)
    if config.executor == "torchrun":
        raise ValueError(
            "executor=torchrun is for scripts that every rank runs; `torchweave serve` starts its ranks itself: remove it"
        )
    missing = [name for name in _REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(f"serve needs {', '.join(missing)}; install them with: pip install 'torchweave[serve]'")
    from torchweave.engine.startup.early_start import stored_bytecode

    with stored_bytecode(config):
        from torchweave.serving.server import Server

        begin = time.monotonic()
        server = Server(config, settings, lambda server: _print_ready(server, time.monotonic() - begin, stop_bars))
        server.client.listen(_print_engine_ended)
        with _bars(server.client, args) as stop_bars:
            code = server.run()
    if code:
        print(f"torchweave: {server.failure}", file=sys.stderr)
    return code


def _print_ready(server: Server, seconds: float, stop_bars: Any) -> None:
    stop_bars()
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    name, count = server.service.names[0], len(server.client.engines)
    by = f" by {count} replicas" if count > 1 else ""
    print(f"Torchweave {torchweave.__version__} serves {bold}{name}{plain}{by} at {bold}{server.url}{plain}", end="")
    print(f" (ready after {seconds:.1f} s; Ctrl-C to stop)", flush=True)


def _print_engine_ended(kind: str, facts: dict[str, Any]) -> None:
    """Report an engine that ended while the server continues."""
    if kind == "engine_ended" and (facts["restarts"] or "replica" in facts):
        replica = f"Replica {facts['replica']}: " if "replica" in facts else ""
        action = " Restarting it." if facts["restarts"] else ""
        print(f"torchweave: {replica}{facts['why']}{action}", file=sys.stderr, flush=True)


@contextmanager
def _bars(client: Replicas, args: argparse.Namespace) -> Iterator[Any]:
    """Show the engine's start-up progress on a terminal; yields the function that stops it."""
    if args.quiet or not sys.stderr.isatty():
        yield lambda: None
        return
    bars = progress_bars()
    tasks: dict[str, Any] = {}

    def draw(kind: str, facts: dict[str, Any]) -> None:
        if kind != "progress":
            return
        title = f"replica {facts['replica']}: {facts['title']}" if "replica" in facts else str(facts["title"])
        if title not in tasks:
            tasks[title] = bars.add_task(title, total=facts["total"], note="")
        bars.update(tasks[title], completed=facts["done"], note=facts["note"])

    client.listen(draw)
    with bars:
        yield bars.stop
