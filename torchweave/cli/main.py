"""`torchweave COMMAND ...`: find the command, run it, and tell of a fault in one sentence with exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

import torchweave
from torchweave.utils.suggest import did_you_mean

# Each command is the `run(argv) -> exit code` of a module here, imported only when it is asked for.
COMMANDS = {
    "generate": "answer prompts, from the arguments or from standard input",
    "chat": "talk with a model",
    "serve": "serve a model over HTTP, as OpenAI's API does",
    "explain": "show what is effective and why: options, pieces, passes, graphs, memory",
    "doctor": "find what keeps a model or a module from being one fast graph, with the fix",
    "models": "list built-in models and supported architectures, or verify them against transformers",
    "cache": "look after the compile cache: list, inspect, verify, prune, export, import",
    "tune": "measure on this machine what runs a model best, and keep it",
    "bench": "measure latency, throughput, start-up and host time",
}
FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 (a check or a rank failed), 2 (a fault in what was asked), 130 (interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone; keep the interpreter from flushing into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:
        if "--traceback" in arguments:
            raise
        print(f"torchweave: {_one_line(error)}", file=sys.stderr)
        return USAGE_ERROR
    except RuntimeError as error:
        if "--traceback" in arguments or not _is_rank_failure(error):
            raise
        print(f"torchweave: {_one_line(error)}", file=sys.stderr)
        return FAILED


def _is_rank_failure(error: RuntimeError) -> bool:
    """Whether another process of the engine ended, which its sentence says, and not where this one was at that moment."""
    from torchweave.distributed.worker_group import RankFailure  # with what it imports, for a fault alone

    return isinstance(error, RankFailure) or isinstance(error.__cause__, RankFailure)


def _open_streams() -> None:
    """Streams that can be used: one that was closed when we were started is none to Python, and its number would be given to the
    next file; and where a locale has not all characters, those that it has not are escaped, as Python does it for errors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"torchweave {torchweave.__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, f"it is one of {', '.join(COMMANDS)}")
        raise ValueError(f"unknown command {name!r}; {hint}")
    return import_module(f"torchweave.cli.commands.{name}").run(rest)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name.ljust(width)}  {text}" for name, text in COMMANDS.items())
    return f"usage: torchweave COMMAND [OPTION...]\n\n{lines}\n\n`torchweave COMMAND --help` lists the options of a command."


def _one_line(error: BaseException) -> str:
    """The message as one line."""
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
