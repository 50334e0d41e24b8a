"""Pipeline parallelism: remove other stages' layers from an unmodified model and put placeholders in their place.

Other layers are removed before weights are read. Marker ops delimit the stage in the captured graph, which is cut there; dead
code elimination removes unneeded computation outside the layers (positions, masks, the last norm).
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import torchweave.ops.pipeline_marks  # noqa: F401  (defines torchweave::stage_input)
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.models.adapt import ModelLayers, model_layers, renumber_attention_layers
from torchweave.models.attention import UnsupportedModel
from torchweave.models.hooks.recurrent import hook_recurrent_layers, is_recurrent
from torchweave.models.multimodal.support import decoder_of
from torchweave.ops.attention.op import LayerSpec
from torchweave.report import Report

T = TypeVar("T")
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class PipelineStage:
    """The part of a model on one pipeline stage.

    Attributes:
        number, size: index of the stage and number of stages.
        layers: name of the list of layers.
        begin, end: layers `begin` to `end - 1` belong to this stage.
        num_layers: of the whole model.
        specs: of all attention layers of the whole model.
        attention: numbers of this stage's attention layers among them.
        has_recurrent_layers: layers of any stage have a recurrent state.
        width, dtype: of the hidden states sent between stages, `[1, T, width]`.
        num_returned: length of the tuple that a layer returns; 0: it returns a tensor.
        embedding, head: names of the modules with vocabulary weights.
        tied: embedding and head share a weight, which the first and the last stage both hold.
    """

    number: int
    size: int
    layers: str
    begin: int
    end: int
    num_layers: int
    specs: tuple[LayerSpec, ...]
    attention: tuple[int, ...]
    has_recurrent_layers: bool
    width: int
    dtype: torch.dtype
    num_returned: int
    embedding: str
    head: str
    tied: bool

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.size - 1

    def local_layers(self, of_all_layers: Sequence[T]) -> list[T]:
        """This stage's part of a sequence over all attention layers."""
        return [of_all_layers[number] for number in self.attention]

    def filter_checkpoint(
        self, stored: Mapping[str, T], of_any_stage: Collection[str], own: Collection[str]
    ) -> dict[str, T]:
        """Drop the tensors of other stages from a checkpoint, layers whatever the name prefix of its layers.

        Args:
            of_any_stage: checkpoint names of parameters of the whole model.
            own: those of this stage, of which some may be in other lists of layers (a vision tower's).
        """
        layer = re.compile(rf"(?:^|\.){re.escape(self.layers.rpartition('.')[2])}\.(\d+)\.")
        others = {*range(self.num_layers)} - {*range(self.begin, self.end)}
        return {
            name: tensor
            for name, tensor in stored.items()
            if name in own
            or (name not in of_any_stage and ((match := layer.search(name)) is None or int(match[1]) not in others))
        }

    def layer_of(self, name: str) -> int | None:
        """Index of the layer of a module or parameter of the whole model; None outside the layers."""
        if not name.startswith(f"{self.layers}."):
            return None
        return int(name.removeprefix(f"{self.layers}.").partition(".")[0])

    def owns(self, name: str) -> bool:
        """Whether this stage holds a module or parameter of the whole model."""
        layer = self.layer_of(name)
        return layer is None or self.begin <= layer < self.end


def stage_layers(num_layers: int, number: int, size: int) -> tuple[int, int]:
    """(begin, end) of a stage's layers: evenly distributed, with the remainder on the first stages."""
    each, more = divmod(num_layers, size)
    begin = number * each + min(number, more)
    return begin, begin + each + (number < more)


def make_pipeline_stage(
    model: PreTrainedModel, layers: ModelLayers, process_groups: ProcessGroups, report: Report
) -> tuple[PipelineStage, ModelLayers]:
    """Reduce a model on the meta device to the stage of this rank; returns the stage and its layers with state.

    Raises:
        UnsupportedModel: the model cannot be split into stages; the message gives the reason.
    """
    name, whole = type(model).__name__, sum(parameter.numel() for parameter in model.parameters())
    stage = _stage_of(model, layers, process_groups.stage, process_groups.pipeline_parallel_size)
    remove_other_stages(model, stage)
    try:
        numbers, recurrent = renumber_attention_layers(model)
    except UnsupportedModel as refusal:
        raise _refusal(name, "its forward reads more of the other layers than their hidden states") from refusal
    stage = replace(stage, attention=tuple(numbers))
    report.event(
        "pipeline_parallel",
        stage=stage.number,
        stages=stage.size,
        layers=[stage.begin, stage.end],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        of=whole,
        bytes_per_token=stage.width * stage.dtype.itemsize,
    )
    return stage, ModelLayers(stage.local_layers(layers.attention), recurrent)


def remove_other_stages(model: PreTrainedModel, stage: PipelineStage) -> None:
    """Remove other stages' modules from a whole model, on meta or not, and number the recurrent states that are left."""
    layers: Any = model.get_submodule(stage.layers)
    for index, layer in enumerate(layers):
        if not stage.begin <= index < stage.end:
            mark = {stage.begin - 1: "stage_input", stage.end: "stage_output"}.get(index, "")
            layers[index] = MissingLayer(layer, mark, stage.num_returned)
    has_vocabulary = stage.tied and (stage.is_first or stage.is_last)
    if not (stage.is_first or has_vocabulary):
        _replace(model, stage.embedding, MissingEmbedding(model.get_submodule(stage.embedding)))
    if not (stage.is_last or has_vocabulary):
        _replace(model, stage.head, MissingHead(model.get_submodule(stage.head)))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    left = model.state_dict(keep_vars=True).keys()
    model.all_tied_weights_keys = {name: source for name, source in tied.items() if {name, source} <= left}
    hook_recurrent_layers(decoder_of(model))


@contextlib.contextmanager
def own_layers_only(model: nn.Module, stage: PipelineStage) -> Iterator[None]:
    """Remove the placeholders from the list of layers, for initialization by transformers, which reads modules of layers."""
    owner, _, leaf = stage.layers.rpartition(".")
    parent, layers = model.get_submodule(owner), model.get_submodule(stage.layers)
    setattr(parent, leaf, nn.ModuleList(list(layers.children())[stage.begin : stage.end]))
    try:
        yield
    finally:
        setattr(parent, leaf, layers)


class MissingLayer(nn.Module):
    """Placeholder of another stage's layer: returns the hidden states, through a marker op at the stage's boundaries."""

    is_missing = True

    def __init__(self, layer: nn.Module, mark: str, num_returned: int) -> None:
        super().__init__()
        own = [vars(cls) for cls in reversed(type(layer).__mro__) if cls not in nn.Module.__mro__]
        # E.g. the attention type, which models read from their layers.
        for name, setting in [pair for each in (*own, vars(layer)) for pair in each.items()]:
            if not name.startswith("_") and isinstance(setting, _PLAIN) and name != "training":
                setattr(self, name, setting)
        self.mark, self.num_returned = mark, num_returned

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.mark == "stage_input":
            hidden_states = torch.ops.torchweave.stage_input(hidden_states)
        elif self.mark == "stage_output":
            hidden_states = torch.ops.torchweave.stage_output(hidden_states)
        return (hidden_states, *(None,) * (self.num_returned - 1)) if self.num_returned else hidden_states


class MissingEmbedding(nn.Module):
    """Placeholder of the embedding, whose output must be unused."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.width, self.dtype = embedding.weight.shape[1], embedding.weight.dtype
        _register_empty_weight(self, embedding)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.ops.torchweave.elsewhere(ids, self.width, self.dtype)


class MissingHead(nn.Module):
    """Placeholder of the output layer, whose output is dropped."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        _register_empty_weight(self, head)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


def _register_empty_weight(module: nn.Module, other: Any) -> None:
    """A weight without columns: some models read its device, dtype and number of rows."""
    module.register_buffer("weight", other.weight.new_empty(len(other.weight), 0), persistent=False)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace every reference to a module."""
    other = model.get_submodule(name)
    for owner in list(model.modules()):
        for leaf, child in owner._modules.items():
            if child is other:
                owner._modules[leaf] = module


def _refusal(name: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"{name} cannot be split into pipeline stages: {why}; use pipeline_parallel_size=1.")


def _stage_of(model: PreTrainedModel, layers: ModelLayers, number: int, size: int) -> PipelineStage:
    name, path = type(model).__name__, _list_of_layers(model)
    if path is None:
        raise _refusal(name, "no list of modules holds all of its layers")
    decoder_layers: Any = model.get_submodule(path)
    count = len(decoder_layers)
    if size > count:
        raise UnsupportedModel(f"{name} has {count} layers, fewer than {size} stages; lower pipeline_parallel_size.")
    calls = _record_layer_calls(model, decoder_layers)
    if len(calls) != count:
        raise _refusal(name, f"each layer has to run once in a forward, which calls {len(calls)} of {count} layers")
    hidden, num_returned = calls[0].hidden, calls[0].num_returned
    kinds = {None if call.hidden is None else (call.hidden.shape, call.hidden.dtype) for call in calls}
    if hidden is None or len(kinds) > 1 or hidden.ndim != 3:
        raise _refusal(name, "the first argument of its layers is not hidden states of one shape")
    if num_returned < 0 or any(call.num_returned != num_returned for call in calls):
        raise _refusal(name, "its layers return different numbers of values, or tensors besides the hidden states")
    # Features of images are added between layers: see `ImageDecoderStep`.
    has_deepstack = hasattr(decoder_of(model), "_deepstack_process")
    if not has_deepstack and any(call.hidden is not before.result for before, call in pairwise(calls)):
        raise _refusal(name, "the hidden states that a layer takes are not those that the layer before returns")
    names = {id(module): each for each, module in model.named_modules()}
    embedding, head = names[id(model.get_input_embeddings())], names[id(model.get_output_embeddings())]
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    begin, end = stage_layers(count, number, size)
    stage = PipelineStage(
        number=number,
        size=size,
        layers=path,
        begin=begin,
        end=end,
        num_layers=count,
        specs=tuple(layers.attention),
        attention=(),
        has_recurrent_layers=bool(layers.recurrent),
        width=hidden.shape[-1],
        dtype=hidden.dtype,
        num_returned=num_returned,
        embedding=embedding,
        head=head,
        tied=f"{head}.weight" in tied,
    )
    ends = [stage_layers(count, each, size)[1] for each in range(size)]
    for pair in tied.items():
        first, second = (stage.layer_of(each) for each in pair)
        if first is not None and second is not None and bisect(ends, first) != bisect(ends, second):
            raise _refusal(name, f"layers {first} and {second}, which are on different stages, share weights")
    return stage


def _list_of_layers(model: PreTrainedModel) -> str | None:
    """The first `ModuleList` that holds all attentions and recurrent mixers that run."""
    called: set[nn.Module] = set()

    def record(module: nn.Module, *_: Any) -> None:
        if is_recurrent(module) or isinstance(getattr(module, "layer_idx", None), int):
            called.add(module)

    with _forward_hooks(model.modules(), record):
        model_layers(model)
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and called <= set(module.modules()):
            return path
    return None


@contextlib.contextmanager
def _forward_hooks(modules: Iterable[nn.Module], hook: Callable[..., None]) -> Iterator[None]:
    """Call `hook(module, args, kwargs, output)` after each forward of the modules."""
    hooks = [module.register_forward_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


class _LayerCall(NamedTuple):
    """A call of a layer.

    Attributes:
        hidden: the first argument, if it is a tensor.
        result: what it returns, or the first of several values.
        num_returned: the number of values; 0: a tensor alone; -1: further tensors.
    """

    hidden: Tensor | None
    result: Any
    num_returned: int


def _record_layer_calls(model: PreTrainedModel, layers: nn.Module) -> list[_LayerCall]:
    calls: list[_LayerCall] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        result, num_returned = out, 0
        if isinstance(out, (tuple, list)):
            result, num_returned = out[0], -1 if any(isinstance(each, Tensor) for each in out[1:]) else len(out)
        calls.append(_LayerCall(hidden if isinstance(hidden, Tensor) else None, result, num_returned))

    with _forward_hooks(layers.children(), record):
        model_layers(model)
    return calls
