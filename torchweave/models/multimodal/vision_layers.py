"""The layers of a vision tower as modules over tensors, which can be compiled: found, watched while they run, and replaced.

A tower is not captured as a whole: it splits and indexes by the sizes of an image, which are values. Its layers, where the time
goes, compute the same for every image, and equal layers share one compiled forward.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchweave.models.multimodal.support import decoder_of
from torchweave.ops.attention.varlen import has_triton_kernel, takes_triton_kernel, varlen_attention

VARLEN_ATTENTION = "torchweave_varlen_flash_attention"
"""Name in transformers' registry. It contains `flash`: towers pass `cu_seqlens` to such an attention and split for others."""
BATCH_ATTENTION = "torchweave_varlen_sdpa"
"""Name in transformers' registry for towers whose sequences are a batch; the masks of these are those of `sdpa`."""
MAX_TENSORS = 8
"""Most tensors among the arguments of a layer."""
_IGNORED = "max_seqlen"
"""Argument of layers that `varlen_attention` does without: it follows from `cu_seqlens`."""
_LAYER_NUMBERS = frozenset({"layer_idx", "layer_number", "training"})
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class UnsupportedLayer(Exception):
    """A layer cannot be compiled as a module over tensors; the message is a clause that says why."""


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor in the arguments of a layer."""

    index: int


def _take_tensors(thing: Any, tensors: list[Tensor]) -> Any:
    """`thing` with places instead of its tensors, which are appended to `tensors`."""
    if isinstance(thing, Tensor):
        tensors.append(thing)
        return TensorPlace(len(tensors) - 1)
    if type(thing) in (tuple, list):
        return tuple(_take_tensors(item, tensors) for item in thing)
    if isinstance(thing, dict):
        return {name: _take_tensors(item, tensors) for name, item in thing.items() if name != _IGNORED}
    if isinstance(thing, _PLAIN):
        return thing
    raise UnsupportedLayer(f"an argument is a {type(thing).__name__}")


def _fill(thing: Any, tensors: Sequence[Tensor | None]) -> Any:
    """The arguments with their tensors in place."""
    if isinstance(thing, TensorPlace):
        return tensors[thing.index]
    if isinstance(thing, tuple):
        return tuple(_fill(item, tensors) for item in thing)
    if isinstance(thing, dict):
        return {name: _fill(item, tensors) for name, item in thing.items()}
    return thing


@dataclass(frozen=True)
class Arguments:
    """Arguments of one call of a layer: their tensors, and the rest with places for them."""

    structure: Any
    tensors: tuple[Tensor, ...]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Raises UnsupportedLayer for arguments that are neither tensors nor plain values."""
        tensors: list[Tensor] = []
        structure = _take_tensors((args, dict(kwargs)), tensors)
        if len(tensors) > MAX_TENSORS:
            raise UnsupportedLayer(f"its arguments have {len(tensors)} tensors, and {MAX_TENSORS} is the limit")
        return Arguments(structure, tuple(tensors))


class LayerCall(nn.Module):
    """A layer as a module over the tensors among its arguments."""

    def __init__(self, layer: nn.Module, structure: Any) -> None:
        super().__init__()
        self.layer = layer
        self.arguments = structure

    def forward(
        self,
        a: Tensor,
        b: Tensor | None = None,
        c: Tensor | None = None,
        d: Tensor | None = None,
        e: Tensor | None = None,
        f: Tensor | None = None,
        g: Tensor | None = None,
        h: Tensor | None = None,
    ) -> Any:
        """The layer's result."""
        args, kwargs = _fill(self.arguments, (a, b, c, d, e, f, g, h))
        return self.layer.forward(*args, **kwargs)  # hooks of the layer itself run outside, around what is compiled


INPUT_NAMES = tuple(inspect.signature(LayerCall.forward).parameters)[1:]


def _description(layer: nn.Module) -> Any:
    """Classes, plain attributes and shapes of a layer; layers with equal descriptions share one compiled forward."""

    def plain(module: nn.Module) -> Any:
        return {
            name: value if isinstance(value, (*_PLAIN, tuple)) else type(value).__qualname__
            for name, value in vars(module).items()
            if not name.startswith("_") and name not in _LAYER_NUMBERS
        }

    tensors = [(name, t.shape, t.stride(), t.dtype) for name, t in [*layer.named_parameters(), *layer.named_buffers()]]
    return [(name, type(module), plain(module)) for name, module in layer.named_modules()], tensors


def tower_layers(model: PreTrainedModel) -> list[list[nn.Module]]:
    """Groups of equal layers of the vision tower: those of the longest module list outside the decoder."""
    decoder = decoder_of(model)
    inside = {id(module) for module in decoder.modules()}
    lists = [[*module] for module in model.modules() if isinstance(module, nn.ModuleList) and id(module) not in inside]
    layers = max(lists, key=len, default=[])
    groups: list[tuple[Any, list[nn.Module]]] = []
    for layer in layers:
        description = _description(layer)
        group = next((group for known, group in groups if known == description), None)
        if group is None:
            groups.append((description, [layer]))
        else:
            group.append(layer)
    return [group for _, group in groups]


@contextmanager
def watch(layers: Sequence[nn.Module]) -> Iterator[list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The arguments of the calls of layers while the context is entered."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    with ExitStack() as stack:
        for layer in layers:
            hook = layer.register_forward_pre_hook(
                lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
            )
            stack.callback(hook.remove)
        yield calls


@contextmanager
def without_hooks(layer: nn.Module) -> Iterator[None]:
    """The modules of a layer without forward hooks; those of transformers, which record what is asked for, cannot be traced."""
    hooks = [(module, module._forward_hooks) for module in layer.modules()]
    for module, of_module in hooks:
        module._forward_hooks = type(of_module)()
    try:
        yield
    finally:
        for module, of_module in hooks:
            module._forward_hooks = of_module


def use_varlen_attention(layers: Sequence[nn.Module]) -> Callable[[], None]:
    """Let layers call `varlen_attention`, without host reads: those with `cu_seqlens`, and on a GPU with its Triton kernel those
    with torch's attention, for the calls that the kernel takes; returns a function that restores theirs."""
    packed = all("cu_seqlens" in inspect.signature(type(layer).forward).parameters for layer in layers)
    if not packed and not has_triton_kernel(next(layers[0].parameters()).device):
        return lambda: None
    ALL_ATTENTION_FUNCTIONS.register(VARLEN_ATTENTION, _varlen_forward)
    ALL_ATTENTION_FUNCTIONS.register(BATCH_ATTENTION, _batch_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(BATCH_ATTENTION, sdpa_mask)
    modules = [module for layer in layers for module in layer.modules() if hasattr(module, "config")]
    configs: dict[int, Any] = {id(module.config): module.config for module in modules}
    before = [(config, config._attn_implementation) for config in configs.values()]
    for config, name in before:
        if packed or name == "sdpa":
            config._attn_implementation = VARLEN_ATTENTION if packed else BATCH_ATTENTION

    def restore() -> None:
        for config, name in before:
            config._attn_implementation = name

    return restore


def _varlen_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: `[1, H, S, D]` -> `[1, S, H, D]`."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    heads = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return varlen_attention(*heads, cu_seq_lens_q, scale)[None], None


def _batch_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: `[B, H, S, D]` -> `[B, S, H, D]`, each of the batch a sequence."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = attention_mask is None and position_bias is None and not causal and not others.get("dropout")
    if not (plain and query.shape == key.shape == value.shape and takes_triton_kernel(query, query.shape[0], scale)):
        others |= {"scaling": scaling, "is_causal": is_causal, "position_bias": position_bias}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)
    batch, heads, length, head_dim = query.shape
    cu_seqlens = torch.arange(batch + 1, device=query.device) * length
    packed = (tensor.transpose(1, 2).reshape(batch * length, heads, head_dim) for tensor in (query, key, value))
    return varlen_attention(*packed, cu_seqlens, scale).view(batch, length, heads, head_dim), None


@dataclass
class Signature:
    """The calls that a compiled layer takes.

    Attributes:
        structure: the arguments, with places for their tensors.
        sizes, dtypes: of each tensor; a dynamic size by its name.
        dynamic: names of the dynamic sizes, by input and dimension.
        limits: smallest and largest value of a dynamic size.
    """

    structure: Any
    sizes: tuple[tuple[int | str, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    dynamic: dict[str, dict[int, str]] = field(default_factory=dict)
    limits: tuple[int, int] = (2, sys.maxsize)

    @staticmethod
    def of(examples: Sequence[Arguments]) -> Signature:
        """From calls for images of different sizes: a size that differs between them is dynamic.

        Raises:
            UnsupportedLayer: calls differ in more than the sizes of tensors.
        """
        first = examples[0]
        if any(each.structure != first.structure for each in examples):
            raise UnsupportedLayer("an argument that is no tensor depends on the image")
        if any([t.dim() for t in each.tensors] != [t.dim() for t in first.tensors] for each in examples):
            raise UnsupportedLayer("the number of dimensions depends on the image")
        names: dict[tuple[int, ...], str] = {}
        signature = Signature(first.structure, (), tuple(tensor.dtype for tensor in first.tensors))
        for name, *tensors in zip(INPUT_NAMES, *(each.tensors for each in examples), strict=False):
            sizes: list[int | str] = []
            for dim, values in enumerate(zip(*(tensor.shape for tensor in tensors), strict=True)):
                if len(set(values)) == 1:
                    sizes.append(values[0])
                    continue
                symbol = names.setdefault(values, f"S{len(names)}")
                signature.dynamic.setdefault(name, {})[dim] = symbol
                sizes.append(symbol)
            signature.sizes += (tuple(sizes),)
        return signature

    def matches(self, call: Arguments) -> bool:
        """Whether the compiled layer takes this call."""
        if call.structure != self.structure or tuple(tensor.dtype for tensor in call.tensors) != self.dtypes:
            return False
        values: dict[str, int] = {}
        for tensor, sizes in zip(call.tensors, self.sizes, strict=True):
            if tensor.dim() != len(sizes):
                return False
            for size, expected in zip(tensor.shape, sizes, strict=True):
                known = values.setdefault(expected, size) if isinstance(expected, str) else expected
                if size != known:
                    return False
        return all(self.limits[0] <= size <= self.limits[1] for size in values.values())


def replace_forward(layer: nn.Module, signature: Signature, compiled: Callable[..., Any]) -> None:
    """Let a layer call `compiled` with the tensors of each call that it takes, and its own forward otherwise."""
    plain = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            call = Arguments.of(args, kwargs)
        except UnsupportedLayer:
            return plain(*args, **kwargs)
        if not signature.matches(call):
            return plain(*args, **kwargs)
        return compiled(*(tensor.contiguous() for tensor in call.tensors))

    layer.forward = forward  # type: ignore[method-assign]


def restore_forward(layers: Iterable[nn.Module]) -> None:
    """Give modules the forward of their class back."""
    for layer in layers:
        vars(layer).pop("forward", None)
