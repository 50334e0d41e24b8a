"""Stream weights from safetensors files, tensor by tensor, to their final device and dtype.

The model is on the meta device. A checkpoint with other names or splits than the model (mostly experts) is converted by
transformers instead.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchweave.models.weights.files import UNREADABLE, open_weights, weight_files, without_wrappers
from torchweave.models.weights.shards import TensorShard
from torchweave.models.weights.unused import UnusedRule, adapter_hint, first_names
from torchweave.report import Report

Key = TypeVar("Key")
_NO_PIECES: Mapping[str, str] = {}
_TEXT_PART = re.compile(r"^(?P<base>model\.)?(language_model|text_model)\.")


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a checkpoint: its file, name, shape, size in bytes, and dtype as safetensors names it (`BF16`)."""

    file: Path
    name: str
    shape: tuple[int, ...]
    num_bytes: int
    dtype: str

    def read(self) -> Tensor:
        """The tensor, on the CPU."""
        return next(tensor for _, tensor in read_tensors({self.name: self}))


def read_tensors(stored: Mapping[Key, CheckpointTensor]) -> Iterator[tuple[Key, Tensor]]:
    """Read whole tensors on the CPU, file by file; yields each with its key."""
    by_file: dict[Path, list[tuple[Key, str]]] = {}
    for key, tensor in stored.items():
        by_file.setdefault(tensor.file, []).append((key, tensor.name))
    for file, entries in by_file.items():
        with open_weights(file) as tensors:
            for key, name in entries:
                yield key, tensors.get_tensor(name)


class TensorSetter(Protocol):
    """Sets tensors of a model as they are read.

    Attributes:
        dtypes: dtypes that differ from the model's, by tensor name.
    """

    @property
    def dtypes(self) -> dict[str, torch.dtype]: ...

    def set_tensor(self, model: nn.Module, name: str, tensor: Tensor) -> None: ...


class TensorAssembler(Protocol):
    """Assembles tensors from pieces.

    Attributes:
        pieces: checkpoint name -> name of the model's tensor that contains the piece.
    """

    @property
    def pieces(self) -> Mapping[str, str]: ...

    def num_bytes(self, name: str, stored: CheckpointTensor) -> int:
        """Bytes to read from a piece."""
        ...

    def add(self, name: str, part: Any, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Add a piece (a safetensors slice); returns the tensor once complete."""
        ...


class AssemblerGroup:
    """A `TensorAssembler` of several, each with its own pieces."""

    def __init__(self, assemblers: Sequence[TensorAssembler]) -> None:
        self._owners = {name: assembler for assembler in assemblers for name in assembler.pieces}
        self.pieces = {name: target for assembler in assemblers for name, target in assembler.pieces.items()}

    def num_bytes(self, name: str, stored: CheckpointTensor) -> int:
        return self._owners[name].num_bytes(name, stored)

    def add(self, name: str, part: Any, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        return self._owners[name].add(name, part, dtype, device)


def read_headers(folder: Path) -> dict[str, CheckpointTensor]:
    """Every tensor of a checkpoint by name, from the files' headers.

    Raises:
        ValueError: no files, or a missing or damaged file.
    """
    stored: dict[str, CheckpointTensor] = {}
    for file in weight_files(folder):
        try:
            with open_weights(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
                    part = tensors.get_slice(name)
                    shape = tuple(part.get_shape())
                    dtype = part.get_dtype()
                    stored[name] = CheckpointTensor(file, name, shape, _num_bytes(shape, dtype), dtype)
        except UNREADABLE as error:
            why = " ".join(str(error).split())[:200]
            raise ValueError(f"{file} is damaged or cut short ({why}); copy or download it again.") from error
    return {name: stored[in_file] for name, in_file in without_wrappers(stored).items()}


_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16, "U16": 16}


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * _BITS.get(dtype, 8) // 8


def map_tensor_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Checkpoint name -> model name, for names that exist in the model.

    Checkpoint names may lack or add the base model's prefix and the prefix of a multimodal model's text part, or be those of an
    earlier version of the class, which transformers renames.
    """
    wanted = loadable_tensors(model).keys()
    renamed, others = {}, []
    for name in names:
        found = _find_name(name, model.base_model_prefix, wanted)
        if found is None:
            others.append(name)
        else:
            renamed[name] = found
    renamings = conversions(model)[1] if others else []
    taken = set(renamed.values())
    for name in others if renamings else ():
        found = _find_name(rename(renamings, name), model.base_model_prefix, wanted)
        if found is not None and found not in taken:
            renamed[name] = found
            taken.add(found)
    return renamed


def rename(renamings: Iterable[Any], name: str) -> str:
    """A checkpoint name after transformers' renamings."""
    for renaming in renamings:
        name = renaming.rename_source_key(name)[0]
    return name


def _find_name(name: str, base: str, wanted: Collection[str]) -> str | None:
    """The name of a tensor in the model, by its name with other prefixes."""
    prefix = f"{base}."
    text = _TEXT_PART.sub(lambda match: match["base"] or "", name)
    candidates = (name, prefix + name, name.removeprefix(prefix), text)
    return next((each for each in candidates if each in wanted), None)


def loadable_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, tied ones under each of their names."""
    return model.state_dict(keep_vars=True)


def checkpoint_shapes(model: nn.Module, shards: Mapping[str, TensorShard]) -> dict[str, tuple[int, ...]]:
    """Shape of each loadable tensor in the checkpoint, of which `shards` are parts."""
    return {
        name: shards[name].full if name in shards else tuple(tensor.shape)
        for name, tensor in loadable_tensors(model).items()
    }


def conversions(model: PreTrainedModel) -> tuple[list[Any], list[Any]]:
    """transformers' checkpoint conversions of the model: (tensor converters, renamings)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    transforms = get_model_conversion_mapping(model, add_legacy=False) or []
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    return converters, [transform for transform in transforms if not isinstance(transform, WeightConverter)]


def needs_conversion(model: PreTrainedModel, names: Iterable[str]) -> bool:
    """Whether the checkpoint's tensors do not map one to one to the model's."""
    names = list(names)
    converters, renamings = conversions(model)
    patterns = [re.compile(pattern) for converter in converters for pattern in converter.source_patterns]
    if any(pattern.search(name) for pattern in patterns for name in names):
        return True
    renamed = map_tensor_names(model, names)
    return bool(converters or renamings) and _missing(model, set(renamed.values())) != set()


def _missing(model: PreTrainedModel, present: set[str]) -> set[str]:
    missing = set(loadable_tensors(model)) - present
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if target in present or source in present:
            missing -= {target, source}
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return {name for name in missing if not any(re.search(pattern, name) for pattern in ignored)}


def check_tensor_names(
    model: PreTrainedModel,
    stored: dict[str, CheckpointTensor],
    renamed: dict[str, str],
    folder: Path,
    shards: Mapping[str, TensorShard],
    pieces: Mapping[str, str],
    rule: UnusedRule,
    report: Report,
) -> None:
    """Raise `ValueError` if tensors are missing, have other shapes, or are unused under the config.

    Args:
        shards: parts of whole checkpoint tensors in the model.
        pieces: checkpoint name -> model name of tensors that are pieces.
        rule: which tensors may be unused.
    """
    wanted = checkpoint_shapes(model, shards)
    if missing := sorted(_missing(model, {*renamed.values(), *pieces.values()})):
        raise ValueError(missing_tensors_message(model, folder, missing, stored))
    for name, target in renamed.items():
        if wanted[target] != stored[name].shape:
            raise ValueError(
                f"{stored[name].file} has {name} of shape {list(stored[name].shape)}, expected "
                f"{list(wanted[target])}; check that config.json belongs to these weights."
            )
    rule.check(model, folder, stored.keys() - renamed.keys() - pieces.keys(), wanted, report)


def missing_tensors_message(model: PreTrainedModel, folder: Path, missing: list[str], stored: Iterable[str]) -> str:
    """Error message for tensors missing from a checkpoint."""
    prefix, kind = f"{model.base_model_prefix}.", type(model).__name__
    for name in missing:
        ending = f".{name.removeprefix(prefix)}"
        elsewhere = [each for each in stored if each.endswith(ending)] if "embed" in name else []
        if elsewhere:  # layers may be an encoder's, but the token embedding is unique
            return (
                f"{folder} has {elsewhere[0]} where {kind} has {name}: the names of this checkpoint's text part are "
                "unknown, so it cannot be served."
            )
    hint = adapter_hint(stored) or "check that config.json belongs to these weights"
    return f"{folder} lacks {first_names(missing)} of {kind}: expected every tensor that config.json implies; {hint}."


def stream_weights(
    model: PreTrainedModel,
    stored: dict[str, CheckpointTensor],
    renamed: dict[str, str],
    device: torch.device,
    report: Report,
    setter: TensorSetter | None,
    shards: Mapping[str, TensorShard],
    assembler: TensorAssembler | None,
) -> None:
    """Fill the model from the files, tensor by tensor, and tie its weights.

    Args:
        shards: tensors to read in part.
        assembler: assembles tensors that the checkpoint stores in pieces.
    """
    dtypes = dtype_plan(model) | (setter.dtypes if setter is not None else {})
    place = setter.set_tensor if setter is not None else set_tensor
    all_names = set(loadable_tensors(model))
    by_file: dict[Path, list[str]] = {}
    pieces = assembler.pieces if assembler is not None else _NO_PIECES
    for name in (*renamed, *pieces):
        by_file.setdefault(stored[name].file, []).append(name)
    sizes = {
        name: shard.num_bytes(stored[name].num_bytes) if (shard := shards.get(target)) else stored[name].num_bytes
        for name, target in renamed.items()
    }
    if assembler is not None:
        sizes |= {name: assembler.num_bytes(name, stored[name]) for name in pieces}
    with report.progress("weights", sum(sizes.values())) as advance:
        for file, names in by_file.items():
            with _open_unchanged(file) as tensors:
                for name in names:
                    advance(sizes[name], file.name)
                    if assembler is not None and name in pieces:
                        part = tensors.get_slice(stored[name].name)
                        if (whole := assembler.add(name, part, dtypes[pieces[name]], device)) is not None:
                            place(model, pieces[name], whole)
                        continue
                    target, in_file = renamed[name], stored[name].name
                    shard = shards.get(target)
                    tensor = tensors.get_tensor(in_file) if shard is None else shard.extract(tensors.get_slice(in_file))
                    # Always copy: the model must not keep the file's pages mapped.
                    place(model, target, tensor.to(device=device, dtype=dtypes[target], copy=shard is None))
    model.tie_weights(missing_keys=all_names - {*renamed.values(), *pieces.values()}, recompute_mapping=False)


@contextlib.contextmanager
def _open_unchanged(file: Path) -> Iterator[Any]:
    """Open a file of weights.

    Raises:
        ValueError: the file does not have the tensors of its header, or was written until the end of the context.
    """
    try:
        before = file.stat()
        with open_weights(file) as tensors:
            yield tensors
        after = file.stat()
    except (SafetensorError, FileNotFoundError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} changed while it was loaded ({error}); load the model again.") from error
    if (before.st_ino, before.st_mtime_ns, before.st_size) != (after.st_ino, after.st_mtime_ns, after.st_size):
        raise ValueError(f"{file} changed while it was loaded; load the model again.")


def init_random_weights(
    model: PreTrainedModel,
    device: torch.device,
    report: Report,
    setter: TensorSetter | None,
    shards: Mapping[str, TensorShard],
    whole: Mapping[str, Tensor] | None,
) -> None:
    """Fill random weights on the device: normal matrices and embeddings, norms of one, all else zero.

    Args:
        shards: parts of tensors; ranks get parts of the same random numbers.
        whole: `untied_tensors` of the whole model if this one lacks layers, so that stages get the same random numbers.
    """
    own = untied_tensors(model)
    wanted = own if whole is None else whole
    dtypes = dtype_plan(model, wanted)
    place = setter.set_tensor if setter is not None else set_tensor
    generator = torch.Generator(device).manual_seed(0)
    num_bytes = sum(wanted[name].numel() * dtypes[name].itemsize for name in wanted)
    with report.progress("random weights", num_bytes) as advance:
        for name in wanted:
            shard, dtype = shards.get(name), dtypes[name]
            shape = wanted[name].shape if shard is None else shard.full
            tensor = torch.zeros(shape, dtype=dtype, device=device)
            if dtype.is_floating_point and len(shape) >= 2:
                tensor.normal_(0.0, 0.02, generator=generator)
            elif dtype.is_floating_point and name.endswith("weight"):
                tensor.fill_(1.0)
            if name in own:
                place(model, name, tensor if shard is None else shard.extract(tensor))
            advance(tensor.numel() * dtype.itemsize, name)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    model.tie_weights(missing_keys=set(tied), recompute_mapping=False)


def untied_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Loadable tensors without those tied to another."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {name: tensor for name, tensor in loadable_tensors(model).items() if name not in tied}


def dtype_plan(model: PreTrainedModel, tensors: Mapping[str, Tensor] | None = None) -> dict[str, torch.dtype]:
    """Dtype by tensor: the model's, or float32 where the model's class requires it."""
    strict = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if model.config.dtype == torch.float16:
        strict |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    keep = re.compile("|".join(rf"((^|\.){re.escape(name)}($|\.))" for name in sorted(strict))) if strict else None
    return {
        name: torch.float32 if keep and tensor.is_floating_point() and keep.search(name) else tensor.dtype
        for name, tensor in (loadable_tensors(model) if tensors is None else tensors).items()
    }


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Set the parameter or buffer `name`."""
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def rebuild_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute buffers that checkpoints lack (rotary frequencies, embedding scales), as transformers does after meta init.

    Raises:
        ValueError: a module cannot rebuild one of its buffers.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    owners: list[tuple[PreTrainedModel, nn.Module, str]] = []
    for owner, module in _with_pretrained(model, model):
        rebuilt = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for name, buffer in rebuilt.items():
            fresh = torch.empty_like(buffer, device=device)
            # A buffer that is still NaN afterwards was not rebuilt.
            fresh.fill_(torch.nan if fresh.is_floating_point() else 0)
            module._buffers[name] = fresh
            owners.append((owner, module, name))
        if rebuilt:
            with torch.no_grad():
                owner._init_weights(module)
    # Some models compute a buffer of their layers at once (Falcon-H1's multipliers).
    for owner in {id(owner): owner for owner, module, name in owners if _is_missing(module._buffers[name])}.values():
        with torch.no_grad():
            owner._init_weights(owner)
    for _, module, name in owners:
        if _is_missing(module._buffers[name]):
            raise ValueError(
                f"{type(module).__name__} cannot rebuild its buffer {name!r} after construction on the meta device; "
                "update transformers."
            )
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not left, f"tensors still on meta after loading: {left[:5]}"


def _is_missing(buffer: Tensor | None) -> bool:
    return (
        buffer is not None and buffer.is_floating_point() and bool(buffer.numel()) and bool(torch.isnan(buffer).all())
    )


def _with_pretrained(owner: PreTrainedModel, module: nn.Module) -> Iterable[tuple[PreTrainedModel, nn.Module]]:
    """Every module with its nearest enclosing `PreTrainedModel`, whose `_init_weights` rebuilds it."""
    yield owner, module
    for child in module.children():
        yield from _with_pretrained(child if isinstance(child, PreTrainedModel) else owner, child)
