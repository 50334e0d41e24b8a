"""`EngineArgs`: options of an engine as an object, for scripts that pass them on or read them from a command line."""

from __future__ import annotations

import argparse
from dataclasses import field, fields, make_dataclass
from typing import Any

from torchweave.config.options import EngineConfig
from torchweave.config.other_options import ENGINE, SHORT, parse
from torchweave.config.validate import VLLM_NAMES

_NAMES = {
    *(item.name for item in fields(EngineConfig)),
    *(name for name in ENGINE if "." not in name),
    *VLLM_NAMES,
    "enforce_eager",
    "compilation_config",
    "optimization_level",
} - {"model"}  # fmt: skip
_FLAGS = {item.name for item in fields(EngineConfig) if item.type == "bool"} | {
    "enforce_eager",
    "enable_chunked_prefill",
}
_Options: Any = make_dataclass(
    "_Options", [("model", Any, field(default=None)), *((name, Any, field(default=None)) for name in sorted(_NAMES))]
)


class EngineArgs(_Options):
    """Options of `LLM` under their own or vLLM's names, as attributes; None: not set.

    `LLM(**asdict(args))` and `LLM(**vars(args))` create an engine from them.
    """

    def given(self) -> dict[str, Any]:
        """The options that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add an option for every attribute: `--max-model-len 4k`, `--enforce-eager`, `-tp 2`; mappings in JSON."""
        short: dict[str, str] = {own: spelling for spelling, own in SHORT.items()}
        for name in ("model", *sorted(_NAMES)):
            spellings = [f"--{name.replace('_', '-')}", *([short[name]] if name in short else [])]
            if name in _FLAGS or (name in ENGINE and not ENGINE[name].takes_value):
                parser.add_argument(*spellings, action=argparse.BooleanOptionalAction, default=None)
            else:
                parser.add_argument(*spellings, type=parse if name != "model" else str, default=None)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """The options among parsed arguments."""
        return cls(**{name: getattr(args, name) for name in ("model", *_NAMES) if hasattr(args, name)})
