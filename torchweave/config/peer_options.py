"""Spellings of vLLM (`compilation_config`, `enforce_eager`, dtypes) and of TensorRT-LLM's YAML beyond one name for another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torchweave.config.options import CudaGraphConfig, EngineConfig, TorchCompileConfig, set_hub_token
from torchweave.config.other_options import own_value, parse, read_variables, translate
from torchweave.config.validate import config_from, flatten
from torchweave.utils.suggest import did_you_mean

_COMPILE, _GRAPHS = "torch_compile_config.", "cuda_graph_config."
EAGER: dict[str, Any] = {
    _COMPILE + "enable_fullgraph": False,
    _COMPILE + "enable_inductor": False,
    _COMPILE + "enable_piecewise_cuda_graph": False,
    _GRAPHS + "max_batch_size": -1,
    _GRAPHS + "capture_mixed": False,
    _GRAPHS + "max_encoder_graphs": 0,
}
"""Options of `enforce_eager` and of level 0: no compilation, no CUDA graphs."""
_LEVELS: dict[Any, dict[str, Any]] = {
    **dict.fromkeys((0, "0", "NONE", "NO_COMPILATION"), EAGER),
    **{level: {} for level in (3, "3", "VLLM_COMPILE", "PIECEWISE")},
}


def _cuda_graphs(piecewise: bool, decode: bool, mixed: bool) -> dict[str, Any]:
    return {
        _COMPILE + "enable_piecewise_cuda_graph": piecewise,
        _GRAPHS + "max_batch_size": 0 if decode else -1,
        _GRAPHS + "capture_mixed": mixed,
    }


_CUDA_GRAPH_MODES = {
    "NONE": {**_cuda_graphs(False, False, False), _GRAPHS + "max_encoder_graphs": 0},
    "PIECEWISE": _cuda_graphs(True, False, False),
    "FULL": _cuda_graphs(False, True, True),
    "FULL_DECODE_ONLY": _cuda_graphs(False, True, False),
    "FULL_AND_PIECEWISE": _cuda_graphs(True, True, False),
}
_BACKENDS = {"": True, "inductor": True, "eager": False}
_SAME_MEANING = {
    "cache_dir": _COMPILE + "compile_cache_dir",
    "compile_cache_save_format": _COMPILE + "compile_cache_format",
    "debug_dump_path": _COMPILE + "dump_dir",
    "use_inductor": _COMPILE + "enable_inductor",
    "dynamic_shapes_config.type": _COMPILE + "dynamic_shapes",
    **{field.name: _COMPILE + field.name for field in fields(TorchCompileConfig)},
}
"""Name in `compilation_config` -> option; those of `torch_compile_config` are taken, too."""
_VLLM_SPLITTING_OPS = {
    f"vllm::{name}"
    for name in (
        "unified_attention", "unified_attention_with_output", "unified_mla_attention", "unified_mla_attention_with_output",
        "mamba_mixer", "mamba_mixer2", "short_conv", "linear_attention", "plamo2_mamba_mixer", "gdn_attention_core",
        "kda_attention", "sparse_attn_indexer",
    )
}  # fmt: skip
"""vLLM's ops that read memory of requests; graphs are split at their counterparts, the boundary ops, in any case."""
_KNOWN = (
    "level", "mode", "backend", "cudagraph_mode", "cudagraph_capture_sizes", "cudagraph_mm_encoder", *_SAME_MEANING,
)  # fmt: skip
VLLM_FIELDS = {*_KNOWN}.difference(field.name for field in fields(TorchCompileConfig) if field.name != "splitting_ops")
"""Fields of `compilation_config` that are no options of `torch_compile_config`, or have values of vLLM's."""
TENSORRT_LLM_NAMES = {
    "kv_cache_config.enable_block_reuse": "enable_prefix_caching",
    "kv_cache_config.tokens_per_block": "block_size",
    "kv_cache_config.dtype": "kv_cache_dtype",
    "scheduler_config.capacity_scheduler_policy": "capacity_scheduler_policy",
    "scheduler_config.context_chunking_policy": "context_chunking_policy",
    "speculative_config.decoding_type": "speculative_config.method",
    "speculative_config.num_nextn_predict_layers": "speculative_config.num_speculative_tokens",
    "speculative_config.speculative_model": "speculative_config.model",
    "speculative_config.speculative_model_dir": "speculative_config.model",
    "max_seq_len": "max_model_len",
}
"""Path in TensorRT-LLM's YAML -> option."""
_ONE_MODEL = {"speculative_config.mtp_eagle_one_model", "speculative_config.eagle3_one_model"}
"""TensorRT-LLM's options for drafts by an engine of their own, which does not exist here."""
OPTIMIZATION_LEVELS: dict[int, dict[str, Any]] = {
    0: EAGER,
    1: {_GRAPHS + "max_batch_size": -1, _GRAPHS + "capture_mixed": False},
    2: {},
    3: {_COMPILE + "pass_numerics": "tolerance", _COMPILE + "compile_sizes": (1, 2, 4, 8)},
}
"""Settings of each level; the config file and other options override them."""
_KNOWN_OPTIONS = frozenset(name for name, _ in flatten(EngineConfig(model="")))


def compilation_options(value: Any) -> dict[str, Any]:
    """Options by dotted name from vLLM's `compilation_config`: a dict, a level, or either in JSON.

    Raises:
        ValueError: a name or a value without an equivalent.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(
                f"compilation_config={value!r} is not valid JSON: {error}; a single option is -cc.NAME=VALUE"
            ) from None
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"level": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"compilation_config={value!r} must be a dict, a level, or either in JSON")
    options: dict[str, Any] = {}
    # Others refine the level.
    for name, given in sorted(value.items(), key=lambda item: item[0] not in ("level", "mode")):
        if name == "dynamic_shapes_config" and isinstance(given, Mapping):
            for key, each in given.items():
                options |= compilation_option(f"{name}.{key}", each)
        else:
            options |= compilation_option(str(name), given)
    return options


def compilation_option(name: str, value: Any) -> dict[str, Any]:
    """Options by dotted name from one field of vLLM's `compilation_config`; see `compilation_options`."""
    if name in ("level", "mode"):
        return _choose(name, value, _LEVELS, "levels 1 and 2, whole graphs without cuts, do not exist here; use 0 or 3")
    if name == "backend":
        return {_COMPILE + "enable_inductor": _choose(name, value, _BACKENDS, "it is inductor or eager")}
    if name == "cudagraph_mode":
        known = f"it is one of {', '.join(_CUDA_GRAPH_MODES)}"
        return _choose(name, value.upper() if isinstance(value, str) else value, _CUDA_GRAPH_MODES, known)
    if name == "cudagraph_capture_sizes":  # of whole decode steps and of pieces, which vLLM records for the same sizes
        return {_COMPILE + "capture_num_tokens": value, _GRAPHS + "batch_sizes": value}
    if name == "cudagraph_mm_encoder":
        graphs = {"true": CudaGraphConfig().max_encoder_graphs, "false": 0}
        known = {text: {_GRAPHS + "max_encoder_graphs": number} for text, number in graphs.items()}
        return _choose(name, str(value).lower(), known, "it is true or false")
    if name == "splitting_ops":
        return {_COMPILE + name: _splitting_ops(value)}
    if name in _SAME_MEANING:
        return {_SAME_MEANING[name]: value}
    hint = did_you_mean(name, _KNOWN, f"it is one of {', '.join(_KNOWN)}", "compilation_config.")
    raise ValueError(f"unknown option compilation_config.{name}; {hint}")


def _splitting_ops(value: Any) -> Any:
    """The ops to split at besides the boundary ops, from vLLM's list of all: `ns::op`, or `ns.op` in earlier versions."""
    if isinstance(value, str):
        value = json.loads(value) if value.lstrip()[:1] in ("[", "n") else [part for part in value.split(",") if part]
    if value is None:
        return []  # vLLM's default: its attention ops
    if not (isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)):
        return value  # which the option's type allows or refuses
    if not value:
        raise ValueError(
            "compilation_config.splitting_ops=[] has no equivalent: graphs are always split at attention; "
            "cudagraph_mode=FULL records steps as one CUDA graph in spite of that"
        )
    names = [each.strip() if "::" in each else each.strip().replace(".", "::", 1) for each in value]
    names = [each for each in names if each not in _VLLM_SPLITTING_OPS]
    if unknown := next((each for each in names if each.startswith("vllm::")), None):
        raise ValueError(
            f"compilation_config.splitting_ops names {unknown}, an op of vLLM's own models; name ops of the served model's graph"
        )
    return names


def options_of_file(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a flat YAML file by their own names, from those of vLLM and TensorRT-LLM.

    Raises:
        ValueError: see `compilation_options`.
    """
    options: dict[str, Any] = {}
    for name, value in values.items():
        if name == "enforce_eager" and isinstance(value, bool):
            options = (EAGER if value else {}) | options
        elif name == "compilation_config":
            options |= compilation_options(value)
        elif name.startswith("compilation_config."):
            options |= compilation_option(name.removeprefix("compilation_config."), value)
        elif name in _ONE_MODEL:
            if value is not True:
                raise ValueError(
                    f"{name}={value!r} has no equivalent: drafts are proposed in the step that verifies them; leave it out"
                )
        else:
            own = TENSORRT_LLM_NAMES.get(name, name)
            options[own] = own_value(own, value)
    return options


def _choose(name: str, value: Any, known: Mapping[Any, Any], otherwise: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value not in known:
        raise ValueError(f"compilation_config.{name}={value!r} has no equivalent: {otherwise}")
    return known[value]


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """An engine's config from options by their own or vLLM's names; see `read_options`."""
    return read_options(options)[0]


def read_options(
    options: Mapping[str, Any], variables: Mapping[str, str] | None = None
) -> tuple[EngineConfig, list[tuple[str, str]]]:
    """An engine's config from options by their own or vLLM's names, and what is said about those that were left out.

    Args:
        variables: of the environment, for options that are not given.

    Raises:
        ValueError: an unknown name, an option given twice, or a value without an equivalent.
    """
    given = dict(options)
    eager, compilation = given.pop("enforce_eager", None), given.pop("compilation_config", None)
    if not isinstance(eager, bool | None):
        raise ValueError(f"enforce_eager={eager!r} must be True or False")
    settings = dict(EAGER) if eager else {}
    if compilation is not None:
        settings = compilation_options(compilation) | settings
    level = given.pop("optimization_level", None)
    if level is not None:
        if isinstance(level, bool) or level not in OPTIMIZATION_LEVELS:
            raise ValueError(f"optimization_level={level!r} must be one of 0, 1, 2, 3")
        settings = OPTIMIZATION_LEVELS[level] | settings
    translation = translate(given, _KNOWN_OPTIONS)
    from_variables = read_variables(variables or {}, translation.options, _KNOWN_OPTIONS)
    for name, value in from_variables.options.items():
        translation.options[name] = _number(value)
    given = {}
    for name, value in translation.options.items():
        if "." in name and name in _KNOWN_OPTIONS:
            settings[name] = value
        else:
            given[name] = value
    if isinstance(token := given.pop("hf_token", None), str):
        set_hub_token(token)
    for path, value in settings.items():
        section, _, name = path.partition(".")
        given[section] = _with_option(given.get(section), section, name, value)
    return config_from(EngineConfig, given), translation.advice + from_variables.advice


def _number(text: Any) -> Any:
    value = parse(text) if isinstance(text, str) else text
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else text


def _with_option(section: Any, path: str, name: str, value: Any) -> Any:
    """A nested config, given as a dict or an object, with one more option."""
    value = tuple(value) if isinstance(value, list) else value
    if is_dataclass(section) and not isinstance(section, type):
        return replace(section, **{name: value})
    if section is not None and not isinstance(section, Mapping):
        return section  # which `config_from` refuses
    if section is not None and name in section:
        raise ValueError(f"{path}.{name} is given twice: by itself and by compilation_config or enforce_eager")
    return {**(section or {}), name: value}
