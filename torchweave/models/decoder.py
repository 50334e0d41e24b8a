"""The engine's interface to a model: flat token ids and positions in, logits or hidden states of selected rows out."""

from __future__ import annotations

import inspect
import string
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torchweave.ops.attention.op import LayerSpec
    from torchweave.ops.recurrent.op import RecurrentSpec
    from torchweave.pooling import Pooling


def supports_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether the forward has `logits_to_keep` (the rows of logits to compute); many forwards ignore unknown arguments."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


class DecoderStep(nn.Module):
    """One forward of an unmodified `ForCausalLM` over the flattened tokens of a step.

    Attributes:
        attention_layers: KV-cache layout by the attention op's `layer` argument.
        vocab_size: columns of the logits.
        max_model_len: longest sequence in tokens with valid positions.
        recurrent_layers: calls of recurrent ops by their `state` argument.
        rope_axes: rows of `rope_offsets`, a further input of models that take images; 0: no such input.
        pooling: how a `PoolingStep` pools; None for a model that generates.
        input_hidden_size: width of a further input of draft heads, the hidden state of each token; 0: no such input.
        hidden_states: computes a further result of forward from outputs of decoder layers; None: logits alone are returned.
    """

    rope_axes = 0
    pooling: Pooling | None = None
    input_hidden_size = 0

    def __init__(
        self,
        model: PreTrainedModel,
        attention_layers: list[LayerSpec],
        vocab_size: int,
        max_model_len: int,
        recurrent_layers: Sequence[RecurrentSpec] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.hidden_states: HiddenStates | None = None
        self.attention_layers = attention_layers
        self.recurrent_layers = tuple(recurrent_layers)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._supports_logits_to_keep = supports_logits_to_keep(model)

    @property
    def num_outputs(self) -> int:
        """Columns of what `forward` returns."""
        return self.vocab_size if self.pooling is None else self.pooling.size

    def forward(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor) -> Any:
        """input_ids `[T]` int64, positions `[T]` int64, logits_index `[N]` int64 (rows of T) -> logits `[N, vocab_size]`.

        With `hidden_states`, returns (logits, the result of `hidden_states` `[T, H]`).
        """
        return self._logits_and_hidden_states(input_ids, positions, logits_index)

    def _logits_and_hidden_states(self, *inputs: Any) -> Any:
        if self.hidden_states is None:
            return self._logits(*inputs)
        self.hidden_states.begin()
        try:
            logits = self._logits(*inputs)
            return logits, self.hidden_states()
        finally:
            self.hidden_states.end()

    def _logits(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor) -> Tensor:
        given = {"input_ids": input_ids[None], "position_ids": positions[None], "use_cache": False}
        if self._supports_logits_to_keep:
            return self.model(**given, logits_to_keep=logits_index).logits[0]
        return self.model(**given).logits[0][logits_index]


class PoolingStep(DecoderStep):
    """One forward of an unmodified base model, or of a sequence classification model, over the flattened tokens of a step."""

    def forward(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor) -> Tensor:
        """As `DecoderStep.forward` -> hidden states `[N, hidden_size]`, or the head's logits `[N, num_labels]`."""
        base = self.model.base_model
        given = {"input_ids": input_ids[None], "position_ids": positions[None], "use_cache": False}
        hidden = base(**given).last_hidden_state[0][logits_index]
        return hidden if base is self.model else self.model.score(hidden)  # type: ignore[operator]


class _LayerOutputs:
    """Outputs of layers during a forward of the whole model; layers that run by themselves are not collected."""

    def __init__(self) -> None:
        self.active = False
        self.tensors: list[Tensor] = []


def _forward_and_collect(self: Any, *args: Any, **given: Any) -> Any:
    output = self.torchweave_inner(*args, **given)
    if self.torchweave_outputs.active:
        self.torchweave_outputs.tensors.append(output if isinstance(output, Tensor) else output[0])
    return output


class HiddenStates(nn.Module):
    """Collects the outputs of some decoder layers of an unmodified model, or of its base model, and combines them.

    Args:
        layers: the model's decoder layers, whose outputs are `[1, T, H]`, or a tuple of it and others; or the base model alone.
        taken: which of them: n is the hidden state after n layers.
        combine: maps their concatenation `[T, len(taken) * H]` to the result.
    """

    def __init__(self, layers: Sequence[nn.Module] | nn.ModuleList, taken: Sequence[int], combine: nn.Module) -> None:
        super().__init__()
        self.combine = combine
        self._outputs = _LayerOutputs()
        numbers = sorted(set(taken))
        self._order = [numbers.index(number) for number in taken]
        for place, number in enumerate(numbers):
            layer: Any = layers[number - 1]
            layer.torchweave_inner = getattr(layer, "torchweave_inner", layer.forward)  # it may serve a second engine
            layer.torchweave_outputs = self._outputs
            # Not a forward hook of torch, since capture could not name the list that it changes; and each layer is unlike all
            # others, so that capture clones none of them from another.
            layer.torchweave_collected_as = string.ascii_lowercase[place]
            layer.forward = types.MethodType(_forward_and_collect, layer)

    def begin(self) -> None:
        """Collect until `end`."""
        self._outputs.active = True

    def forward(self) -> Tensor:
        """The result for the tokens of the forward that has just run."""
        outputs = [self._outputs.tensors[place][0] for place in self._order]
        return self.combine(outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1))

    def end(self) -> None:
        """Forget the collected outputs; a forward that changes an object for good could not be captured."""
        self._outputs.active = False
        self._outputs.tensors.clear()
