"""Command-line parsers: an option for every field of the dataclasses that a command fills.

Spellings of an option are normalized before argparse parses them (`torchweave.cli.spellings`).
`--help` shows common options, `--help-all` all of them.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from torchweave.cli.options import Option, build_config, convert, options_of, read_yaml, unknown_option
from torchweave.cli.spellings import ALIASES, normalize_argv, take_other_options
from torchweave.config.options import EngineConfig, set_hub_token, vllm_variables
from torchweave.config.other_options import ALL, own_value, read_variables, translate
from torchweave.config.peer_options import OPTIMIZATION_LEVELS, options_of_file

Config = TypeVar("Config")

ENGINE_GROUPS = {
    "model": (
        "dtype", "quantization", "max_model_len", "device", "load_format", "ignore_unused_weights", "trust_remote_code",
        "tokenizer", "revision", "download_dir", "hf_overrides", "generation_config", "override_generation_config",
        "attention_backend", "max_logprobs", "seed", "profile_dir", "limit_mm_per_prompt.image",
        "runner", "pooler_config.pooling_type", "pooler_config.normalize", "logits_processors", "plugins",
    ),
    "parallelism": (
        "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "executor", "rank_timeout",
        "symmetric_memory",
    ),
    "adapters": ("enable_lora", "max_loras", "max_lora_rank", "lora_modules"),
    "memory": (
        "gpu_memory_utilization", "cpu_kv_cache_gib", "kv_cache_memory_bytes", "kv_cache_dtype",
        "enable_prefix_caching", "num_state_snapshots",
        "kv_offload_gb", "block_size", "num_kv_blocks",
    ),
    "scheduling": (
        "max_batch_size", "max_num_tokens", "enable_chunked_context", "mixed_step_tokens", "capacity_scheduler_policy",
        "scheduling_policy", "context_chunking_policy", "batch_wait_timeout_iters", "batch_wait_max_tokens_ratio", "run_ahead",
    ),
    "compile (-cc.NAME is short for --torch_compile_config.NAME)": tuple(
        name for name in options_of(EngineConfig) if name.startswith("torch_compile_config.")
    ),
    "CUDA graphs": tuple(name for name in options_of(EngineConfig) if name.startswith("cuda_graph_config.")),
    "speculation": tuple(name for name in options_of(EngineConfig) if name.startswith("speculative_config.")),
}  # fmt: skip
"""Every option of the engine but the model, by the group under which help and docs/reference/options.md list it."""
COMMON_ENGINE_OPTIONS = frozenset(
    {
        "dtype", "quantization", "max_model_len", "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization",
        "cpu_kv_cache_gib", "kv_cache_dtype", "max_batch_size", "max_num_tokens", "torch_compile_config.compile_cache_dir",
        "torch_compile_config.dump_dir", "cuda_graph_config.max_batch_size",
    }
)  # fmt: skip
"""Options that `--help` shows; `--help-all` shows every option."""
COMMON_SERVER_OPTIONS = frozenset(
    {"host", "port", "served_model_name", "api_key", "api_key_file", "tool_call_parser", "data_parallel_size"}
)
COMMON_SAMPLING_OPTIONS = frozenset(
    {"n", "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop", "logprobs"}
)


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises `ValueError` on errors and has a short and a full help."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            add_help=False, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs
        )
        self.options: dict[str, Option] = {}
        self._advanced: set[str] = set()  # options that only --help-all shows
        self._last_groups: list[argparse._ArgumentGroup] = []
        self.general = self.add_argument_group("general")
        self.general.add_argument("-h", "--help", action=_Help, help="show common options and exit")
        # normalize_argv writes underscores; the help shows the customary spelling.
        self._help_all = self.general.add_argument("--help_all", action=_Help, help="show all options and exit")
        self._help_all.option_strings = ["--help-all"]
        self.general.add_argument("--traceback", action="store_true", help="print the Python traceback of an error")

    def error(self, message: str) -> NoReturn:
        missing = message.startswith("the following arguments are required")
        raise ValueError(f"{message}; {self.format_usage().strip()}" if missing else message)

    def format_help(self, full: bool = False) -> str:
        """The help text: positional arguments, the command's own options, the engine's by group, general ones."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        width = shutil.get_terminal_size().columns - 2
        paragraphs = (self.description or "").split("\n\n")
        formatter.add_text("\n\n".join(text if text[:1] == " " else textwrap.fill(text, width) for text in paragraphs))
        last = [*self._last_groups, self.general]
        for group in [*(group for group in self._action_groups if group not in last), *last]:
            shown = [
                action
                for action in group._group_actions
                if (full or action.dest not in self._advanced) and (self._advanced or action is not self._help_all)
            ]
            formatter.start_section(group.title)
            formatter.add_arguments(shown)
            formatter.end_section()
        hidden = 0 if full else len(self._advanced)
        formatter.add_text(f"{hidden} more options: {self.prog} --help-all" if hidden else None)
        return formatter.format_help()

    def add_config(
        self,
        config: type,
        title: str,
        names: Iterable[str] = (),
        skip: Collection[str] = (),
        common: Collection[str] | None = None,
        show_defaults: bool = True,
        last: bool = False,
    ) -> None:
        """Add a group of options for fields of a dataclass.

        An option that the parser has already (`seed` of the engine and of a request) serves both dataclasses.

        Args:
            names: the options; empty: all but those in `skip`.
            common: options of the short help; None: all.
            show_defaults: append the dataclass's defaults to the help texts.
            last: the help lists the group after all others.
        """
        options, group = options_of(config), self.add_argument_group(title)
        self._last_groups += [group] if last else []
        for name in names or [name for name in options if name not in skip]:
            option = options[name]
            if name in self.options:
                assert self.options[name].hint == option.hint, f"{name} has two types"
                self._advanced -= {name} if common is None or name in common else set()
                continue
            self.options[name] = option
            self._advanced |= {name} if common is not None and name not in common else set()
            group.add_argument(
                f"--{name}",
                dest=name,
                metavar=option.metavar,
                action="append" if option.is_list or option.is_mapping else "store",
                default=argparse.SUPPRESS,
                help=(option.text + (option.default_text if show_defaults else "")).replace("%", "%%"),
            )

    def parse_argv(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse arguments and the config file.

        Raises:
            ValueError: an unknown option (with the nearest known name), an unexpected argument or a bad config file.
        """
        translated, advice = take_other_options(argv, self.options)
        normalized = normalize_argv(translated, self.options)
        from_file: dict[str, Any] = {}
        for path in _config_files(normalized):
            from_file |= self._read_file(path, advice)
        args, unknown = self.parse_known_args(self._options_first(normalized, from_file.get("model")))
        for argument in unknown:
            name = argument.partition("=")[0]
            if name.startswith("--") and name != "--":
                known = [text[2:] for action in self._actions for text in action.option_strings if text[:2] == "--"]
                raise ValueError(unknown_option(name[2:], known, "--"))
            if name.startswith("-") and name != "-":
                raise ValueError(f"unknown option {name}; text that starts with a dash goes after `--`")
        if unknown:
            raise ValueError(f"unexpected argument {unknown[0]!r}")
        args.from_file, args.advice = from_file, advice
        if "dtype" in self.options:  # a command that starts an engine
            variables = read_variables(vllm_variables(), {*vars(args), *from_file}, self.options)
            args.from_file = variables.options | args.from_file
            advice += variables.advice
        return args

    def _read_file(self, path: str, advice: list[tuple[str, str]]) -> dict[str, Any]:
        """Options of the command from a YAML file, by dotted name; appends what is said about others to `advice`."""
        known = [*self.options, "model"]
        read = options_of_file(read_yaml(path, [*known, *ALL, "compilation_config"]))
        values = {ALIASES.get(name.rsplit(".", 1)[-1], name): value for name, value in read.items()}
        for name in values:
            if name not in known and name not in ALL:
                raise ValueError(f"config file {path}: {unknown_option(name, known)}")
        translation = translate(values, known)
        advice += translation.advice
        if isinstance(token := translation.options.pop("hf_token", None), str):
            set_hub_token(token)
        return translation.options

    def _options_first(self, argv: Sequence[str], model: str | None) -> list[str]:
        """Options with their values, then `--`, then the rest: argparse would end a list of prompts at an option.

        Args:
            model: of the config file, for a command without positional arguments.
        """
        actions = {text: action for action in self._actions for text in action.option_strings}
        options: list[str] = []
        rest: list[str] = []
        words: list[tuple[str, str]] = []  # after a list option: further values of it, or MODEL
        only_model = [action.dest for action in self._actions if not action.option_strings] == ["model"]
        list_option = ""
        remaining = iter(argv)
        for argument in remaining:
            if argument == "--":
                rest.extend(remaining)
            elif argument.partition("=")[0] in ("--model", "--model_tag") and "--model" not in actions:
                _, equals, value = argument.partition("=")
                rest.insert(0, value if equals else next(remaining, ""))
            elif argument.startswith("-") and argument != "-":
                options.append(argument)
                name = argument.partition("=")[0]
                is_list = name[2:] in self.options and self.options[name[2:]].is_list
                list_option = name if is_list and only_model else ""
                if argument in actions and actions[argument].nargs != 0:
                    options.extend([value] if (value := next(remaining, None)) is not None else [])
            elif list_option:
                words.append((list_option, argument))
            else:
                rest.append(argument)
        if not rest and model is not None and only_model:
            rest = [model]
        if words and not rest:
            rest = [words.pop()[1]]
        options += [f"{name}={value}" for name, value in words]
        return [*options, "--", *rest] if rest else options


def _config_files(argv: Sequence[str]) -> list[str]:
    """The values of `--config` before `--`."""
    end = argv.index("--") if "--" in argv else len(argv)
    pairs = zip(argv[:end], [*argv[1:end], ""], strict=False)
    return [
        value if argument == "--config" else argument.partition("=")[2]
        for argument, value in pairs
        if argument.partition("=")[0] == "--config"
    ]


class _Help(argparse.Action):
    """Print the short or the full help and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_help(full=self.dest == "help_all"), end="")
        raise SystemExit(0)


def engine_parser(name: str, description: str, positionals: str = "MODEL") -> Parser:
    """A parser with MODEL, `--config`, `-O` and every option of the engine; `positionals` as the usage shows them."""
    usage = f"torchweave {name} {positionals} [OPTION...]"
    parser = Parser(prog=f"torchweave {name}", usage=usage, description=description)
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub id, a built-in model (demo) or shape:NAME")
    add_engine_options(parser)
    return parser


def add_engine_options(parser: Parser) -> None:
    """Add `--config`, `-O`, `--quiet` and every option of the engine but the model."""
    for title, names in ENGINE_GROUPS.items():
        parser.add_config(EngineConfig, title, names, common=COMMON_ENGINE_OPTIONS, last=True)
    parser.general.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        help="read options from a YAML file; the command line overrides them. TensorRT-LLM: --extra_llm_api_options",
    )
    parser.general.add_argument(
        "-O",
        dest="level",
        type=int,
        choices=sorted(OPTIMIZATION_LEVELS),
        default=2,
        help="optimization level. 0: eager; 1: compiled pieces and piecewise CUDA graphs; 2 (default): whole-step CUDA graphs "
        "too; 3: also passes within a tolerance, and batches of 1, 2, 4 and 8 compiled with static shapes",
    )
    parser.general.add_argument("--quiet", action="store_true", help="show no progress bars")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's config from the level, the config file and the command line; later sources win.

    Raises:
        ValueError: see `options.build_config`.
    """
    return build_config(EngineConfig, given_options(args))


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options that were set, by dotted name, not yet converted."""
    return {**OPTIMIZATION_LEVELS[args.level], **_options_set(EngineConfig, args)}


def config_from_args(config: type[Config], args: argparse.Namespace, **defaults: Any) -> Config:
    """A dataclass from `defaults`, the config file and the command line; later sources win."""
    return build_config(config, defaults, _options_set(config, args))


def _options_set(config: type, args: argparse.Namespace) -> dict[str, Any]:
    """Options of a dataclass from the config file, overridden by those of the command line."""
    known = options_of(config)
    from_file = {name: value for name, value in args.from_file.items() if name in known}
    given = {
        **from_file,
        **_join_repeated(config, {name: value for name, value in vars(args).items() if name in known}),
    }
    return {name: own_value(name, value) for name, value in given.items()}


def _join_repeated(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Join the values of repeated options: `--stop a --stop b`, `--sizes 1,2 --sizes 4`."""
    known = options_of(config)
    joined: dict[str, Any] = {}
    for name, value in given.items():
        if known[name].is_list and isinstance(value, list):
            parts = [convert(known[name].hint, item, name) for item in value]
            value = parts[0] if len(parts) == 1 else [item for part in parts for item in _as_items(part)]
        elif known[name].is_mapping and isinstance(value, list):
            parts = [convert(known[name].hint, item, name) for item in value]
            objects = all(isinstance(part, dict) for part in parts)
            value = {key: item for part in parts for key, item in part.items()} if objects else parts[-1]
        joined[name] = value
    return joined


def _as_items(part: Any) -> Sequence[Any]:
    return part if isinstance(part, tuple) else () if part is None else (part,)
