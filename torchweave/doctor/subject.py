"""The subject of an examination: a module, the specs of its inputs, and its boundary ops."""

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
    """Spec of one argument of forward: a tensor with named dynamic sizes, as `float32[T,16]`, or numbers: `int`, `ints`.

    Attributes:
        dtype: a dtype of torch; `arange`: int64 that counts from 0; `int`, `ints`: a number or a list of numbers.
        shape: sizes, or names of dynamic sizes.
        below: exclusive upper bound of random integers: a number or a named size.
    """

    dtype: str
    shape: tuple[int | str, ...] = ()
    below: int | str = 2

    @classmethod
    def parse(cls, text: str) -> InputSpec:
        """Parse a spec; raises ValueError for invalid text."""
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
            raise ValueError(f"{text!r} describes no input: no value is below 0; write a larger number after <")
        return cls(match["dtype"], shape, below)

    @property
    def is_tensor(self) -> bool:
        return self.dtype not in ("int", "ints")

    def make(self, sizes: Mapping[str, int], generator: torch.Generator, variant: int) -> Any:
        """An argument with the given sizes; plain numbers follow `variant`."""
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
        """Forward's arguments: the first named size is `size`, other names are half of it, rounded up."""
        named = [name for spec in self.inputs.values() for name in spec.shape if isinstance(name, str)]
        sizes = {name: size if name == named[0] else (size + 1) // 2 for name in dict.fromkeys(named)}
        generator = torch.Generator().manual_seed(100 * size + variant)
        arguments = [spec.make(sizes, generator, variant) for spec in self.inputs.values()]
        return [item.to(self.device) if isinstance(item, Tensor) else item for item in arguments]

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
    """The subject named `module:attribute` or `file.py:attribute`: a function, a module, or a class of modules.

    Args:
        inputs: specs by forward's parameter names; None reads the attribute `doctor_inputs` of the subject.

    Raises:
        ValueError: the import fails, the attribute is no subject, or its inputs are missing or invalid.
    """
    path, _, attribute = target.rpartition(":")
    thing = _import(path)
    for part in attribute.split("."):
        if not hasattr(thing, part):
            raise ValueError(f"{path} has no {attribute}")
        thing = getattr(thing, part)
    if (isinstance(thing, type) and not issubclass(thing, nn.Module)) or not callable(thing):
        raise ValueError(f"{target} is of type {type(thing).__name__}; name a function, a module or a class of modules")
    specs = inputs or getattr(thing, "doctor_inputs", None)
    if not specs:
        raise ValueError(
            f"{target} has no input specs: give --input 'NAME=float32[T,16]' for each, in forward's order, or an "
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
                f"{name} is to be below {spec.below}, which is no size of an input; write a number or the name of a size"
            )
    return Subject(
        target, as_module(thing, target, tuple(parsed)), parsed, frozenset(getattr(thing, "doctor_boundary_ops", ()))
    )


def as_module(thing: Any, name: str, inputs: Sequence[str] = ()) -> nn.Module:
    """Convert a module, a class of modules or a function to a module; `inputs` are the function's argument names."""
    if isinstance(thing, nn.Module):
        return thing.eval()
    if isinstance(thing, type) and issubclass(thing, nn.Module):
        try:
            return thing().eval()
        except TypeError as error:
            raise ValueError(
                f"{name} cannot be made without arguments ({error}); name a function that uses it"
            ) from None
        except Exception as error:  # any error of the module
            raise ValueError(f"{name} cannot be made ({type(error).__name__}: {error})") from None
    return _function_module(thing, inputs)


def _function_module(function: Callable[..., Any], inputs: Sequence[str]) -> nn.Module:
    """A module whose forward has the function's parameters, which capture requires."""
    if unknown := [name for name in inputs if not name.isidentifier()]:
        raise ValueError(f"{unknown[0]!r} is not a valid parameter name")
    if taken := [name for name in inputs if keyword.iskeyword(name) or name in ("self", "function")]:
        raise ValueError(
            f"an input cannot be called {taken[0]!r} here; choose another name, inputs are passed by position"
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
            return sys.modules[name]  # a second import would register its ops again
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # tracing finds code through its module
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:  # any error of the imported code; a script may call sys.exit
        raise ValueError(f"{path} cannot be imported ({type(error).__name__}: {error})") from None
