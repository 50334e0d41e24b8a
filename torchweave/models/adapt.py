"""Turn a model that transformers built (on the meta device) into a `DecoderStep`: attention and experts become custom ops.

What the model needs of the engine is found by watching one run of it on the meta device, not by reading its config: the
layers' shapes come from the calls of the attention op, and a tensor of `tokens x tokens` anywhere means that some attention
was not replaced or some mask was built, which is refused.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from torchweave.models import attention, experts
from torchweave.models.attention import UnsupportedModel
from torchweave.models.decoder import DecoderStep, supports_logits_to_keep
from torchweave.models.hooks import disable_dynamic_rope, disable_padding_warnings, hook_attention
from torchweave.ops.attention.op import LayerSpec
from torchweave.report import Report

# Layers that keep a running state instead of keys and values, by the name that `config.layer_types` gives them.
_RECURRENT_KINDS = frozenset(
    {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe_mamba", "hybrid", "rwkv"}
)
# Operations that mix tokens outside attention. A decoder whose layers use them needs a state of its own per request.
_MIXING_OPS = frozenset({"aten::convolution", "aten::cumsum", "aten::roll", "aten::_fft_r2c", "aten::cumprod"})
_PROBE_TOKENS = 53
"""Tokens of the run on the meta device: a prime that is no width of a model, so that a size of 53 means the tokens."""

_PROBE_LOGITS = 3
"""Tokens of it whose logits are asked for."""


def adapt(model: PreTrainedModel, report: Report) -> list[LayerSpec]:
    """Put the engine's ops into `model`, which has no memory yet (meta device), and find out what its layers keep.

    Raises:
        UnsupportedModel: the model cannot be served; the message says what it needs.
    """
    check_config(model.config)
    hooked = install_ops(model)
    specs = layer_specs(model)
    _check_positions(model)
    report.event(
        "model_adapted",
        architecture=type(model).__name__,
        attention_layers=len(specs),
        experts=experts.count_experts(model),
        hooked=hooked,
    )
    if not supports_logits_to_keep(model):
        name = type(model).__name__
        why = f"{name} computes those of every token of a step, not of each request's last alone: it has no logits_to_keep"
        report.event("warning", what="logits", why=why)
    return specs


def install_ops(model: PreTrainedModel) -> list[str]:
    """Point the model's configs at the engine's attention and experts; returns the classes that needed a hook."""
    by_kind = _uses_layer_types(model)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = attention.NAME
            if not by_kind and getattr(config, "layer_types", None):
                config.layer_types = None
    experts.install_experts(model)
    disable_dynamic_rope(model)
    disable_padding_warnings(model)
    return hook_attention(model)


def _uses_layer_types(model: PreTrainedModel) -> bool:
    """Whether a model's code knows kinds of layers; one that does not has the same attention in all, whatever its config says."""
    classes = {each for module in model.modules() for each in type(module).__mro__}
    names = {each.__module__ for each in classes if not each.__module__.startswith(("torch.", "builtins"))}
    own = [sys.modules[name] for name in names if not re.fullmatch(r"transformers\.(?!models\.).*", name)]
    return any(re.search(r"\blayer_types\b", inspect.getsource(each)) for each in own)


def check_config(config: Any) -> None:
    """Refuse what a config already shows: layers with a running state, ALiBi, encoders."""
    name = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model; only decoders can be served.")
    kinds = set(getattr(config, "layer_types", None) or ()) | set(getattr(config, "layers_block_type", None) or ())
    if recurrent := sorted(kinds & _RECURRENT_KINDS):
        raise UnsupportedModel(
            f"{name} has layers of kind {', '.join(recurrent)}, which keep a running state instead of keys and values; "
            "the engine serves attention layers only."
        )
    uses_alibi = getattr(config, "alibi", False) or getattr(getattr(config, "attn_config", None), "alibi", False)
    if uses_alibi or name == "bloom":
        raise UnsupportedModel(
            f"{name} puts positions into its attention mask (ALiBi), and the engine never builds masks; "
            "choose a model with rotary or learned positions."
        )


class _ProbeMode(TorchDispatchMode):
    """Records the attention op's calls, and refuses what cannot be right when tokens are those of many requests."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "torchweave::attention":
            self.calls.append(_call_arguments(func, args, kwargs or {}))
            return None
        out = func(*args, **(kwargs or {}))
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if name in _MIXING_OPS and first is not None and _PROBE_TOKENS in first.shape and first.is_floating_point():
            raise UnsupportedModel(
                f"it mixes tokens outside attention ({name}); the engine serves attention layers only."
            )
        if name.startswith("aten::arange") and out.shape == (_PROBE_TOKENS,):
            raise UnsupportedModel(
                "it counts the tokens of its input, where those of many requests stand side by side."
            )
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and sum(size == _PROBE_TOKENS for size in tensor.shape) >= 2:
                raise UnsupportedModel(
                    f"{name} makes a tensor of tokens x tokens ({tuple(tensor.shape)}): an attention that transformers' "
                    "attention interface does not reach, or a mask that the model builds itself."
                )
        return out


def _call_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    named = {argument.name: argument.default_value for argument in func._schema.arguments}
    named.update(zip(named, args, strict=False))
    named.update(kwargs)
    return named


def _run_probe(model: PreTrainedModel) -> list[dict[str, Any]]:
    probe, name = _ProbeMode(), type(model).__name__
    with torch.no_grad(), probe:
        ids = torch.zeros(_PROBE_TOKENS, dtype=torch.int64, device="meta")
        index = torch.zeros(_PROBE_LOGITS, dtype=torch.int64, device="meta")
        try:
            logits = DecoderStep(model, [], 0, 0)(ids, ids.clone(), index)
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
    return probe.calls


def _failure_reason(error: Exception) -> str:
    """What stopped a forward, in words that follow a colon."""
    why = " ".join(str(error).split())[:200].rstrip(".")
    if isinstance(error, NotImplementedError) or "item()" in why:
        return "it reads tensors on the host to decide what to compute, so no one graph of it exists"
    if "'NoneType'" not in why:
        return why
    # What the engine leaves out is None: the mask, which it builds for no model, and the cache.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "transformers/models" in frame.filename]
    line = frames[-1].line if frames else None
    if line and "mask" in line:
        return "it reads an attention mask, and the engine builds none"
    return f"{why} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else why


def layer_specs(model: PreTrainedModel) -> list[LayerSpec]:
    """What the attention layers of an adapted model without memory keep, found by a run of it.

    Raises:
        UnsupportedModel: the model cannot be served; the message says what it needs.
    """
    name, calls = type(model).__name__, _run_probe(model)
    if not calls:
        raise UnsupportedModel(
            f"{name} cannot be served: its attention does not go through transformers' attention interface."
        )
    by_layer: dict[int, dict[str, Any]] = {}
    for call in calls:
        layer = call["layer"]
        if layer in by_layer:
            raise UnsupportedModel(
                f"{name} cannot be served: two attentions of one forward are both called layer {layer}."
            )
        by_layer[layer] = call
    if sorted(by_layer) != list(range(len(by_layer))):
        raise UnsupportedModel(
            f"{name} cannot be served: only layers {sorted(by_layer)} have attention, the others keep another kind of state."
        )
    specs = [_layer_spec(name, layer, by_layer[layer]) for layer in range(len(by_layer))]
    _check_window(model, specs)
    return specs


def _check_window(model: PreTrainedModel, specs: list[LayerSpec]) -> None:
    """Refuse a window that only the model's own mask would have had: attention was not told of it."""
    config = model.config
    windowed = getattr(config, "sliding_window", None) and getattr(config, "layer_types", None) is None
    in_mask = hasattr(sys.modules[type(model).__module__], "create_sliding_window_causal_mask")
    if windowed and in_mask and not any(spec.window for spec in specs):
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be served: its sliding window is in its mask alone, and the engine builds none."
        )


def _check_positions(model: PreTrainedModel) -> None:
    """Refuse embeddings that number positions by the tokens they are given, from behind the padding token's id (RoBERTa)."""
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be served: its positions begin behind the id of its padding token, the engine's at 0."
        )


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
        window=call["window"],
        chunk=call["chunk"],
        softcap=call["softcap"],
        sinks=call["sinks"] is not None,
    )


def vocab_size(model: PreTrainedModel) -> int:
    """Columns of the logits."""
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModel(f"{type(model).__name__} cannot be served: it has no language-model head.")
    return int(head.weight.shape[0])
