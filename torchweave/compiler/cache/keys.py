"""Key factors of compile-cache entries: an allow-list of printed values.

Paths, ranks and device indices are excluded, so that a folder of entries can be used on another machine of the same kind.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import platform
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torchweave import version
from torchweave.compiler.codegen.pieces import inductor_options
from torchweave.compiler.ir.symbols import DynamicDims
from torchweave.compiler.partition.split import Piece, structure
from torchweave.config.options import TorchCompileConfig

_PATH_LIKE = re.compile(r"(^|_)(path|paths|dir|file|folder)$")
_PROCESS_HASH_SUFFIX = "object_hash"
"""Suffix of hashes in transformers' configs that differ between processes."""
_CHECKPOINT_PATH_SUFFIX = "name_or_path"
"""Suffix of checkpoint locations in transformers' models and configs."""
_WORD = re.compile(r"[\w-]*")
_MAX_DEPTH = 6
"""Deeper objects are described by their class name only; lists and dicts are described at any depth."""
_IN_PROGRESS = -1
"""Instead of the depth: marks a list or dict that is being described."""
_CLASS = -2
"""Instead of the depth: marks the description of a class."""
_STABLE_PACKAGES = {"torch", "builtins", "typing", "abc", "collections"}
"""Packages whose classes are described by their name: their version is a factor."""
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    torch.dtype,
    torch.Size,
    torch.memory_format,
    torch.layout,
)
_TORCH_OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module: parameters, children and hooks, which are described separately."""
_LOCATION_ATTRIBUTES = frozenset(
    {"__module__", "__doc__", "__firstlineno__", "__static_attributes__", "__annotations__", "__slotnames__"}
)
"""Attributes of a class that hold its location and its declarations, not its behavior."""
_CLASS_ATTRIBUTES = (*_PLAIN, FunctionType, functools.partial, tuple, list, dict, set, frozenset)
"""Attributes of a class that describe it."""
MISSING = "missing"
"""Instead of the hash of a source that cannot be read."""


def machine(device: torch.device) -> dict[str, Any]:
    """Factors of the machine: versions, this package's sources, the kind of device, and torch settings that change code."""
    return {
        "torchweave": version.__version__,
        "torchweave_sources": version.package_source_hash(),
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "triton": _triton_version(),
        "python": platform.python_version_tuple()[:2],
        "device": device_kind(device),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()),
        "autocast": autocast(device.type),
    }


def autocast(device_type: str) -> str:
    """The current dtype of `torch.autocast` for a device type, or `off`."""
    return str(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else "off"


def device_kind(device: torch.device) -> str:
    """The kind of device for generated code: a GPU's name and capability, or a CPU's architecture and vector instructions."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda {torch.cuda.get_device_name(device)} sm_{major}{minor}"
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def graph_factors(
    module: nn.Module, inputs: Mapping[str, Tensor], dynamic: DynamicDims, config: TorchCompileConfig
) -> dict[str, Any]:
    """Factors of a captured graph; hashes of the traced files are stored separately, see `source_digests`."""
    device = next(iter(inputs.values())).device
    modules = (module, *_unregistered_modules(module))
    return {
        **machine(device),
        "module": type(module).__qualname__,
        "module_config": _digest("\n".join((*map(describe_module, modules), *_tied_tensors(modules)))),
        "inputs": {
            name: [
                str(tensor.dtype),
                tensor.device.type,
                [dynamic.get(name, {}).get(dim, size) for dim, size in enumerate(tensor.shape)],
            ]
            for name, tensor in inputs.items()
        },
        "dynamic_shapes": config.dynamic_shapes,
    }


def piece_factors(piece: Piece, config: TorchCompileConfig, device: torch.device) -> dict[str, Any]:
    """Factors of a built piece."""
    return {
        **machine(device),
        "piece": _digest(structure(piece.module, len(piece.inputs))),
        "dynamic_shapes": config.dynamic_shapes,
        "inductor": inductor_options(config),
        "inductor_config": _digest(_inductor_config()),
    }


def source_digests(modules: Iterable[str]) -> dict[str, str]:
    """Hash of the source text of each module; `MISSING` for a module of another package without a file.

    Raises:
        ImportError: a module of this package has no source.
    """
    digests = {}
    for name in modules:
        try:
            module = sys.modules.get(name) or importlib.import_module(name)
            digests[name] = hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()[:16]
        except (ImportError, OSError, AttributeError, TypeError, ValueError):
            # TypeError: the name of a file begins with a dot.
            if name.partition(".")[0] == "torchweave":
                raise ImportError(
                    f"{name} is part of torchweave and has no source file; reinstall torchweave"
                ) from None
            digests[name] = MISSING
    return digests


DescriptionCache = dict[tuple[int, int], str]
"""Descriptions by identity and depth, valid while the objects live: modules of one model share their config."""


def describe_module(module: nn.Module, cache: DescriptionCache | None = None) -> str:
    """A module as text: its tree of classes, plain attributes, and the geometry of its tensors, without values of weights.

    Args:
        cache: descriptions, shared with other modules of the same model.
    """
    lines, cache = [], {} if cache is None else cache
    for name, child in module.named_modules(remove_duplicate=False):
        hooks = [describe(hook, 1) for hook in (*child._forward_pre_hooks.values(), *child._forward_hooks.values())]
        plain = {key: value for key, value in sorted(vars(child).items()) if key not in _TORCH_OWN}
        forward = getattr(child.forward, "__func__", child.forward)
        kind = f"{_name(type(child))} {describe_class(type(child), cache)}"
        lines.append(f"{name}: {kind} {_name(forward)} {hooks} {describe(plain, 0, cache)}")
        tensors = {**child._parameters, **child._buffers}
        lines += [f"  {key}: {describe(tensor, 0)}" for key, tensor in tensors.items()]
    return "\n".join(lines)


def describe_class(kind: type, cache: DescriptionCache) -> str:
    """A class by the functions and plain attributes of itself and its bases, which may be assigned after its definition, or
    depend on the arguments of the function that it is defined in. Bases of torch and of Python are left out."""
    where = (id(kind), _CLASS)
    if where not in cache:
        bases = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in _STABLE_PACKAGES]
        cache[where] = ""  # a class may be reached from its own attributes
        cache[where] = _digest(describe([_class_attributes(each) for each in bases], 1, cache))
    return cache[where]


def _class_attributes(kind: type) -> dict[str, Any]:
    attributes = {}
    for key, each in sorted(vars(kind).items()):
        inner = getattr(each, "fget" if isinstance(each, property) else "__func__", each)
        if key not in _LOCATION_ATTRIBUTES and (inner is None or isinstance(inner, _CLASS_ATTRIBUTES)):
            attributes[key] = inner
    return attributes


def _unregistered_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Modules in plain lists and dicts, which forward may call and torch does not register."""
    seen = {id(child) for child in module.modules()}
    queue = deque(module.modules())
    while queue:
        for child in _modules_in([value for key, value in vars(queue.popleft()).items() if key not in _TORCH_OWN]):
            if id(child) not in seen:
                yield child
                seen |= {id(each) for each in child.modules()}
                queue.extend(child.modules())


def _tied_tensors(modules: Iterable[nn.Module]) -> list[str]:
    """The paths of tensors with several paths: a graph reads one, and another module may hold two tensors there."""
    paths: dict[int, list[str]] = {}
    for number, module in enumerate(modules):
        for path, child in module.named_modules(remove_duplicate=False):
            for key, attribute in {**vars(child), **child._parameters, **child._buffers}.items():
                if isinstance(attribute, Tensor):
                    paths.setdefault(id(attribute), []).append(f"{number} {path} {key}")
    return [f"tied: {tied}" for tied in paths.values() if len(tied) > 1]


def _modules_in(thing: Any, depth: int = 0) -> Iterator[nn.Module]:
    if isinstance(thing, nn.Module):
        yield thing
    elif isinstance(thing, (list, tuple, dict)) and depth <= _MAX_DEPTH:
        for item in thing.values() if isinstance(thing, dict) else thing:
            yield from _modules_in(item, depth + 1)


def describe(thing: Any, depth: int = 0, cache: DescriptionCache | None = None) -> str:
    """A setting as text: plain values, geometry of tensors, names of classes and functions, containers of these; no paths."""
    if thing is None or isinstance(thing, _PLAIN):
        return repr(thing)
    if isinstance(thing, torch.device):
        return thing.type
    if isinstance(thing, Tensor):
        return f"{type(thing).__name__}{tuple(thing.shape)}{tuple(thing.stride())}{thing.dtype}@{thing.device.type}"
    if isinstance(thing, PurePath):
        return "path"
    if isinstance(thing, ModuleType):
        return f"module {thing.__name__}"
    cache = {} if cache is None else cache
    if isinstance(thing, (Mapping, list, tuple, deque, set, frozenset)):
        return _describe_container(thing, depth, cache)
    if depth > _MAX_DEPTH or isinstance(thing, nn.Module):
        return _name(type(thing))
    if isinstance(thing, MethodType):
        return f"{_name(thing)} of {describe(thing.__self__, depth + 1, cache)}"
    if isinstance(thing, functools.partial):
        return f"partial{describe([thing.func, thing.args, thing.keywords], depth + 1, cache)}"
    if isinstance(thing, FunctionType):
        return _describe_function(thing, depth, cache)
    if callable(thing) and hasattr(thing, "__qualname__"):
        return _name(thing)
    return _describe_object(thing, depth, cache)


def _describe_container(thing: Any, depth: int, cache: DescriptionCache) -> str:
    """A list, dict or set at any depth; a container inside itself is described by its class name."""
    where = (id(thing), _IN_PROGRESS)
    if where in cache:
        return f"a {_name(type(thing))} around it"
    cache[where] = ""
    try:
        if isinstance(thing, Mapping):
            items = [(_key(key), value) for key, value in thing.items() if not _is_path(str(key), value)]
            return "{" + ", ".join(f"{key}: {describe(value, depth + 1, cache)}" for key, value in items) + "}"
        texts = [describe(item, depth + 1, cache) for item in thing]
        if isinstance(thing, (set, frozenset)):
            return "{" + ", ".join(sorted(texts)) + "}"
        kind = "" if type(thing) is list else _name(type(thing))
        return f"{kind}[{', '.join(texts)}]"
    finally:
        del cache[where]


def _describe_function(function: FunctionType, depth: int, cache: DescriptionCache | None) -> str:
    """Its name, code, defaults and closure: lambdas of one line and closures of one function share a name."""
    code = function.__code__
    if not (code.co_freevars or function.__defaults__ or function.__kwdefaults__):
        return f"{_name(function)} {_code_digest(code)}"
    values: list[Any] = [function.__defaults__, function.__kwdefaults__]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            values.append((name, cell.cell_contents))
        except ValueError:  # a variable that is assigned later
            values.append((name, "empty"))
    return f"{_name(function)} {_code_digest(code)} {describe(values, depth + 1, cache)}"


@functools.lru_cache(maxsize=8192)
def _code_digest(code: CodeType) -> str:
    return _digest(_code_text(code))


def _code_text(code: CodeType) -> str:
    constants = [_code_text(each) if isinstance(each, CodeType) else describe(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _describe_object(thing: Any, depth: int, cache: DescriptionCache) -> str:
    where = (id(thing), depth)
    if where not in cache:
        slots = [name for kind in type(thing).__mro__ for name in _slots(kind) if hasattr(thing, name)]
        facts = {**{name: getattr(thing, name) for name in slots}, **getattr(thing, "__dict__", {})}
        kind = f"{_name(type(thing))} {describe_class(type(thing), cache)}"
        cache[where] = f"{kind}{describe(dict(sorted(facts.items())), depth + 1, cache) if facts else ''}"
    return cache[where]


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else f"<{describe(key)}>"


def _is_path(key: str, value: Any) -> bool:
    """Whether a setting is a location: its name is that of a path and its text is not a single word, or it is a process hash or
    the name that a checkpoint was loaded by."""
    return key.endswith((_PROCESS_HASH_SUFFIX, _CHECKPOINT_PATH_SUFFIX)) or (
        _is_path_name(key) and _contains_path(value)
    )


def _contains_path(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (list, tuple, set, frozenset, Mapping)) and depth <= _MAX_DEPTH:
        return any(
            _contains_path(item, depth + 1) for item in (value.values() if isinstance(value, Mapping) else value)
        )
    return isinstance(value, str) and not _WORD.fullmatch(value)


@functools.lru_cache(maxsize=4096)
def _is_path_name(key: str) -> bool:
    return _PATH_LIKE.search(key) is not None


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}"


def _inductor_config() -> str:
    """Inductor's settings that differ from the defaults, without the number of workers, which does not change code."""
    import torch._inductor.config as inductor_config

    settings = inductor_config.save_config_portable()
    return describe({key: value for key, value in settings.items() if "compile_threads" not in key}, 0)


def _triton_version() -> str:
    try:
        return str(getattr(importlib.import_module("triton"), "__version__", "unknown"))
    except ImportError:
        return "none"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
