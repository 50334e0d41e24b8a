"""Device-independent validation of options; each error is one sentence with the remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from os import PathLike
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torchweave.config.options import EngineConfig, ServerConfig, SpeculativeConfig, TorchCompileConfig
from torchweave.plug_points import LOGITS_PROCESSORS, PASSES, REASONING_PARSERS, TOOL_PARSERS
from torchweave.utils.registry import Registry, is_path
from torchweave.utils.suggest import did_you_mean, suggest_value

_MAX_API_SERVERS = 64
_SERVER_MINIMUMS = {
    "max_body_bytes": 1,
    "max_request_tokens": 1,
    "max_request_sequences": 1,
    "max_waiting_requests": 0,
    "response_store_mib": 0,
    "request_timeout": 0,
    "drain_timeout": 0,
    "media_fetch_timeout": 0,
    "max_connections_per_address": 1,
    "engine_timeout": 0,
}

VLLM_NAMES = {
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "max_num_tokens",
    "enable_chunked_prefill": "enable_chunked_context",
    "num_gpu_blocks_override": "num_kv_blocks",
    "cudagraph_capture_sizes": "capture_num_tokens",
}
"""vLLM's name -> name of the equivalent option."""
SPECULATION_NAMES = {
    "max_draft_len": "num_speculative_tokens",
    "max_matching_ngram_size": "prompt_lookup_max",
}
"""TensorRT-LLM's name -> name of the equivalent option, where vLLM has no other."""
OTHER_NAMES = {**VLLM_NAMES, **SPECULATION_NAMES}


def flatten(config: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield (dotted name, value) of every option of a config and its nested configs."""
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from flatten(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, value


Config = TypeVar("Config")


def config_from(config: type[Config], options: Mapping[str, Any], prefix: str = "") -> Config:
    """Build a config from options by name, or vLLM's or TensorRT-LLM's name; nested configs may be dicts, or None for the default.

    Raises:
        ValueError: an unknown name (with the nearest known name), or an option given by both names.
    """
    hints = get_type_hints(config)
    given: dict[str, Any] = {}
    for requested, value in options.items():
        name = requested if requested in hints else OTHER_NAMES.get(requested, "")
        if name not in hints:
            known = f"it is one of {', '.join(hints)}" if prefix else "docs/reference/options.md lists all options"
            guess = did_you_mean(requested, hints, known, prefix)
            raise ValueError(f"unknown option {prefix}{requested}; {guess}")
        if name in given:
            raise ValueError(f"{prefix}{name} is given twice; {' and '.join(_aliases_of(name))} are one option")
        if value is None:
            continue  # vLLM's way to ask for the default
        nested = is_dataclass(hints[name]) and isinstance(value, Mapping)
        given[name] = config_from(hints[name], value, f"{prefix}{name}.") if nested else value
    return config(**given)


def _aliases_of(name: str) -> list[str]:
    return [name, *(other for other, own in OTHER_NAMES.items() if own == name)]


_TYPE_NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


def check_types(config: Any, prefix: str = "", plugins: Sequence[str] | None = None) -> None:
    """Check the types of options, and values of those that have names; a model may be a path.

    Args:
        plugins: packages that may add values to an option with a registry; None: all.
    """
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        registry = next((each for kind in kinds for each in getattr(kind, "__metadata__", ())), None)
        if is_dataclass(hint):
            if not isinstance(value, hint):  # type: ignore[arg-type]
                raise ValueError(f"{prefix}{name}={value!r} must be a {hint.__name__}, or a dict of its options")  # type: ignore[union-attr]
            check_types(value, f"{prefix}{name}.", plugins)
        elif name == "model" or (value is None and type(None) in kinds):
            continue
        elif get_origin(kinds[0]) is Literal:
            known = (*get_args(kinds[0]), *((None,) if type(None) in kinds else ()))
            if registry is not None and isinstance(value, str) and value not in known:
                if registry.has(value, plugins):
                    continue
                known = tuple(dict.fromkeys((*known[:-1], *registry.names(plugins), *known[-1:])))
            if value not in known:
                raise ValueError(_unknown(prefix + name, value, known))
        elif get_origin(kinds[0]) is dict:
            if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
                raise ValueError(f"{prefix}{name}={value!r} must be a dict of values by name")
        elif get_origin(kinds[0]) is tuple:
            kind = get_args(kinds[0])[0]
            if not isinstance(value, (list, tuple)) or not all(_is_instance_of(kind, each) for each in value):
                raise ValueError(f"{prefix}{name}={value!r} must be a list, each of it {_TYPE_NAMES[kind]}")
        elif not _is_instance_of(kinds[0], value):
            raise ValueError(f"{prefix}{name}={value!r} must be {_TYPE_NAMES[kinds[0]]}")


def _is_instance_of(kind: type, value: object) -> bool:
    """Like `isinstance`, but a bool is no number and an integer is a float."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, {int: Integral, float: Real, str: (str, PathLike)}.get(kind, kind))


_MINIMUMS = {
    "max_model_len": 1,
    "max_batch_size": 1,
    "max_num_tokens": 1,
    "block_size": 1,
    "num_kv_blocks": 1,
    "kv_cache_memory_bytes": 1,
    "num_state_snapshots": 0,
    "run_ahead": 0,
    "mixed_step_tokens": 0,
    "batch_wait_timeout_iters": 0,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "rank_timeout": 1,
    "max_loras": 1,
    "max_lora_rank": 1,
    "max_logprobs": -1,
    "seed": 0,
    "limit_mm_per_prompt.image": 0,
    "cuda_graph_config.max_encoder_graphs": 0,
    "torch_compile_config.max_padding_ratio": 1,
    "torch_compile_config.max_num_streams": 1,
    "speculative_config.num_speculative_tokens": 1,
    "speculative_config.prompt_lookup_min": 1,
    "speculative_config.disable_by_batch_size": 1,
}
_SIZES = (
    "torch_compile_config.capture_num_tokens",
    "torch_compile_config.compile_sizes",
    "cuda_graph_config.batch_sizes",
)
_MAX_SPECULATIVE_TOKENS = 31
_NO_FOLDER = frozenset({"", "none", "null", "false", "off", "no"})


def check_config(config: EngineConfig, passes: Sequence[str] | None = None) -> None:
    """Check what an engine needs on every device and with every model.

    Args:
        passes: the names that `disabled_passes` may hold; None: they are not checked.

    Raises:
        ValueError: a value has a wrong type, is not known or is out of range.
    """
    check_types(config, plugins=config.plugins)
    _check_names("torch_compile_config.passes", config.torch_compile_config.passes, PASSES, config.plugins)
    _check_names("logits_processors", config.logits_processors, LOGITS_PROCESSORS, config.plugins)
    for name in config.torch_compile_config.disabled_passes if passes is not None else ():
        if name not in (passes or ()):
            raise ValueError(_unknown("torch_compile_config.disabled_passes", name, passes or ()))
    values = dict(flatten(config))
    for name, least in _MINIMUMS.items():
        value = values[name]
        if value is not None and not (math.isfinite(value) and value >= least):
            raise ValueError(f"{name}={value} must be at least {least}")
    for name in _SIZES:
        for size in values[name] or ():
            if size < 1:
                raise ValueError(f"{name} holds {size}, but each size must be at least 1")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization={config.gpu_memory_utilization} must be above 0 and at most 1")
    if not 0 <= config.batch_wait_max_tokens_ratio <= 1:
        raise ValueError(f"batch_wait_max_tokens_ratio={config.batch_wait_max_tokens_ratio} must be from 0 to 1")
    if not (math.isfinite(config.kv_offload_gb) and config.kv_offload_gb >= 0):
        raise ValueError(f"kv_offload_gb={config.kv_offload_gb} must be 0 or more")
    if not (math.isfinite(config.cpu_kv_cache_gib) and config.cpu_kv_cache_gib > 0):
        raise ValueError(f"cpu_kv_cache_gib={config.cpu_kv_cache_gib} must be above 0")
    check_folders(config.torch_compile_config)
    lora_modules(config)
    _check_speculation(config.speculative_config)


def lora_modules(config: EngineConfig) -> dict[str, str]:
    """The folders of the adapters in `lora_modules`, by name.

    Raises:
        ValueError: an entry has another form, two have one name, or adapters are off.
    """
    folders: dict[str, str] = {}
    for entry in config.lora_modules:
        name, is_pair, folder = entry.partition("=")
        if not (name and is_pair and folder):
            raise ValueError(
                f"lora_modules={entry!r} must be the name and the folder of an adapter, as in sql=/adapters/sql"
            )
        if name in folders:
            raise ValueError(f"lora_modules has two adapters {name!r}; give each another name")
        folders[name] = folder
    if folders and not config.enable_lora:
        raise ValueError("lora_modules needs enable_lora=True; set it, or remove lora_modules")
    return folders


def _check_names(option: str, given: Sequence[str], registry: Registry[Any], plugins: Sequence[str] | None) -> None:
    for name in given:
        if not registry.has(name, plugins):
            names = ", ".join(registry.names(plugins)) or "none is installed"
            raise ValueError(f"{option}={name!r} is not known: write module:Name, or a name ({names})")


def check_folders(config: TorchCompileConfig) -> None:
    """Reject words for "no folder", of which a folder would be made in the working directory."""
    hints = {
        "compile_cache_dir": "set compile_cache=False to keep no cache",
        "dump_dir": "leave it out to dump nothing",
    }
    for name, hint in hints.items():
        folder = getattr(config, name)
        if folder is not None and str(folder).strip().lower() in _NO_FOLDER:
            like = f", or write ./{folder} for a folder of that name" if str(folder).strip() else ""
            raise ValueError(f"torch_compile_config.{name}={str(folder)!r} is not the name of a folder; {hint}{like}")


def _check_speculation(config: SpeculativeConfig) -> None:
    prefix = "speculative_config."
    by_model = config.method in ("draft_model", "eagle3")
    if by_model and config.model is None:
        what = "draft model" if config.method == "draft_model" else "head"
        raise ValueError(f"{prefix}method={config.method} needs {prefix}model, the name of the {what}")
    if not by_model and config.model is not None:
        raise ValueError(
            f"{prefix}model={config.model} is used by {prefix}method=draft_model and eagle3, but the method is {config.method}; "
            "set the method or remove the model"
        )
    if config.num_speculative_tokens > _MAX_SPECULATIVE_TOKENS:
        raise ValueError(
            f"{prefix}num_speculative_tokens={config.num_speculative_tokens} must be at most {_MAX_SPECULATIVE_TOKENS}"
        )
    if config.prompt_lookup_max < config.prompt_lookup_min:
        raise ValueError(
            f"{prefix}prompt_lookup_max={config.prompt_lookup_max} must be at least prompt_lookup_min={config.prompt_lookup_min}"
        )
    if config.synthetic_acceptance is not None and not 0 <= config.synthetic_acceptance <= 1:
        raise ValueError(f"{prefix}synthetic_acceptance={config.synthetic_acceptance} must be from 0 to 1")


def check_server(config: EngineConfig, settings: ServerConfig) -> None:
    """Check the server's limits, origins, and numbers of engines and HTTP processes."""
    check_limits(settings, config.plugins)
    for registry, name in ((TOOL_PARSERS, settings.tool_call_parser), (REASONING_PARSERS, settings.reasoning_parser)):
        if name in registry.names(config.plugins) or is_path(name):
            registry.get(name, config.plugins)  # a package that is broken stops the server here
    _check_address(settings)
    if settings.api_server_count is not None and not 1 <= settings.api_server_count <= _MAX_API_SERVERS:
        raise ValueError(f"api_server_count={settings.api_server_count} must be from 1 to {_MAX_API_SERVERS}")
    count = settings.data_parallel_size
    if count < 1:
        raise ValueError(f"data_parallel_size={count} must be at least 1")
    if count > 1 and config.executor == "ray" and config.num_ranks > 1:
        raise ValueError(
            f"data_parallel_size={count} is not supported with executor=ray, since replicas run on the server's machine; remove "
            "one of them, or run replicas of the server in Ray Serve"
        )


def _check_address(settings: ServerConfig) -> None:
    """Check the options of a Unix socket and of TLS."""
    if (settings.ssl_certfile is None) != (settings.ssl_keyfile is None):
        raise ValueError("ssl_certfile and ssl_keyfile belong together; give both for HTTPS, or none")
    if settings.ssl_certfile is None and (settings.ssl_ca_certs is not None or settings.ssl_cert_reqs):
        raise ValueError(
            "ssl_ca_certs and ssl_cert_reqs check clients over HTTPS; give ssl_certfile and ssl_keyfile, too"
        )
    if settings.ssl_cert_reqs not in (0, 1, 2):
        raise ValueError(f"ssl_cert_reqs={settings.ssl_cert_reqs} must be 0, 1 or 2")
    if settings.ssl_certfile is not None and settings.uds is not None:
        raise ValueError("uds is a socket of this machine, which needs no TLS; leave ssl_certfile and ssl_keyfile out")
    for option in ("uds", "ssl_certfile"):
        if getattr(settings, option) is not None and (settings.api_server_count or 1) > 1:
            raise ValueError(
                f"api_server_count={settings.api_server_count} is not supported with {option}; leave it out"
            )
    for path in settings.middleware:
        if not is_path(path) and "." not in path:
            raise ValueError(f"middleware={path!r} is not a path of Python: expected module:Name")


def check_limits(settings: ServerConfig, plugins: Sequence[str] | None = None) -> None:
    """Check that the server's limits admit requests, and its origins and hosts."""
    check_types(settings, plugins=plugins)
    for name, least in _SERVER_MINIMUMS.items():
        value = getattr(settings, name)
        if value is not None and not value >= least:
            raise ValueError(f"{name}={value} must be at least {least}")
    if settings.root_path and not re.fullmatch(r"(/[\w.~-]+)+", settings.root_path):
        raise ValueError(
            f"root_path={settings.root_path!r} is not a path: expected one such as /llm, without a slash after it"
        )
    for origin in settings.allowed_origins:
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ValueError(
                f"allowed_origins={origin!r} is not an origin: expected `*`, or scheme, host and port as in "
                "https://chat.example.com"
            )
    for host in settings.allowed_media_hosts:
        if not re.fullmatch(r"[A-Za-z0-9.-]+(:\d+)?", host):
            raise ValueError(
                f"allowed_media_hosts={host!r} is not a host: expected a name, or a name and a port, as in "
                "images.example.com:8080"
            )


def _unknown(option: str, value: Any, known: Sequence[Any]) -> str:
    return f"{option}={value!r} is not known: it is one of {', '.join(map(str, known))}{suggest_value(value, known)}"
