"""From the fields of a request to the engine's sampling parameters."""

from __future__ import annotations

from typing import Any

from torchweave.engine.request import SamplingParams
from torchweave.serving.protocol import CompletionRequest, Generation
from torchweave.serving.wire import ModelCard

_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids",
    "ignore_eos", "skip_special_tokens",
)  # fmt: skip


def sampling_params(body: Generation, model: ModelCard, **others: Any) -> SamplingParams:
    """What `body` asks for, over what the checkpoint asks for, over OpenAI's defaults.

    Args:
        others: fields that are not in the body under their own name.

    Raises:
        ValueError: a value out of range; the sentence names the field.
    """
    defaults = {"temperature": model.temperature, "top_k": model.top_k, "top_p": model.top_p, "min_p": model.min_p}
    given = {name: getattr(body, name) for name in _SAME_NAME}
    merged = {**_known(defaults), **_known(given), **others}
    return SamplingParams(**merged)


def completion_params(body: CompletionRequest, model: ModelCard) -> SamplingParams:
    return sampling_params(body, model, logprobs=body.logprobs)


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
