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
_NO_TLS = "the server speaks plain HTTP: put a proxy (nginx, Caddy) before it for TLS"
VLLM_NAMES = {
    **dict.fromkeys(("enable_lora", "lora_request", "lora_modules", "max_loras", "max_lora_rank"), _NO_ADAPTER),
    **dict.fromkeys(("ssl_certfile", "ssl_keyfile"), _NO_TLS),
    "async_scheduling": "leave it out: steps are launched ahead of their tokens (run_ahead)",
    "backend": "leave it out: Inductor compiles, unless enable_inductor is false",
    "best_of": "request n answers with logprobs=0 and take the largest cumulative_logprob",
    "cpu_offload_gb": "weights stay on the device: quantize them (quantization) or use several GPUs (tensor_parallel_size)",
    "disable_custom_all_reduce": "the option is symmetric_memory=false",
    "distributed_executor_backend": "the option is executor",
    "functions": "the field is tools",
    "function_call": "the field is tool_choice",
    "enable_auto_tool_choice": "leave it out: requests may always bring tools",
    "fullgraph": "leave it out: forward is always captured as one graph",
    "generation_config": "leave it out: SamplingParams() has vLLM's defaults, and without SamplingParams the checkpoint's are used",
    "guided_decoding": "the parameter is structured_outputs=StructuredOutputs(...)",
    **{f"guided_{form}": f"the option is structured_outputs.{form}" for form in ("json", "regex", "choice", "grammar")},
    "guided_decoding_backend": "leave it out: llguidance is the only backend",
    **dict.fromkeys(
        ("hf_overrides", "rope_scaling", "rope_theta"), "change config.json in a copy of the model's folder"
    ),
    "logits_processors": "it is an option of LLM and serve, classes whose arguments a request gives in extra_args",
    "max_seq_len_to_capture": "the option is torch_compile_config.capture_num_tokens",
    "mode": "cuda_graphs=True does what torch.compile's reduce-overhead does; there are no other modes",
    "model_impl": "leave it out: the model is always transformers' own class",
    "override_generation_config": "set SamplingParams, or change generation_config.json in a copy of the model's folder",
    "priority": "it is a field of the server's requests, and of InferenceRequest for a BatchManager",
    "prompt_token_ids": "pass token ids as prompts",
    "skip_tokenizer_init": "leave it out: SamplingParams(detokenize=False) returns token ids without texts",
    "structured_outputs_config": "leave it out: llguidance is the only backend",
    "swap_space": "leave it out; kv_offload_gb keeps evicted blocks of the KV cache in host memory",
    "tokenizer_mode": "leave it out: the checkpoint's own tokenizer is used",
    "use_beam_search": "set beam_width",
}
"""What to do instead of options and parameters of vLLM, and of torch.compile, that do not exist here."""
_CHECKPOINT_FORMATS = ("awq", "awq_marlin", "compressed-tensors", "gptq", "gptq_marlin", "modelopt", "modelopt_fp4")
_VLLM_VALUES = {
    ("quantization", name): "this is a format of checkpoints, which is followed without the option; leave it out"
    for name in _CHECKPOINT_FORMATS
}
"""What to do instead of vLLM's values of options."""
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
    near = [each for each in difflib.get_close_matches(name, list(known)) if _is_close(name, each)]
    return f"did you mean {prefix}{near[0]}?" if near else otherwise


def suggest_value(option: str, value: object, known: Iterable[object]) -> str:
    """End of an error about a value that is none of `known`, with its semicolon; empty without a suggestion."""
    if hint := _VLLM_VALUES.get((option.removeprefix("--"), str(value))):
        return f"; {hint}"
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
