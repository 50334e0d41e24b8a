"""Bodies of requests: OpenAI's fields, and vLLM's extra ones. A field that is not known is refused with the nearest one."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Body(BaseModel):
    """A body whose fields are all known and of their own type: `"5"` is no number."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name not in cls.model_fields:
                near = difflib.get_close_matches(str(name), cls.model_fields, n=1)
                hint = f"did you mean {near[0]}?" if near else "leave it out; the documentation lists what is known"
                raise ValueError(f"unknown field {str(name)[:80]!r}; {hint}")
        return value


def _prompt(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value) or all(type(item) is int for item in value):
            return value
        if all(isinstance(item, list) and item and all(type(token) is int for token in item) for item in value):
            return value
    raise ValueError(
        "expected a text, a list of texts, a list of token ids, or a list of lists of token ids, not empty"
    )


def _stop(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise ValueError("expected a text or a list of texts")


Prompt = Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(_prompt)]
StopStrings = Annotated[str | list[str] | None, BeforeValidator(_stop)]


class StreamOptions(Body):
    """What a stream holds beside the answer.

    Attributes:
        include_usage: a last chunk with the number of tokens.
        include_obfuscation: OpenAI's padding of chunks; taken, and nothing is padded.
    """

    include_usage: bool = False
    include_obfuscation: bool = False


class Generation(Body):
    """What both kinds of requests share: where the answer goes, and how its tokens are drawn.

    Fields that are taken and change nothing: `user`, `metadata`, `store`, `service_tier`, `safety_identifier`.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: StopStrings = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    # vLLM's extra fields
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: str | None = None
    request_id: str | None = None


class CompletionRequest(Generation):
    """A body of `/v1/completions`."""

    prompt: Prompt
    logprobs: int | None = None
    add_special_tokens: bool = True
