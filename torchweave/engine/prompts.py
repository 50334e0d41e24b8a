"""Prompts as callers of `LLM` write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, TypedDict

import numpy as np

from torchweave.engine.request import SamplingParams
from torchweave.images import EncodedPrompt


class _Media(TypedDict, total=False):
    multi_modal_data: dict[str, Any]


class TextPrompt(_Media):
    """A prompt as a dict with its text, and `multi_modal_data` for images."""

    prompt: str


class TokensPrompt(_Media):
    """A prompt as a dict with its token ids."""

    prompt_token_ids: list[int]


Prompt = str | Sequence[int] | EncodedPrompt | Mapping[str, Any]
"""A text, token ids, or vLLM's `{"prompt": ..., "multi_modal_data": {"image": ...}}`."""


PromptType = Prompt


def text_of(prompt: Prompt) -> str | None:
    """The text of a prompt that has one."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def text_and_images(prompt: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The text (or token ids) and the images of vLLM's prompt dict."""
    data = prompt.get("multi_modal_data") or {}
    unknown = {*prompt} - {"prompt", "prompt_token_ids", "multi_modal_data"} | {*data} - {"image"}
    text = prompt.get("prompt", prompt.get("prompt_token_ids"))
    if unknown or text is None:
        wrong = f"has {sorted(unknown)[0]!r}" if unknown else "has no prompt"
        raise ValueError(
            'A prompt is {"prompt": text}, with "multi_modal_data": {"image": ...} for images, or {"prompt_token_ids": ids}; '
            f"this one {wrong}."
        )
    images = data.get("image")
    images = [] if images is None else list(images) if isinstance(images, (list, tuple)) else [images]
    if images and not isinstance(text, str):
        raise ValueError(
            "A prompt with images is a text, since the processor writes their tokens; this one has token ids."
        )
    return text, images


def as_ids(prompt: Sequence[int]) -> np.ndarray:
    """Token ids as an array; their range is checked later.

    Raises:
        ValueError: not a list of whole numbers.
    """
    ids = None
    if _is_list(prompt):
        with suppress(TypeError, ValueError):  # ragged lists
            ids = np.asarray([*prompt] or np.empty(0, np.int64))
    if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError("A prompt is a text or a list of token ids, which are whole numbers; this one is neither.")
    return ids.astype(np.int64)


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray, Mapping, Set))


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, which may be a list of token ids, or several as a list."""
    prompt_list: list[Prompt] = list(prompts) if _is_list(prompts) else [prompts]  # type: ignore[arg-type, list-item]
    if prompt_list and prompt_list[0] is not prompts and isinstance(prompt_list[0], (int, np.integer)):
        prompt_list = [prompt_list]  # type: ignore[list-item]
    return prompt_list


def as_lists(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> tuple[list[Prompt], list[SamplingParams]]:
    """Prompts as a list, and as many sampling parameters."""
    prompt_list = as_list(prompts)
    params_list = list(params) if isinstance(params, Sequence) else [params] * len(prompt_list)
    if wrong := [each for each in params_list if not isinstance(each, SamplingParams)]:
        raise ValueError(f"sampling_params must be SamplingParams, or a list of them, but holds {wrong[0]!r}.")
    if len(params_list) != len(prompt_list):
        raise ValueError(
            f"Got {len(prompt_list)} prompts but {len(params_list)} sampling_params; give one for each, or one for all."
        )
    return prompt_list, params_list


def truncated(prompt: EncodedPrompt, params: SamplingParams, max_model_len: int) -> EncodedPrompt:
    """The prompt's last tokens, as `truncate_prompt_tokens` says.

    Raises:
        ValueError: a prompt with images would lose tokens.
    """
    keep = params.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == -1:
        keep = max(max_model_len - (params.max_tokens or 1), 1)
    if len(prompt.token_ids) <= keep:
        return prompt
    if prompt.images:
        raise ValueError("A prompt with images cannot be truncated; leave truncate_prompt_tokens out.")
    return EncodedPrompt(prompt.token_ids[-keep:])
