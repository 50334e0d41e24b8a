"""Spellings of options on the command line, brought into one form: `--name=value` with Torchweave's name.

`--max-model-len 4k`, `--max_model_len=512`, `-tp 2`, `--ignore_eos`, `--no-ignore_eos`, `-cc.debug=true`, `-O1`, and the options of
`torchweave.config.other_options`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchweave.cli.options import Option
from torchweave.config.options import set_hub_token
from torchweave.config.other_options import ALL, SHORT, parse, translate
from torchweave.config.peer_options import VLLM_FIELDS, compilation_option, compilation_options
from torchweave.config.validate import SPECULATION_NAMES, VLLM_NAMES

# vLLM's and TensorRT-LLM's names, and short forms.
ALIASES = {
    **VLLM_NAMES,
    **{name: f"speculative_config.{own}" for name, own in SPECULATION_NAMES.items()},
    "cudagraph_capture_sizes": "torch_compile_config.capture_num_tokens",
    "dump_dir": "torch_compile_config.dump_dir",
    "compile_cache": "torch_compile_config.compile_cache",
    "compile_cache_dir": "torch_compile_config.compile_cache_dir",
    "allowed_media_domains": "allowed_media_hosts",
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
}
SHORT_PREFIX, LONG_PREFIX = "-cc.", "--torch_compile_config."
# vLLM's names of its compilation config, and what the names of its fields begin with.
_COMPILATION_CONFIG = ("-cc", "--compilation_config", "--compilation-config")
_COMPILATION_PREFIXES = (SHORT_PREFIX, "-O.", "--compilation_config.", "--compilation-config.")
_PAIRS = re.compile(r"\w+=[^,=]+(?:,\w+=[^,=]+)*")


def take_other_options(argv: Sequence[str], options: Mapping[str, Option]) -> tuple[list[str], list[tuple[str, str]]]:
    """Replace options of vLLM that have none of their own here; returns what is said about those that were left out, too.

    Raises:
        ValueError: see `translate`; an option that needs a value has none.
    """
    kept: list[str] = []
    given: dict[str, Any] = {}
    remaining = list(reversed(argv))
    while remaining:
        argument = remaining.pop()
        if argument == "--":
            kept += [argument, *reversed(remaining)]
            break
        head, equals, value = argument.partition("=")
        head = f"--{SHORT[head]}" if head in SHORT else head
        name = head[2:].replace("-", "_") if head.startswith("--") else ""
        negated = name.removeprefix("no_")
        if parts := _parts(name, value if equals else "".join(remaining[-1:]), options):
            remaining = remaining if equals else remaining[:-1]
            own = {path: item for path, item in parts.items() if path not in ALL}
            kept += [f"--{path}={_text(item)}" for path, item in own.items()]
            given |= {path: item for path, item in parts.items() if path not in own}
        elif not name or _canonical_name(name, options) in options or not {name, negated} & ALL.keys():
            kept.append(head + equals + value)
        elif name not in ALL:
            given[negated] = False
        else:
            given[name] = _take_value(name, equals, value, remaining)
    translation = translate(given, options)
    if isinstance(token := translation.options.pop("hf_token", None), str):
        set_hub_token(token)
    return [*(f"--{name}={_text(item)}" for name, item in translation.options.items()), *kept], translation.advice


def _take_value(name: str, equals: str, value: str, remaining: list[str]) -> Any:
    """The value of an option, taken from the end of `remaining` if it does not stand after an equals sign."""
    if equals:
        return parse(value)
    if not ALL[name].takes_value:
        return parse(remaining.pop()) if remaining and remaining[-1].lower() in ("true", "false") else True
    if not remaining:
        raise ValueError(f"argument --{name}: expected one argument")
    first = parse(remaining.pop())
    numbers = [first]
    while isinstance(first, int) and remaining and remaining[-1].isdigit():
        numbers.append(int(remaining.pop()))
    return numbers if len(numbers) > 1 else first


def _parts(name: str, text: str, options: Mapping[str, Option]) -> dict[str, Any]:
    """The parts of a section by their dotted names, from an object in JSON or `image=2,video=0`; else empty."""
    if not any(each.startswith(f"{name}.") for each in options) or name in options:
        return {}
    if pairs := _PAIRS.fullmatch(text):
        values = dict(pair.split("=") for pair in text.split(","))
    elif text.lstrip().startswith("{"):
        values = parse(text)
    else:
        return {}
    if not isinstance(values, dict) or not (pairs or any(f"{name}.{key}" in ALL for key in values)):
        return {}
    return {
        _canonical_name(f"{name}.{key}", options): parse(item) if isinstance(item, str) else item
        for key, item in values.items()
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def normalize_argv(argv: Sequence[str], options: Mapping[str, Option]) -> list[str]:
    """`argv` with options in their canonical spelling and a value for every flag; arguments after `--` are unchanged."""
    normalized: list[str] = []
    index = 0
    while index < len(argv):
        argument = argv[index]
        index += 1
        if argument == "--":
            return [*normalized, argument, *argv[index:]]
        compilation = _compilation(argument, "".join(argv[index : index + 1]))
        if compilation is not None:
            normalized += compilation
            index += "=" not in argument
            continue
        if argument.startswith(_COMPILATION_PREFIXES):
            argument = LONG_PREFIX + argument.partition(".")[2]
        if not argument.startswith("--"):
            normalized.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        section = _section(name.replace("-", "_"), value if equals else "".join(argv[index : index + 1]), options)
        if section is not None:
            normalized += section
            index += not equals
            continue
        name = _canonical_name(name.replace("-", "_"), options)
        whole, _, field = name.partition(".")
        if field and name not in options and whole in options and options[whole].is_mapping:
            item = parse(value if equals else "".join(argv[index : index + 1]))
            for key in reversed(field.split(".")):
                item = {key: item}
            normalized.append(f"--{whole}={json.dumps(item)}")
            index += not equals
            continue
        if name == "optimization_level":
            normalized.append(f"-O{value if equals else ''.join(argv[index : index + 1])}")
            index += not equals
            continue
        if name == "enforce_eager":
            normalized += [] if value.lower() in ("false", "0") else ["-O0"]
            continue
        name = "config" if name == "extra_llm_api_options" else name
        if name in options and options[name].is_flag and not equals:
            following = argv[index].lower() if index < len(argv) else ""
            takes = following in ("true", "false")
            index += takes
            name, equals, value = name, "=", following if takes else "true"
        negated = _canonical_name(_strip_negation(name), options)
        if not equals and negated in options and options[negated].is_flag:
            name, equals, value = negated, "=", "false"
        normalized.append(f"--{name}{equals}{value}")
    return normalized


def _compilation(argument: str, following: str) -> list[str] | None:
    """The options of vLLM's `--compilation-config '{"NAME": VALUE}'`, `-cc.NAME=VALUE` and `-O.NAME=VALUE`; None for others.

    Raises:
        ValueError: a name or a value without an equivalent.
    """
    head, equals, value = argument.partition("=")
    value = value if equals else following
    if head in _COMPILATION_CONFIG:
        options = compilation_options(value)
    elif head.startswith(_COMPILATION_PREFIXES) and (name := head.partition(".")[2].replace("-", "_")) in VLLM_FIELDS:
        options = compilation_option(name, value)
    else:
        return None
    return [f"--{path}={each if isinstance(each, str) else json.dumps(each)}" for path, each in options.items()]


def _section(name: str, value: str, options: Mapping[str, Option]) -> list[str] | None:
    """The options of `--SECTION '{"NAME": VALUE}'`; None if `name` is no section, or `value` no object.

    Raises:
        ValueError: the JSON is not valid.
    """
    if not value.lstrip().startswith("{") or not any(each.startswith(f"{name}.") for each in options):
        return None
    try:
        values = json.loads(value)
    except ValueError as error:
        raise ValueError(f"--{name}={value} is not valid JSON: {error}") from None
    texts = {key: item if isinstance(item, str) else json.dumps(item) for key, item in values.items()}
    return [f"--{_canonical_name(f'{name}.{key}', options)}={text}" for key, text in texts.items()]


def _canonical_name(name: str, options: Mapping[str, Option]) -> str:
    """The option's own name for an alias of it."""
    other = ALIASES.get(name.rsplit(".", 1)[-1], name)
    return other if other in options else name


def _strip_negation(name: str) -> str:
    """`no_x.y` and `x.no_y` as `x.y`."""
    head, dot, leaf = name.rpartition(".")
    return head + dot + leaf.removeprefix("no_") if leaf.startswith("no_") else name.removeprefix("no_")
