"""The files of a checkpoint: which ones hold its weights, how they are opened, and the names of their tensors.

Read are safetensors, and files of `torch.save` (`pytorch_model.bin`) with tensors alone. Training frameworks leave names of their
wrappers in checkpoints (`_orig_mod.` of torch.compile, `module.` of data-parallel modules, `base_model.model.` of PEFT), which
`without_wrappers` takes off.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchweave.config.model_source import check_no_pointer, read_json

INDEX = "model.safetensors.index.json"
_OLD, _OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""Dtypes by their names in safetensors."""
_PREFIXES = ("module.", "base_model.model.")
"""Wrappers of whole models: taken off where every name has them."""
_INFIXES = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Wrappers of modules, anywhere in a name."""
UNREADABLE = (SafetensorError, OSError, RuntimeError, pickle.UnpicklingError, EOFError)
"""Errors of opening or reading a damaged file."""


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a checkpoint; a single file takes precedence over an index, as in transformers.

    Raises:
        ValueError: there are none, one is missing, or one is a pointer of Git LFS.
    """
    files = _named_files(folder)
    for file in files:
        check_no_pointer(file)
    return files


def _named_files(folder: Path) -> list[Path]:
    single, old = folder / "model.safetensors", folder / _OLD
    if single.is_file():
        return [single]
    if (folder / INDEX).is_file():
        return _indexed(folder, INDEX)
    whole = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("consolidated")]
    if files := [path for path in whole if not path.name.startswith("adapter_")]:
        return files
    if old.is_file():
        return [old]
    if (folder / _OLD_INDEX).is_file():
        return _indexed(folder, _OLD_INDEX)
    if files := sorted(folder.glob("pytorch_model*.bin")):
        return files
    if other := sorted(
        [*folder.glob("consolidated*"), *folder.glob("*.pt"), *folder.glob("*.pth"), *folder.glob("*.bin")]
    ):
        raise ValueError(
            f"{folder} has weights only as {other[0].name}, whose names are not those of transformers: expected "
            f"model.safetensors, {INDEX} or {_OLD}; convert them to Hugging Face's layout."
        )
    raise ValueError(
        f"{folder} has no weights: expected model.safetensors or {INDEX}; use load_format=dummy for random weights."
    )


def _indexed(folder: Path, index_name: str) -> list[Path]:
    index = folder / index_name
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map; copy or download it again.")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{index} names {name!r}, which is no file of its folder; copy or download it again.")
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder} lacks {missing[0]}, which its index names; copy or download the missing files.")
    return [folder / name for name in names]


@contextlib.contextmanager
def open_weights(file: Path) -> Iterator[Any]:
    """Open a file of weights: a handle with safetensors' `keys()`, `get_slice(name)` and `get_tensor(name)`.

    Raises:
        ValueError: a file of `torch.save` holds more than tensors by name.
    """
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    else:
        yield TorchFile(file)


class TorchFile:
    """A file of `torch.save`, mapped into memory where it is in the present form; objects other than tensors are refused."""

    def __init__(self, file: Path) -> None:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_zip(file))
        except pickle.UnpicklingError as error:
            if "Unsupported" not in str(error) and "GLOBAL" not in str(error):
                raise
            raise ValueError(
                f"{file} holds Python objects other than tensors, which may run code when they are read; convert it to "
                "safetensors where you trust it (save_pretrained does)."
            ) from error
        if not isinstance(content, Mapping) or not all(isinstance(each, Tensor) for each in content.values()):
            raise ValueError(
                f"{file} is no file of a model's weights: expected tensors by their names alone; save the model's "
                "state_dict, or convert it to safetensors (save_pretrained does)."
            )
        self._tensors = {str(name): tensor for name, tensor in content.items()}

    def keys(self) -> Collection[str]:
        """Names of the tensors."""
        return self._tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        """The tensor, on the CPU."""
        return self._tensors[name].detach()

    def get_slice(self, name: str) -> TorchSlice:
        """The tensor, to be read in part."""
        return TorchSlice(self.get_tensor(name))


class TorchSlice:
    """A tensor with the methods of a slice of safetensors."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Its sizes."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Its dtype as safetensors names it."""
        return _DTYPES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


def _is_zip(file: Path) -> bool:
    with file.open("rb") as start:
        return start.read(4) == b"PK\x03\x04"


def without_wrappers(names: Collection[str]) -> dict[str, str]:
    """Name of each tensor without those of wrappers -> its name in the file.

    Raises:
        ValueError: two names would become one.
    """
    short = {name: name for name in names}
    for infix in _INFIXES:
        short = {name: other.replace(infix, "") for name, other in short.items()}
    for prefix in _PREFIXES * 2:  # in either order
        if short and all(other.startswith(prefix) for other in short.values()):
            short = {name: other.removeprefix(prefix) for name, other in short.items()}
    result: dict[str, str] = {}
    for name, other in short.items():
        if other in result:
            raise ValueError(
                f"This checkpoint has {result[other]} and {name}, which are one tensor, {other}; keep one of them."
            )
        result[other] = name
    return result
