"""Defaults of sampling from a checkpoint's generation_config.json, or from options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from torchweave.config.model_source import read_json
from torchweave.config.options import EngineConfig, expand_path
from torchweave.tokenizer import read_eos_token_id

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_ALWAYS = ("repetition_penalty", "max_new_tokens")
_WHOLE = frozenset({"eos_token_id", "top_k", "max_new_tokens"})
_MIN = {"temperature": 0.0, "top_k": -1, "min_p": 0.0, "top_p": 0.0, "max_new_tokens": 1, "eos_token_id": -1}
_MAX = {"min_p": 1.0, "top_p": 1.0}
_FILE = "generation_config.json"


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults from `generation_config.json`; None: not set there.

    Attributes:
        eos_token_ids: end tokens of the checkpoint and of its tokenizer.
        max_new_tokens: tokens of an answer.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


_VLLM = GenerationDefaults((), temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


def checkpoint_defaults(folder: Path | None, config: PreTrainedConfig) -> GenerationDefaults:
    """Defaults of a checkpoint.

    Raises:
        ValueError: a value of its generation_config.json is no number, or out of range.
    """
    path = folder / _FILE if folder is not None else None
    raw = read_json(path) if path is not None and path.is_file() else {}
    eos = raw.get("eos_token_id", getattr(config.get_text_config(), "eos_token_id", None))
    ids = list(eos) if isinstance(eos, (list, tuple)) else [eos]
    # Chat models may end a message with a token that only the tokenizer declares as the end token.
    ids.append(None if folder is None else read_eos_token_id(folder))
    subject = f"The {_FILE} of this model has"
    ends = (_number("eos_token_id", token, subject) for token in ids)
    tokens = dict.fromkeys(token for token in ends if token is not None and token >= 0)
    return GenerationDefaults(tuple(tokens), **_sampling(raw, subject))


def with_options(defaults: GenerationDefaults, config: EngineConfig) -> GenerationDefaults:
    """The defaults that the options `generation_config` and `override_generation_config` ask for; end tokens stay.

    Raises:
        ValueError: the folder has no generation_config.json, or a value is not supported.
    """
    if config.generation_config == "vllm":
        defaults = replace(_VLLM, eos_token_ids=defaults.eos_token_ids)
    elif config.generation_config != "auto":
        path = expand_path(config.generation_config) / _FILE
        if not path.is_file():
            raise ValueError(
                f"generation_config={config.generation_config!r} has no {_FILE}; give auto, vllm or a folder with one"
            )
        defaults = GenerationDefaults(defaults.eos_token_ids, **_sampling(read_json(path), f"{path} has"))
    overrides = {name: value for name, value in config.override_generation_config.items() if name != "do_sample"}
    if unknown := [name for name in overrides if name not in (*_SAMPLING, *_ALWAYS)]:
        raise ValueError(
            f"override_generation_config has {unknown[0]}, which is no default here: it takes "
            f"{', '.join((*_SAMPLING, *_ALWAYS))}; set others in SamplingParams or in requests"
        )
    subject = "override_generation_config has"
    return replace(defaults, **{name: _number(name, value, subject) for name, value in overrides.items()})


def _sampling(raw: Mapping[str, Any], subject: str) -> dict[str, Any]:
    # Without do_sample, transformers decodes greedily but still applies the penalty.
    names = (*_SAMPLING, *_ALWAYS) if raw.get("do_sample") else _ALWAYS
    given = {name: _number(name, raw.get(name), subject) for name in names}
    if raw.get("do_sample") and given["temperature"] is None:
        given["temperature"] = 1.0
    if given.get("top_p") == 0:  # the most likely token alone, as in transformers
        given |= {"top_p": None, "top_k": 1}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    return given


def _number(name: str, value: Any, subject: str) -> Any:
    """A value, as an int where it has to be one; None: not set.

    Raises:
        ValueError: it is no number, or out of range.
    """
    if value is None:
        return None
    whole, least = name in _WHOLE, _MIN.get(name, math.nextafter(0.0, 1.0))
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (whole and value != int(value)):
        raise ValueError(f"{subject} {name}={value!r}: expected a {'whole ' * whole}number; correct it.")
    if not least <= value <= _MAX.get(name, math.inf):
        expected = f"a number between {least:g} and {_MAX[name]:g}" if name in _MAX else f"at least {least:g}"
        expected = expected if name in _MIN else "a number above 0"
        raise ValueError(f"{subject} {name}={value!r}: expected {expected}; correct it.")
    return int(value) if whole else value
