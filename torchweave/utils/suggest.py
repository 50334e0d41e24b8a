"""Suggestions for unknown names in error messages: the nearest known name, or what to do instead of a name of vLLM."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

_CLOSE = 0.85
"""Of two names without their separators: they are the same name with a slip in it."""
_WORDS_CLOSE = 0.8
"""Of two words: one is the other, misspelt."""


_NO_ADAPTER = "LoRA adapters are not supported: merge the adapter into the checkpoint, and leave it out"
VLLM_NAMES = {
    **dict.fromkeys(("enable_lora", "lora_request", "lora_modules", "max_loras", "max_lora_rank"), _NO_ADAPTER),
    "backend": "leave it out: Inductor compiles, unless enable_inductor is false",
    "best_of": "request n answers with logprobs=0 and take the largest cumulative_logprob",
    "functions": "the field is tools",
    "function_call": "the field is tool_choice",
    "fullgraph": "leave it out: forward is always captured as one graph",
    "guided_decoding": "the parameter is structured_outputs=StructuredOutputs(...)",
    **{f"guided_{form}": f"the option is structured_outputs.{form}" for form in ("json", "regex", "choice", "grammar")},
    "logits_processors": "it is an option of LLM and serve, classes whose arguments a request gives in extra_args",
    "mode": "cuda_graphs=True does what torch.compile's reduce-overhead does; there are no other modes",
    "priority": "it is a field of the server's requests, and of InferenceRequest for a BatchManager",
    "prompt_token_ids": "pass token ids as prompts",
    "use_beam_search": "set beam_width",
}
"""What to do instead of options and parameters of vLLM, and of torch.compile, that do not exist here."""
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def suggest_keywords(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let `function` refuse an unknown keyword with a suggestion, also for a name of vLLM; a decorator.

    Raises:
        TypeError: when called with an unknown keyword.
    """
    known = dict.fromkeys(name for name in inspect.signature(function).parameters if name != "self")
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if unknown := [each for each in kwargs if each not in known]:
            hint = did_you_mean(unknown[0], known, f"it takes {', '.join(known)}")
            raise TypeError(f"{name} got an unexpected keyword argument {unknown[0]!r}; {hint}")
        return function(*args, **kwargs)

    return call


def did_you_mean(name: str, known: Iterable[str], otherwise: str, prefix: str = "") -> str:
    """End of an error about an unknown name: what to do instead of vLLM's, else a suggestion from `known`, after `prefix`;
    `otherwise` if none is close."""
    if name in VLLM_NAMES:
        return VLLM_NAMES[name]
    near = nearest(name, known)
    return f"did you mean {prefix}{near}?" if near else otherwise


def nearest(name: str, known: Iterable[str]) -> str:
    """The name of `known` that `name` means, with a slip in it; empty without one."""
    close = difflib.get_close_matches(name, list(known))
    return next((each for each in close if _is_close(name, each)), "")


def suggest_value(value: object, known: Iterable[object]) -> str:
    """End of an error about a value that is none of `known`, with its semicolon; empty without a suggestion."""
    near = difflib.get_close_matches(str(value), map(str, known), n=1)  # `cls` is not `last`
    return f"; did you mean {near[0]!r}?" if near else ""


def _is_close(name: str, known: str) -> bool:
    """Whether `name` means `known`, and does not merely share words with it, as `prompt_token_ids` and `stop_token_ids` do."""
    words, others = _words(name), _words(known)
    if _ratio("".join(words), "".join(others)) >= _CLOSE:
        return True
    others = [other for other in others if other not in words]
    return all(word in known or any(_ratio(word, other) >= _WORDS_CLOSE for other in others) for word in words)


def _words(name: str) -> list[str]:
    return re.findall(r"[^\W_]+", name.lower())


def _ratio(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()
