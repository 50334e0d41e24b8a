"""`torchweave COMMAND ...`: run a command; report an error in one sentence with exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

import torchweave
from torchweave.config.options import use_passive_openmp
from torchweave.utils.suggest import did_you_mean

# Each command is `run(argv) -> exit code` of a module in cli/commands, imported on use.
COMMANDS = {
    "generate": "complete prompts from the arguments or standard input",
    "chat": "chat with a model",
    "serve": "serve a model over an OpenAI-compatible HTTP API",
    "explain": "show effective options with reasons, passes, pieces, CUDA graphs and memory",
    "doctor": "find obstacles to capturing a model or module as one fast graph, with fixes",
    "models": "list built-in models and supported architectures, or verify them against transformers",
    "cache": "manage the compile cache: list, inspect, verify, prune, export, import",
    "tune": "measure kernel candidates for a model on this machine and keep the results",
    "collect-env": "show versions, processors and GPUs of this machine, for a report of a fault",
    "bench": "measure latency, throughput, start-up and host time",
}
FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 (a check or a rank failed), 2 (invalid usage), 130 (interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    use_passive_openmp()  # also for processes that the command starts
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of standard output is gone; keep the interpreter from flushing into the pipe
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
    """Whether another rank ended; the message suffices then, a traceback of this process misleads."""
    from torchweave.distributed.worker_group import RankFailure  # slow import, needed for errors only

    return isinstance(error, RankFailure) or isinstance(error.__cause__, RankFailure)


def _open_streams() -> None:
    """Replace closed standard streams, whose file numbers the next opened file would take; escape unencodable output."""
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
    return import_module(f"torchweave.cli.commands.{name.replace('-', '_')}").run(rest)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name.ljust(width)}  {text}" for name, text in COMMANDS.items())
    hint = "`torchweave COMMAND --help` lists common options, `--help-all` all."
    return f"usage: torchweave COMMAND [OPTION...]\n\n{lines}\n\n{hint}"


def _one_line(error: BaseException) -> str:
    """The message as one line."""
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
