"""Build frozen dataclasses from YAML files and command-line options, by their annotations.

An option is a field, named by its dotted path (`torch_compile_config.enable_inductor`). Sources are flat dicts
`{dotted name: value}`; later ones win. `build_config` converts each value to the field's type and raises `ValueError` for
unknown names and invalid values.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from torchweave.config.options import read_text_file
from torchweave.config.plan import format_value
from torchweave.utils.suggest import VLLM_NAMES, nearest, suggest_value

Config = TypeVar("Config")

_TRUE, _FALSE, _NONE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}, {"null", "none", "~"}


@dataclass(frozen=True)
class Option:
    """One field of a config: dotted name, annotation, description from the class's docstring, and default."""

    name: str
    hint: Any
    text: str = ""
    default: Any = None

    @property
    def is_flag(self) -> bool:
        return self.hint is bool

    @property
    def is_list(self) -> bool:
        return any(get_origin(hint) in (tuple, list) for hint in _alternatives(self.hint))

    @property
    def is_mapping(self) -> bool:
        return any(get_origin(hint) is dict for hint in _alternatives(self.hint))

    @property
    def metavar(self) -> str:
        """Accepted values, as in help texts."""
        return "|".join(dict.fromkeys(_describe(hint) for hint in _alternatives(self.hint) if hint is not type(None)))

    @property
    def default_text(self) -> str:
        """The default as in help texts; empty where the description explains it."""
        return "" if self.default in (None, (), MISSING) else f" Default: {format_value(self.default)}."


def options_of(config: type, prefix: str = "") -> dict[str, Option]:
    """Options of a dataclass and its nested dataclasses, by dotted name."""
    options: dict[str, Option] = {}
    texts = attribute_docs(config)
    defaults = {item.name: item.default if item.default_factory is MISSING else None for item in fields(config)}
    for name, hint in get_type_hints(config).items():
        if nested := _nested(hint):
            options.update(options_of(nested, f"{prefix}{name}."))
        else:
            options[prefix + name] = Option(prefix + name, hint, texts.get(name, ""), defaults[name])
    return options


def _nested(hint: Any) -> type | None:
    """The dataclass in an annotation, if any."""
    return next((each for each in _alternatives(hint) if is_dataclass(each) and isinstance(each, type)), None)


def attribute_docs(config: type) -> dict[str, str]:
    """Descriptions in the `Attributes:` section of a docstring, by name; `a, b: text` describes both."""
    _, _, section = inspect.cleandoc(config.__doc__ or "").partition("Attributes:\n")
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        start = re.match(r" {4}(\w+(?:, \w+)*): (.*)", line)
        if start:
            names = start[1].split(", ")
            texts.update(dict.fromkeys(names, start[2]))
        elif line.strip():
            texts.update({name: f"{texts[name]} {line.strip()}" for name in names})
    return texts


def read_yaml(path: str | Path, known: Iterable[str] = ()) -> dict[str, Any]:
    """Options of a YAML file as a flat dict; nested mappings and dotted keys are equivalent. `known`: see `flatten`."""
    text = read_text_file("config file", path)
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"config file {path}{where} is not valid YAML: {getattr(error, 'problem', error)}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ValueError(f"config file {path} must hold options as `name: value`, but holds a {type(loaded).__name__}")
    return flatten(loaded, known=tuple(known))


def flatten(tree: Mapping[Any, Any], prefix: str = "", known: Sequence[str] = ()) -> dict[str, Any]:
    """Flatten `{"a": {"b-c": 1}}` to `{"a.b_c": 1}`.

    With `known` option names, a mapping that is an option's value stays whole, and a section without lines, which YAML
    reads as null, is skipped.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix + str(key).replace("-", "_")
        if isinstance(value, Mapping) and name not in known:
            flat.update(flatten(value, name + ".", known))
        elif value is not None or not any(each.startswith(f"{name}.") for each in known):
            flat[name] = value
    return flat


def build_config(config: type[Config], *sources: Mapping[str, Any]) -> Config:
    """Build a dataclass from flat sources; later sources win, other fields keep their defaults.

    Raises:
        ValueError: an unknown name (with the nearest known name), a value of the wrong type, or a missing field.
    """
    known = options_of(config)
    merged: dict[str, Any] = {}
    for source in sources:
        for name, value in source.items():
            if name not in known:
                raise ValueError(unknown_option(name, known))
            merged[name] = convert(known[name].hint, value, name)
    return _build_nested(config, merged, "")


def _build_nested(config: type[Config], values: Mapping[str, Any], prefix: str) -> Config:
    arguments: dict[str, Any] = {}
    for name, hint in get_type_hints(config).items():
        if nested := _nested(hint):
            if nested is hint or any(given.startswith(f"{prefix}{name}.") for given in values):
                arguments[name] = _build_nested(nested, values, f"{prefix}{name}.")
        elif prefix + name in values:
            arguments[name] = values[prefix + name]
    try:
        return config(**arguments)
    except TypeError:
        missing = [name for name in get_type_hints(config) if name not in arguments and not hasattr(config, name)]
        raise ValueError(f"{prefix}{missing[0]} must be given" if missing else f"{prefix} is incomplete") from None


def unknown_option(name: str, known: Iterable[str], dashes: str = "") -> str:
    """Error message for an unknown option, with the nearest known name by full path or by last part."""
    names = list(known)
    if within := [full for full in names if full.startswith(f"{name}.")]:
        return f"{dashes}{name} is a group of options; set one of them, such as {dashes}{within[0]}"
    if name in VLLM_NAMES:
        return f"unknown option {dashes}{name}; {VLLM_NAMES[name]}"
    leaf = name.rsplit(".", 1)[-1]
    by_leaf = {full.rsplit(".", 1)[-1]: full for full in reversed(names)}
    near = by_leaf.get(leaf) or nearest(name, names) or by_leaf.get(nearest(leaf, by_leaf), "")
    hint = f"did you mean {dashes}{near}?" if near else "`--help-all` lists all options"
    return f"unknown option {dashes}{name}; {hint}"


def convert(hint: Any, value: Any, name: str) -> Any:
    """Convert text from the command line or a YAML value to the annotated type.

    Raises:
        ValueError: the conversion fails; the message names the option, the value and the accepted values.
    """
    alternatives = _alternatives(hint)
    is_text = str in alternatives and not any(get_origin(each) is Literal for each in alternatives)
    if type(None) in alternatives and (value is None or _means_none(value, is_text)):
        return None
    try:
        return _any_of(alternatives, value)
    except ValueError:
        pass
    known = [item for hint in alternatives if get_origin(hint) is Literal for item in get_args(hint)]
    near = suggest_value(value, known)
    raise ValueError(f"{name}={_quoted(value)} is not valid: it takes {_expected(alternatives)}{near}")


def _any_of(alternatives: Sequence[Any], value: Any) -> Any:
    """Convert `value` to the first type that accepts it."""
    for alternative in alternatives:
        try:
            return _convert(alternative, value)
        except (ValueError, TypeError, OverflowError):
            continue
    raise ValueError


def _convert(hint: Any, value: Any) -> Any:
    origin = get_origin(hint)
    if origin is Literal:
        if value in get_args(hint):
            return value
    elif origin in (tuple, list):
        items = _items(value)
        return tuple(_any_of(_alternatives(get_args(hint)[0]), item) for item in items)
    elif origin is dict:
        pairs = json.loads(value) if isinstance(value, str) else value
        if isinstance(pairs, dict):
            of_key, of_value = get_args(hint)
            return {_convert(of_key, key): _convert(of_value, item) for key, item in pairs.items()}
    elif hint is bool:
        return _bool(value)
    elif hint in (int, float) and not isinstance(value, bool):
        return _number(hint, value)
    elif (hint is str and isinstance(value, str)) or hint is Any:
        return value
    raise ValueError


def _means_none(value: Any, is_text: bool) -> bool:
    """Whether a text stands for None; for options that accept text, only `null` does."""
    return isinstance(value, str) and value.strip().lower() in ({"null"} if is_text else _NONE)


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else ""
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError


def _number(hint: type, value: Any) -> int | float:
    if isinstance(value, str):
        value = float(value) if hint is float else int(value.strip().replace("_", ""))
    if hint is float and isinstance(value, int | float) and not math.isnan(value):
        return float(value)
    if hint is int and isinstance(value, int):
        return value
    raise ValueError


def _items(value: Any) -> Sequence[Any]:
    """Items of a YAML list, `[1, 2]`, `["a", "b"]` in JSON, `1,2` or a single item."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("[") and text.endswith("]"):
            text = text[1:-1]
            if text.lstrip().startswith('"'):
                with suppress(ValueError):
                    return json.loads(value)
        return [item.strip() for item in text.split(",") if item.strip()]
    return [value]


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if get_origin(hint) in (tuple, list):
        return f"{'|'.join(map(_describe, _alternatives(get_args(hint)[0])))},..."
    if get_origin(hint) is dict:
        return "JSON"
    return {bool: "true|false", int: "N", float: "X", str: "TEXT"}.get(hint, "VALUE")


def _expected(alternatives: Sequence[Any]) -> str:
    words: list[str] = []
    for hint in alternatives:
        if get_origin(hint) is Literal:
            words.append("one of " + ", ".join(map(str, get_args(hint))))
        elif get_origin(hint) in (tuple, list):
            words.append("a list of " + {int: "whole numbers", float: "numbers"}.get(get_args(hint)[0], "names"))
        elif get_origin(hint) is dict:
            words.append("an object in JSON, such as '{\"25\": -2}'")
        else:
            names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
            words.append(names.get(hint, "a value"))
    return " or ".join(dict.fromkeys(words))


def _quoted(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)
