"""What is examined: a module, how to make its arguments at a size, and which ops the graph is cut at."""

from __future__ import annotations

import importlib
import importlib.util
import keyword
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchweave.compiler.ir.symbols import DynamicDims
from torchweave.config.options import expand_path

_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\w\s,]*)\](?:<(?P<below>\w+))?$")
_FORMS = "float32[T,16], int64[T]<1000 (values below 1000), arange[T], int, or ints"
_INTS = ((5, (3, 9, 6)), (9, (8, 2, 4)), (12, (5, 7, 4)))


@dataclass(frozen=True)
class InputSpec:
    """One argument of forward, as `float32[T,16]`: a tensor whose named sizes vary; `int`, `ints`: numbers that vary.

    Attributes:
        dtype: of the tensor; `arange` is int64 and counts; `int` and `ints` are a number and a list of numbers.
        shape: numbers, or names of sizes that vary.
        below: integers are drawn below this number, or below a named size.
    """

    dtype: str
    shape: tuple[int | str, ...] = ()
    below: int | str = 2

    @classmethod
    def parse(cls, text: str) -> InputSpec:
        """Raises ValueError for text that is no spec."""
        text = text.strip()
        if text in ("int", "ints"):
            return cls(text)
        match = _TENSOR.fullmatch(text)
        dtype = getattr(torch, match["dtype"], None) if match else None
        if match is None or not (isinstance(dtype, torch.dtype) or match["dtype"] == "arange"):
            raise ValueError(f"{text!r} describes no input; write {_FORMS}")
        shape = tuple(_size(part.strip()) for part in match["shape"].split(",") if part.strip())
        below = _size(match["below"] or "2")
        if match["dtype"] == "arange" and len(shape) != 1:
            raise ValueError(f"{text!r} describes no input: arange counts along one size; write arange[T]")
        if below == 0:
            raise ValueError(f"{text!r} describes no input: no value is below 0; write a larger number behind <")
        return cls(match["dtype"], shape, below)

    @property
    def is_tensor(self) -> bool:
        return self.dtype not in ("int", "ints")

    def make(self, sizes: Mapping[str, int], generator: torch.Generator, variant: int) -> Any:
        """An argument, with the given sizes; integers outside tensors take the value of the variant."""
        if not self.is_tensor:
            number, numbers = _INTS[variant % len(_INTS)]
            return number if self.dtype == "int" else list(numbers)
        shape = [sizes[size] if isinstance(size, str) else size for size in self.shape]
        if self.dtype == "arange":
            return torch.arange(shape[0])
        dtype = getattr(torch, self.dtype)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(dtype)
        below = sizes[self.below] if isinstance(self.below, str) else self.below
        return torch.randint(0, below, shape, generator=generator).to(dtype)


def _size(text: str) -> int | str:
    return int(text) if text.isdigit() else text


@dataclass(frozen=True)
class Subject:
    """A module and its inputs."""

    name: str
    module: nn.Module
    inputs: Mapping[str, InputSpec]
    boundary_ops: frozenset[str] = frozenset()
    device: str = "cpu"

    def arguments(self, size: int, variant: int = 0) -> list[Any]:
        """Forward's arguments where the first named size is `size`; other names get about half of it."""
        named = [name for spec in self.inputs.values() for name in spec.shape if isinstance(name, str)]
        sizes = {name: size if name == named[0] else (size + 1) // 2 for name in dict.fromkeys(named)}
        generator = torch.Generator().manual_seed(100 * size + variant)
        made = [spec.make(sizes, generator, variant) for spec in self.inputs.values()]
        return [item.to(self.device) if isinstance(item, Tensor) else item for item in made]

    @property
    def dynamic(self) -> DynamicDims:
        return {
            name: {dim: size for dim, size in enumerate(spec.shape) if isinstance(size, str)}
            for name, spec in self.inputs.items()
            if any(isinstance(size, str) for size in spec.shape)
        }

    @property
    def takes_numbers(self) -> bool:
        return not all(spec.is_tensor for spec in self.inputs.values())


def find(target: str, inputs: Mapping[str, str] | None = None) -> Subject:
    """The subject that `module:attribute` or `file.py:attribute` names: a function, a module, or a class of modules.

    Args:
        inputs: specs by forward's parameter names; None reads the attribute `doctor_inputs` of what is named.

    Raises:
        ValueError: it cannot be imported, is nothing to examine, or its inputs are not known.
    """
    path, _, attribute = target.rpartition(":")
    found = _import(path)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{path} has no {attribute}")
        found = getattr(found, part)
    if (isinstance(found, type) and not issubclass(found, nn.Module)) or not callable(found):
        raise ValueError(f"{target} is of type {type(found).__name__}; name a function, a module or a class of modules")
    specs = inputs or getattr(found, "doctor_inputs", None)
    if not specs:
        raise ValueError(
            f"the inputs of {target} are not known: give --input 'NAME=float32[T,16]' for each, in forward's order, or an "
            f"attribute doctor_inputs = {{'NAME': 'float32[T,16]'}}; a spec is {_FORMS}"
        )
    if not (isinstance(specs, Mapping) and all(isinstance(each, str) for pair in specs.items() for each in pair)):
        raise ValueError(
            f"doctor_inputs of {target} is {specs!r}; write {{'NAME': 'float32[T,16]'}}; a spec is {_FORMS}"
        )
    parsed = {name: InputSpec.parse(text) for name, text in specs.items()}
    sizes = {size for spec in parsed.values() for size in spec.shape}
    for name, spec in parsed.items():
        if isinstance(spec.below, str) and spec.below not in sizes:
            raise ValueError(
                f"{name} is to be below {spec.below}, which is no size of an input; write a number, or name a size"
            )
    return Subject(
        target, as_module(found, target, tuple(parsed)), parsed, frozenset(getattr(found, "doctor_boundary_ops", ()))
    )


def as_module(thing: Any, name: str, inputs: Sequence[str] = ()) -> nn.Module:
    """A module of whatever can be examined; `inputs` are the names of a function's arguments."""
    if isinstance(thing, nn.Module):
        return thing.eval()
    if isinstance(thing, type) and issubclass(thing, nn.Module):
        try:
            return thing().eval()
        except TypeError as error:
            raise ValueError(
                f"{name} cannot be made without arguments ({error}); name a function that uses it"
            ) from None
        except Exception as error:  # whatever the module raises
            raise ValueError(f"{name} cannot be made ({type(error).__name__}: {error})") from None
    return _function_module(thing, inputs)


def _function_module(function: Callable[..., Any], inputs: Sequence[str]) -> nn.Module:
    """A module whose forward has the function's parameters, as capture asks for."""
    if unknown := [name for name in inputs if not name.isidentifier()]:
        raise ValueError(f"{unknown[0]!r} is no name of a parameter")
    if taken := [name for name in inputs if keyword.iskeyword(name) or name in ("self", "function")]:
        raise ValueError(
            f"an input cannot be called {taken[0]!r} here; take another name, since it is their order that counts"
        )
    names = ", ".join(inputs)
    namespace = {"function": function}
    exec(compile(f"def forward(self, {names}): return function({names})", "<doctor>", "exec"), namespace)
    module = type(getattr(function, "__name__", "Function"), (nn.Module,), {"forward": namespace["forward"]})()
    return module.eval()


def _import(path: str) -> Any:
    file = expand_path(path).absolute() if path.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        if file is None:
            if "" not in sys.path and str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(path)
        name = f"torchweave_doctor_{file.stem}"
        if getattr(sys.modules.get(name), "__file__", None) == str(file):
            return sys.modules[name]  # a module registers its ops once
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # tracing looks code up by its module
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:  # whatever the imported code raises; a script may end itself
        raise ValueError(f"{path} cannot be imported ({type(error).__name__}: {error})") from None
