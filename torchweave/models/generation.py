"""Defaults of sampling from a checkpoint's generation_config.json, or from options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from torchweave.config.model_source import read_json
from torchweave.config.options import EngineConfig, expand_path
from torchweave.tokenizer import read_eos_token_id

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_PENALTY = "repetition_penalty"
_FILE = "generation_config.json"


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults from `generation_config.json`; None: not set there.

    Attributes:
        eos_token_ids: end tokens of the checkpoint and of its tokenizer.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


_VLLM = GenerationDefaults((), temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


def checkpoint_defaults(folder: Path | None, config: PreTrainedConfig) -> GenerationDefaults:
    """Defaults of a checkpoint.

    Raises:
        ValueError: a value of its generation_config.json is no number.
    """
    path = folder / _FILE if folder is not None else None
    raw = read_json(path) if path is not None and path.is_file() else {}
    eos = raw.get("eos_token_id", getattr(config.get_text_config(), "eos_token_id", None))
    ids = list(eos) if isinstance(eos, (list, tuple)) else [eos]
    # Chat models may end a message with a token that only the tokenizer declares as the end token.
    ids.append(None if folder is None else read_eos_token_id(folder))
    sampling = _sampling(raw)
    _check_numbers({"eos_token_id": ids} | sampling, f"The {_FILE} of this model has")
    return GenerationDefaults(tuple(dict.fromkeys(token for token in ids if token is not None)), **sampling)


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
        sampling = _sampling(read_json(path))
        _check_numbers(sampling, f"{path} has")
        defaults = GenerationDefaults(defaults.eos_token_ids, **sampling)
    overrides = {name: value for name, value in config.override_generation_config.items() if name != "do_sample"}
    if unknown := [name for name in overrides if name not in (*_SAMPLING, _PENALTY)]:
        raise ValueError(
            f"override_generation_config has {unknown[0]}, which is no default here: it takes "
            f"{', '.join((*_SAMPLING, _PENALTY))}; set others in SamplingParams or in requests"
        )
    _check_numbers(overrides, "override_generation_config has")
    return replace(defaults, **overrides)


def _sampling(raw: Mapping[str, Any]) -> dict[str, Any]:
    # Without do_sample, transformers decodes greedily but still applies the penalty.
    names = (*_SAMPLING, _PENALTY) if raw.get("do_sample") else (_PENALTY,)
    return {name: raw.get(name) for name in names}


def _check_numbers(given: Mapping[str, Any], subject: str) -> None:
    for name, value in (
        (name, item) for name, each in given.items() for item in (each if isinstance(each, list) else [each])
    ):
        whole = name in ("eos_token_id", "top_k")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int if whole else (int, float))):
            raise ValueError(f"{subject} {name}={value!r}: expected a {'whole ' * whole}number; correct it.")
