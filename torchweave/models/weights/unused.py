"""Tensors of a checkpoint that have no place in the model: without them it would be another model, which is refused.

Left out without a word are only those that transformers declares ignorable, buffers that are computed, layers of multi-token
prediction (a drafter's), and, where a part of a model is served (its text decoder, its base model), tensors of the other parts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from torchweave.report import Report

_COMPUTED = re.compile(
    r"(rotary_(pos_)?emb\.(inv_freq|cos_cached|sin_cached)|rope\.freqs|(attn|attention|self_attention|self_attn)\.(masked_)?bias"
    r"|causal_mask|position_ids|embed_positions\.weights|\.alibi|_float_tensor"
    r"|\.(q_scale|prob_scale|prob_output_scale))$"
)
"""Buffers stored by old releases and computed now, and scales of queries and probabilities, which attention does not round."""
_DRAFTER = re.compile(r"^(model\.)?mtp(_\w+)?\.")
_ADAPTER = re.compile(r"(^|\.)(lora_\w+|base_layer|modules_to_save|hada_w\w+|oft_\w+|ia3_l|adapter_\w+)(\.|$)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_TEXT_PART = re.compile(r"^(model\.)?(language_model|text_model)\.")
_HEADS = frozenset({"v_head", "value_head", "score", "classifier", "reward_head", "regression_head"})
_NUM_NAMED = 5


@dataclass(frozen=True)
class UnusedRule:
    """What may be left out of a model.

    Attributes:
        partial: the model is a part of what the checkpoint holds: its text decoder, or its base model.
        ignored: leave out everything, as the option `ignore_unused_weights` asks for.
    """

    partial: bool = False
    ignored: bool = False

    def check(
        self, model: PreTrainedModel, folder: Path, names: Iterable[str], wanted: Collection[str], report: Report
    ) -> None:
        """Report tensors that have no place in the model, or refuse them.

        Args:
            names: of the checkpoint's tensors that the model does not use.
            wanted: names of the model's tensors.

        Raises:
            ValueError: without these tensors it is another model.
        """
        unused = [name for name in sorted(names) if not self._may_be_left_out(model, name, wanted)]
        if not unused:
            return
        if self.ignored:
            report.event("unused_weights", count=len(unused), first=unused[:_NUM_NAMED])
            return
        raise ValueError(
            f"{folder} has {first_names(unused, _NUM_NAMED)}, which {type(model).__name__} does not use under this config.json: "
            f"{_likeness(model, unused, wanted)}; ignore_unused_weights=true loads it without them."
        )

    def _may_be_left_out(self, model: PreTrainedModel, name: str, wanted: Collection[str]) -> bool:
        if _COMPUTED.search(name) or _DRAFTER.match(name):
            return True
        ignorable = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        if any(re.search(pattern, name) for pattern in ignorable):
            return True
        return self.partial and _first_module(model, name) not in _first_modules(model, wanted)


def _first_module(model: PreTrainedModel, name: str) -> str:
    """The module of the decoder that a name begins with, without prefixes of a base model or a text part."""
    short = _TEXT_PART.sub("", name)
    return short.removeprefix("model.").removeprefix(f"{model.base_model_prefix}.").partition(".")[0]


def _first_modules(model: PreTrainedModel, wanted: Collection[str]) -> set[str]:
    return {_first_module(model, name) for name in wanted}


def _likeness(model: PreTrainedModel, unused: list[str], wanted: Collection[str]) -> str:
    """What tensors without a place look like, and what to do about it, as a clause."""
    if any(_ADAPTER.search(name) for name in unused):
        return "they look like an adapter that is not merged; merge it (PEFT's merge_and_unload)"
    layers = {int(layer[1]) for name in unused if (layer := _LAYER.search(name))}
    own = {int(layer[1]) for name in wanted if (layer := _LAYER.search(name))}
    if layers and own and min(layers) > max(own):
        return f"they look like more layers than the {max(own) + 1} of config.json; correct it"
    other = {_first_module(model, name) for name in unused} - _first_modules(model, wanted)
    if other & _HEADS:
        return "they look like a head of another task (rewards, values or classes); remove them"
    if len(other) == len({_first_module(model, name) for name in unused}):
        return f"they look like a further part of a larger model ({', '.join(sorted(other)[:3])}); give its config.json"
    return f"they look like another architecture than {model.config.model_type}; check that config.json belongs to these weights"


def adapter_hint(names: Mapping[str, object] | Iterable[str]) -> str:
    """A clause about checkpoints that lack tensors because an adapter wraps them; empty if none does."""
    if any(_ADAPTER.search(name) for name in names):
        return "it looks like an adapter that is not merged; merge it (PEFT's merge_and_unload)"
    return ""


def first_names(names: list[str], count: int = 3) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:count]) + (f" and {len(names) - count} more tensors" if len(names) > count else "")
