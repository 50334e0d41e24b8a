"""The command line: one argparse parser a command, with an option for every field of the dataclasses that it fills.

All spellings of an option are brought to one before argparse sees them, so that argparse's own guessing is not needed:
`--max-model-len 512`, `--max_model_len=512`, `--ignore_eos`, `--no-ignore_eos`, `-cc.debug=true`, `-O1`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from torchweave.cli.options import Option, build_config, convert, options_of, read_yaml, unknown_option
from torchweave.config.options import EngineConfig
from torchweave.config.validate import VLLM_NAMES

Config = TypeVar("Config")

# What each level turns off, laid under everything else that is asked.
OPTIMIZATION_LEVELS: dict[int, dict[str, Any]] = {
    0: {
        "torch_compile_config.enable_fullgraph": False,
        "torch_compile_config.enable_inductor": False,
        "torch_compile_config.enable_piecewise_cuda_graph": False,
        "cuda_graph_config.max_batch_size": -1,
        "cuda_graph_config.capture_mixed": False,
    },
    1: {"cuda_graph_config.max_batch_size": -1, "cuda_graph_config.capture_mixed": False},
    2: {},
    3: {
        "torch_compile_config.pass_numerics": "tolerance",
        "torch_compile_config.compile_sizes": (1, 2, 4, 8),
    },
}
# Names that users of vLLM know, and short ones.
ALIASES = {
    **VLLM_NAMES,
    "cudagraph_capture_sizes": "torch_compile_config.capture_num_tokens",
    "dump_dir": "torch_compile_config.dump_dir",
    "compile_cache": "torch_compile_config.compile_cache",
    "compile_cache_dir": "torch_compile_config.compile_cache_dir",
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
}
SHORT_PREFIX, LONG_PREFIX = "-cc.", "--torch_compile_config."


class Parser(argparse.ArgumentParser):
    """An argparse parser whose faults are `ValueError`s, so that `main` reports all faults in one way."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        self.options: dict[str, Option] = {}
        self.add_argument("--traceback", action="store_true", help="show where in the code a fault was found")

    def error(self, message: str) -> NoReturn:
        missing = message.startswith("the following arguments are required")
        raise ValueError(f"{message}; {self.format_usage().strip()}" if missing else message)

    def add_config(self, config: type, title: str, skip: Iterable[str] = ()) -> None:
        """An option for every field of a dataclass, but for those in `skip`. A name that is there already serves both."""
        group = self.add_argument_group(title)
        for name, option in options_of(config).items():
            if name in skip:
                continue
            if name in self.options:  # `seed`: of the engine and of a request; one number serves both
                assert self.options[name].hint == option.hint, f"{name} means two things"
                continue
            self.options[name] = option
            action = "append" if option.is_list else "store"
            group.add_argument(
                f"--{name}",
                dest=name,
                metavar=option.metavar,
                action=action,
                default=argparse.SUPPRESS,
                help=option.text.replace("%", "%%"),
            )

    def parse_argv(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments; a name that no option has is refused with the nearest one."""
        args, unknown = self.parse_known_args(self._options_first(normalize_argv(argv, self.options)))
        for argument in unknown:
            name = argument.partition("=")[0]
            if name.startswith("--") and name != "--":
                known = [text[2:] for action in self._actions for text in action.option_strings if text[:2] == "--"]
                raise ValueError(unknown_option(name[2:], known, "--"))
            if name.startswith("-") and name != "-":
                raise ValueError(f"unknown option {name}; text that starts with a dash goes after `--`")
        if unknown:
            raise ValueError(f"unexpected argument {unknown[0]!r}")
        args.from_file = self._read_file(args.config) if getattr(args, "config", None) else {}
        return args

    def _read_file(self, path: str) -> dict[str, Any]:
        """The options in a file, of which there may be any that the command has."""
        known = [*self.options, "model"]
        found = _resolve_aliases(read_yaml(path, known))
        for name in found:
            if name not in known:
                raise ValueError(f"config file {path}: {unknown_option(name, known)}")
        return found

    def _options_first(self, argv: Sequence[str]) -> list[str]:
        """Options with their values, then `--`, then the rest: argparse would end a list of prompts at an option."""
        actions = {text: action for action in self._actions for text in action.option_strings}
        options: list[str] = []
        rest: list[str] = []
        remaining = iter(argv)
        for argument in remaining:
            if argument == "--":
                rest.extend(remaining)
            elif argument.startswith("-") and argument != "-":
                options.append(argument)
                if argument in actions and actions[argument].nargs != 0:
                    options.extend([value] if (value := next(remaining, None)) is not None else [])
            else:
                rest.append(argument)
        return [*options, "--", *rest] if rest else options


def engine_parser(name: str, description: str, positionals: str = "MODEL") -> Parser:
    """A parser with MODEL, `--config`, `-O` and every option of the engine; `positionals` as the usage shows them."""
    usage = f"torchweave {name} {positionals} [OPTION...]"
    parser = Parser(prog=f"torchweave {name}", usage=usage, description=description)
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub id, a built-in model (demo) or shape:NAME")
    add_engine_options(parser)
    return parser


def add_engine_options(parser: Parser) -> None:
    """`--config`, `-O` and every option of the engine but the model."""
    parser.add_argument("--config", metavar="FILE", help="read options from a YAML file; the command line wins")
    parser.add_argument(
        "-O",
        dest="level",
        type=int,
        choices=sorted(OPTIMIZATION_LEVELS),
        default=2,
        help="0: no capture, no compiler, no CUDA graphs; 1: compiled pieces and piecewise CUDA graphs; 2: whole steps too; "
        "3: also passes within a tolerance, and small batches built for their size alone",
    )
    parser.add_argument("--quiet", action="store_true", help="draw no progress bars")
    parser.add_config(EngineConfig, "engine (-cc.NAME is short for --torch_compile_config.NAME)", skip=("model",))


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's config: the level, then the file, then the command line; later ones win.

    Raises:
        ValueError: see `options.build_config`.
    """
    return build_config(EngineConfig, given_options(args))


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options as far as they were given, by dotted name, not yet converted."""
    return {**OPTIMIZATION_LEVELS[args.level], **_requested_options(EngineConfig, args)}


def config_from_args(config: type[Config], args: argparse.Namespace, **defaults: Any) -> Config:
    """A dataclass from those of its options that were given, in the file or on the command line, over `defaults`."""
    return build_config(config, defaults, _requested_options(config, args))


def _requested_options(config: type, args: argparse.Namespace) -> dict[str, Any]:
    """What was asked of a dataclass: by the file, and over that on the command line."""
    known = options_of(config)
    from_file = {name: value for name, value in args.from_file.items() if name in known}
    return {**from_file, **_join_repeated(config, {name: value for name, value in vars(args).items() if name in known})}


def _join_repeated(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options that may be repeated, as argparse collected them: `--stop a --stop b`, `--sizes 1,2 --sizes 4`."""
    known = options_of(config)
    joined: dict[str, Any] = {}
    for name, value in given.items():
        if known[name].is_list and isinstance(value, list):
            parts = [convert(known[name].hint, item, name) for item in value]
            single = parts[0] if len(parts) == 1 else None
            value = single if len(parts) == 1 else [item for part in parts for item in _as_items(part)]
        joined[name] = value
    return joined


def _as_items(part: Any) -> Sequence[Any]:
    return part if isinstance(part, tuple) else () if part is None else (part,)


def _resolve_aliases(source: Mapping[str, Any]) -> dict[str, Any]:
    return {ALIASES.get(name.rsplit(".", 1)[-1], name): value for name, value in source.items()}


def normalize_argv(argv: Sequence[str], options: Mapping[str, Option]) -> list[str]:
    """`argv` with every option in one spelling, and a value with every flag. What follows `--` is left as it is."""
    found: list[str] = []
    index = 0
    while index < len(argv):
        argument = argv[index]
        index += 1
        if argument == "--":
            return [*found, argument, *argv[index:]]
        if argument.startswith(SHORT_PREFIX):
            argument = LONG_PREFIX + argument[len(SHORT_PREFIX) :]
        if not argument.startswith("--"):
            found.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = _canonical_name(name.replace("-", "_"), options)
        if name in options and options[name].is_flag and not equals:
            following = argv[index].lower() if index < len(argv) else ""
            takes = following in ("true", "false")
            index += takes
            name, equals, value = name, "=", following if takes else "true"
        negated = _canonical_name(_strip_negation(name), options)
        if not equals and negated in options and options[negated].is_flag:
            name, equals, value = negated, "=", "false"
        found.append(f"--{name}{equals}{value}")
    return found


def _canonical_name(name: str, options: Mapping[str, Option]) -> str:
    """The option's own name, where `name` is another one for it."""
    other = ALIASES.get(name.rsplit(".", 1)[-1], name)
    return other if other in options else name


def _strip_negation(name: str) -> str:
    """`no_x.y` and `x.no_y` as `x.y`."""
    head, dot, leaf = name.rpartition(".")
    return head + dot + leaf.removeprefix("no_") if leaf.startswith("no_") else name.removeprefix("no_")
