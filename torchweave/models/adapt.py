"""Adapt a transformers model on the meta device: replace attention and experts by custom ops and read the layers' shapes.

A probe run on the meta device, not the config, yields the layers: their shapes come from the calls of the attention op. A tensor
of `tokens x tokens` reveals an attention that was not replaced or a mask, and the model is rejected.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, masking_utils

from torchweave.models import attention, experts
from torchweave.models.attention import UnsupportedModel
from torchweave.models.decoder import supports_logits_to_keep
from torchweave.models.hooks.indexers import hook_indexers
from torchweave.models.hooks.install import disable_padding_warnings, hook_attention
from torchweave.models.hooks.positions import is_position_hooked
from torchweave.models.hooks.recurrent import VERIFIED, count_hooked, hook_recurrent_layers, recurrent_kinds
from torchweave.models.hooks.rope import disable_dynamic_rope
from torchweave.models.multimodal.image_step import make_step
from torchweave.models.multimodal.support import decoder_of, text_config
from torchweave.ops.attention.op import LayerSpec
from torchweave.ops.recurrent.op import RECURRENT_OPS, RecurrentSpec
from torchweave.report import Report

# Operations that mix tokens outside attention; they need a state per request.
_MIXING_OPS = frozenset({"aten::convolution", "aten::cumsum", "aten::roll", "aten::_fft_r2c", "aten::cumprod"})
_MASK_CHANGES = ("or_mask_function", "and_mask_function")
"""Arguments of transformers' mask functions by which a model changes which tokens of text are visible."""

_masks_lock = threading.Lock()

_PROBE_TOKENS = 53
"""Tokens of the probe run: a prime that is no model width, so that a size of 53 identifies the token dimension."""

_PROBE_LOGITS = 3
"""Rows of logits that the probe run requests."""


@dataclass(frozen=True)
class ModelLayers:
    """Layers of a model with state.

    Attributes:
        attention: KV-cache layout by the attention op's `layer` argument.
        recurrent: calls of recurrent ops by their `state` argument.
    """

    attention: list[LayerSpec]
    recurrent: list[RecurrentSpec]


def adapt(model: PreTrainedModel, report: Report, plugins: Sequence[str] | None = None) -> ModelLayers:
    """Install the engine's ops in a model on the meta device; returns its layers with state. `plugins`: see `EngineConfig.plugins`.

    Raises:
        UnsupportedModel: the model needs a feature that the engine lacks; the message names it.
    """
    check_config(model.config)
    kinds = recurrent_kinds(text_config(model))
    hooked = install_ops(model, plugins=plugins)
    _check_recurrent_layers(model, kinds)
    number_attention_layers(model)
    layers = model_layers(model)
    _check_positions(model, report)
    report.event(
        "model_adapted",
        architecture=type(model).__name__,
        attention_layers=len(layers.attention),
        recurrent_states=len(layers.recurrent),
        experts=experts.count_experts(model),
        hooked=hooked,
    )
    if not supports_logits_to_keep(model) and model.get_output_embeddings() is not None:
        name = type(model).__name__
        why = f"{name} computes logits of every token instead of the last one per request: it has no logits_to_keep"
        report.event("warning", what="logits", why=why)
    return layers


def install_ops(
    model: PreTrainedModel, like: PreTrainedModel | None = None, plugins: Sequence[str] | None = None
) -> list[str]:
    """Select the engine's attention and experts in the model's configs; returns the classes that needed a hook.

    Args:
        like: an adapted model of the same class, whose numbers of attention layers are taken over.
        plugins: see `EngineConfig.plugins`.
    """
    decoder = decoder_of(model)  # a vision tower keeps its own attention
    by_kind = _uses_layer_types(decoder)
    for module in decoder.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = attention.NAME
            if not by_kind and getattr(config, "layer_types", None):
                with contextlib.suppress(AttributeError):  # RecurrentGemma's is a property
                    config.layer_types = None
    experts.install_experts(decoder)
    disable_dynamic_rope(decoder)
    disable_padding_warnings(model)
    hooked = [*hook_attention(decoder, plugins), *hook_indexers(decoder), *hook_recurrent_layers(decoder)]
    for name, module in like.named_modules() if like is not None else ():
        if hasattr(module, "torchweave_layer"):
            own: Any = model.get_submodule(name)
            own.torchweave_layer = module.torchweave_layer
    return hooked


def _check_recurrent_layers(model: PreTrainedModel, kinds: list[str]) -> None:
    """Reject layers with a recurrent state that have no hook, or that were not verified against transformers."""
    hooked = count_hooked(model)
    if hooked and text_config(model).model_type not in VERIFIED:
        raise UnsupportedModel(
            f"{model.config.model_type} has layers with a recurrent state that were not verified against transformers."
        )
    if hooked < len(kinds):
        raise UnsupportedModel(
            f"{model.config.model_type} has layers of kind {', '.join(sorted(set(kinds)))}, whose recurrent state the engine does "
            "not support."
        )


def _uses_layer_types(model: nn.Module) -> bool:
    """Whether the model's code reads `layer_types`; otherwise all layers have the same attention, whatever the config lists."""
    return any(re.search(r"\blayer_types\b", inspect.getsource(each)) for each in _model_code(model))


def _model_code(model: nn.Module) -> list[ModuleType]:
    """The Python modules of a model's classes, without those of PyTorch and of transformers' common code."""
    classes = {each for module in model.modules() for each in type(module).__mro__}
    names = {each.__module__ for each in classes if not each.__module__.startswith(("torch.", "builtins"))}
    return [sys.modules[name] for name in names if not re.fullmatch(r"transformers\.(?!models\.).*", name)]


def check_config(config: Any) -> None:
    """Reject encoders by the config."""
    if getattr(config, "is_encoder_decoder", False):
        name = getattr(config, "model_type", type(config).__name__)
        raise UnsupportedModel(f"{name} is an encoder-decoder model; only decoders can be served.")


class _ProbeMode(TorchDispatchMode):
    """Record calls of the attention op; reject operations that are wrong for a batch of flattened requests."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []
        self.index_calls: list[dict[str, Any]] = []
        self.states: dict[int, RecurrentSpec] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("torchweave::attention", "torchweave::sparse_attention", "torchweave::relative_attention"):
            self.calls.append(_call_arguments(func, args, kwargs or {}))
            return None
        if name in ("torchweave::sparse_index", "torchweave::sparse_block_index"):
            self.index_calls.append(_call_arguments(func, args, kwargs or {}))
            return None
        if func in RECURRENT_OPS:
            self._add_state(func, _call_arguments(func, args, kwargs or {}))
            return None
        out = func(*args, **(kwargs or {}))
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if name in _MIXING_OPS and first is not None and _PROBE_TOKENS in first.shape and first.is_floating_point():
            raise UnsupportedModel(
                f"it mixes tokens outside attention ({name}); the engine serves attention layers only."
            )
        if name.startswith("aten::arange") and out.shape == (_PROBE_TOKENS,):
            raise UnsupportedModel("it numbers the tokens of its input, which belong to many requests.")
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and sum(size == _PROBE_TOKENS for size in tensor.shape) >= 2:
                raise UnsupportedModel(
                    f"{name} creates a tensor of tokens x tokens ({tuple(tensor.shape)}): an attention outside transformers' "
                    "attention interface, or a mask that the model builds."
                )
        return out

    def _add_state(self, func: Any, arguments: dict[str, Any]) -> None:
        if arguments["state"] in self.states:
            raise UnsupportedModel(f"a layer calls {func._schema.name} twice in a forward, with a state for each call.")
        self.states[arguments["state"]] = RecurrentSpec.of(func, tuple(arguments.values()), _PROBE_TOKENS)


def _call_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    named = {argument.name: argument.default_value for argument in func._schema.arguments}
    named.update(zip(named, args, strict=False))
    named.update(kwargs)
    return named


@contextlib.contextmanager
def _causal_masks_only(model: PreTrainedModel) -> Iterator[None]:
    """Reject masks of transformers other than causal ones in this context.

    transformers builds no mask for the engine's attention, so that the call is the only sign of another mask: in some versions
    attention modules of a bidirectional model are marked as causal. Calls of other threads are not checked.
    """
    with _masks_lock, contextlib.ExitStack() as patches:
        for module in (masking_utils, *_model_code(decoder_of(model))):
            for name, function in list(vars(module).items()):
                if name.startswith("create_") and getattr(function, "__module__", "") == masking_utils.__name__:
                    patches.enter_context(mock.patch.object(module, name, _causal_only(function)))
        yield


def _causal_only(create_mask: Callable[..., Any]) -> Callable[..., Any]:
    """A mask function that raises `UnsupportedModel`, in the thread of this call, for masks other than causal ones."""
    thread = threading.get_ident()

    @functools.wraps(create_mask)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return create_mask(*args, **kwargs)
        if "bidirectional" in create_mask.__name__:
            raise UnsupportedModel(
                "it is not causal: tokens attend to later tokens; only causal decoders can be served."
            )
        changes = [name for name in _MASK_CHANGES if kwargs.get(name) is not None]
        if changes:
            raise UnsupportedModel(
                f"it changes its causal mask ({', '.join(changes)}), and the engine builds no masks."
            )
        return create_mask(*args, **kwargs)

    return checked


def _run_probe(model: PreTrainedModel) -> _ProbeMode:
    probe, name = _ProbeMode(), type(model).__name__
    with torch.no_grad(), _causal_masks_only(model), probe:
        ids = torch.zeros(_PROBE_TOKENS, dtype=torch.int64, device="meta")
        index = torch.zeros(_PROBE_LOGITS, dtype=torch.int64, device="meta")
        try:
            step = make_step(model, [], 0, 0)
            rope_offsets = ids.expand(step.rope_axes, -1) if step.rope_axes else None
            logits = step(ids, ids.clone(), index, *([] if rope_offsets is None else [rope_offsets]))
        except UnsupportedModel as refusal:
            raise UnsupportedModel(f"{name} cannot be served: {refusal}") from refusal
        except (RuntimeError, LookupError, TypeError, AttributeError, ValueError) as error:
            raise UnsupportedModel(
                f"{name} cannot be served: its forward does not run over flat tokens: {_failure_reason(error)}."
            ) from error
    if logits.ndim != 2 or len(logits) != _PROBE_LOGITS:
        raise UnsupportedModel(
            f"{name} cannot be served: asked for the logits of {_PROBE_LOGITS} tokens out of {_PROBE_TOKENS} (logits_to_keep), it "
            f"returns {list(logits.shape)}."
        )
    return probe


def _failure_reason(error: Exception) -> str:
    """Why a forward failed, as a clause."""
    why = " ".join(str(error).split())[:200].rstrip(".")
    if isinstance(error, NotImplementedError) or "item()" in why:
        return "its control flow depends on tensor values, so it cannot be captured as one graph"
    if "'NoneType'" not in why:
        return why
    # The engine passes None for the mask and the cache.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "transformers/models" in frame.filename]
    line = frames[-1].line if frames else None
    if line and "mask" in line:
        return "it reads an attention mask, and the engine builds none"
    return f"{why} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else why


def model_layers(model: PreTrainedModel) -> ModelLayers:
    """Layers with state of an adapted model on the meta device, from a probe run.

    Raises:
        UnsupportedModel: the model needs a feature that the engine lacks; the message names it.
    """
    name, probe = type(model).__name__, _run_probe(model)
    if not probe.calls and not probe.states:
        raise UnsupportedModel(
            f"{name} cannot be served: its layers call neither transformers' attention interface nor a recurrence that has an op."
        )
    by_layer: dict[int, dict[str, Any]] = {}
    for call in probe.calls:
        layer = call["layer"]
        if layer in by_layer:
            raise UnsupportedModel(f"{name} cannot be served: two attentions of a forward have layer index {layer}.")
        by_layer[layer] = call
    if sorted(by_layer) != list(range(len(by_layer))):
        raise UnsupportedModel(
            f"{name} cannot be served: only layers {sorted(by_layer)} have attention; the others keep another kind of state."
        )
    specs = [_layer_spec(name, layer, by_layer[layer]) for layer in range(len(by_layer))]
    specs += [_index_spec(call) for call in sorted(probe.index_calls, key=lambda call: call["layer"])]
    _check_window(model, specs)
    assert sorted(probe.states) == list(range(len(probe.states))), "every hooked function has a state"
    return ModelLayers(specs, [probe.states[state] for state in sorted(probe.states)])


def number_attention_layers(model: PreTrainedModel) -> None:
    """Number the attention layers by themselves in a model where some layers have none: recurrent ones, and cross-attention."""
    if not count_hooked(model) and not getattr(model.config, "cross_attention_layers", None):
        return
    modules: list[Any] = [
        each for each in decoder_of(model).modules() if isinstance(getattr(each, "layer_idx", None), int)
    ]
    for number, module in enumerate(modules):
        module.torchweave_layer = number
    called = [call["layer"] for call in _run_probe(model).calls]
    for number, module in enumerate(modules):
        if number in called:
            module.torchweave_layer = called.index(number)
        else:
            del module.torchweave_layer


def renumber_attention_layers(model: PreTrainedModel) -> tuple[list[int], list[RecurrentSpec]]:
    """Number the layers with a KV cache in a part of a model from 0; returns their numbers before, and the part's states.

    Raises:
        UnsupportedModel: the part does not run by itself.
    """
    probe = _run_probe(model)
    numbers = sorted(call["layer"] for call in (*probe.calls, *probe.index_calls))
    for module in decoder_of(model).modules():
        number = getattr(module, "torchweave_layer", getattr(module, "layer_idx", None))
        if number in numbers:
            module.torchweave_layer = numbers.index(number)  # type: ignore[assignment]
    return numbers, [probe.states[state] for state in sorted(probe.states)]


def _check_window(model: PreTrainedModel, specs: list[LayerSpec]) -> None:
    """Reject a sliding window that exists only in the model's mask and is not passed to attention."""
    config = text_config(model)
    windowed = getattr(config, "sliding_window", None) and getattr(config, "layer_types", None) is None
    in_mask = hasattr(sys.modules[type(decoder_of(model)).__module__], "create_sliding_window_causal_mask")
    if windowed and in_mask and not any(spec.window for spec in specs):
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be served: its sliding window exists only in its mask, and the engine builds no masks."
        )


def _check_positions(model: PreTrainedModel, report: Report) -> None:
    """Reject or report embeddings that number tokens by their ids (RoBERTa): they do not count padding tokens."""
    for module in model.modules():
        if not hasattr(module, "create_position_ids_from_input_ids"):
            continue
        if not is_position_hooked(module):
            raise UnsupportedModel(
                f"{type(model).__name__} cannot be served: its positions start after its padding token's id, the engine's at 0."
            )
        why = f"transformers does not count the padding token {module.padding_idx} in a prompt, Torchweave does; leave it out"
        report.event("warning", what="positions", why=why)


def _layer_spec(name: str, layer: int, call: dict[str, Any]) -> LayerSpec:
    (_, heads, query_dim), (_, kv_heads, key_dim), value_dim = call["q"].shape, call["k"].shape, call["v"].shape[2]
    if query_dim != key_dim or heads % kv_heads:
        raise UnsupportedModel(
            f"{name} cannot be served: layer {layer} has {heads} heads of {query_dim} over {kv_heads} of {key_dim}."
        )
    return LayerSpec(
        num_kv_heads=kv_heads,
        head_dim=key_dim,
        value_dim=value_dim,
        num_heads=heads,
        window=call.get("window", 0),
        chunk=call.get("chunk", 0),
        softcap=call.get("softcap", 0.0),
        sinks=call["sinks"] is not None,
        alibi=call.get("alibi_slopes") is not None,
        sparse="indices" in call or "bias" in call,
    )


def _index_spec(call: dict[str, Any]) -> LayerSpec:
    dim = call["k"].shape[1]
    return LayerSpec(num_kv_heads=1, head_dim=dim // 2, value_dim=dim - dim // 2, num_heads=1, index_keys=True)


def vocab_size(model: PreTrainedModel, pools: bool = False) -> int:
    """Number of columns of the logits; for a model that pools, which has none, of token ids."""
    head: Any = model.get_input_embeddings() if pools else model.get_output_embeddings()
    if head is None:
        raise UnsupportedModel(f"{type(model).__name__} cannot be served: it has no language-model head.")
    return min(int(head.weight.shape[0]), getattr(model.config, "unpadded_vocab_size", None) or head.weight.shape[0])
