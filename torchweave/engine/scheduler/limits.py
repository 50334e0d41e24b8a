"""Limits of steps and requests, and the rejection of requests that can never run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.request import InferenceRequest, SamplingParams
from torchweave.ops.kernels.sampling.layout import MAX_BAD_WORD_TOKENS
from torchweave.pooling import NO_POOLING, Pooling


@dataclass(frozen=True)
class Limits:
    """Limits of steps and requests.

    Attributes:
        max_batch_size: most requests in a step.
        max_num_tokens: most tokens in a step.
        max_model_len: most tokens of a request, prompt and answer.
        vocab_size: token ids are below this.
        chunked_context: a prompt may be split over several steps.
        equal_progress: prompts that do not fit together each advance by a part; else the oldest is first.
        mixed_step_sizes: tokens of steps with prefill and decode rows, see `step_token_budget`; empty: any number.
        batch_wait_timeout_iters, batch_wait_max_tokens_ratio: delay of prompts, see `should_delay_prefill`.
        query_len: most tokens of a decode row in a step: the last token and drafts; 1: no speculation.
        max_drafting_rows: most rows of a step with drafts.
        drafts_by_model: a draft model or head proposes.
        token_shift: 1 for a head, whose position p takes token p + 1.
        max_logprobs: most likely tokens that a request may ask for; -1: all.
        run_ahead: most steps in flight.
        has_recurrent_states: the model has recurrent layers, whose beams may share no blocks after a pause.
        no_images: why prompts have no images, as a clause; empty if they may.
        pooling: of a model that pools; None: requests generate tokens.
        priority_order: 1: waiting requests with a higher priority are first, -1: those with a lower one, 0: priorities are ignored.
        max_beam_width: most beams of a request; None: max_batch_size.
        max_adapters: low-rank adapters in a step; 0: requests have none.
        num_micro_batches: parts of the decode requests that take turns in steps, so that as many pipeline stages work at a time.
    """

    max_batch_size: int
    max_num_tokens: int
    max_model_len: int
    vocab_size: int
    chunked_context: bool = True
    equal_progress: bool = False
    mixed_step_sizes: tuple[int, ...] = ()
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0.0
    has_recurrent_states: bool = False
    no_images: str = "the model has no vision tower"
    query_len: int = 1
    max_drafting_rows: int = 0
    drafts_by_model: bool = False
    token_shift: int = 0
    max_logprobs: int = 100
    run_ahead: int = 1
    pooling: Pooling | None = None
    priority_order: int = 1
    max_beam_width: int | None = None
    num_micro_batches: int = 1
    max_adapters: int = 0

    @property
    def decode_span(self) -> int:
        """Upper bound of the tokens between a decode request's lower bound of computed tokens and the end of the next step."""
        return self.query_len * max(self.run_ahead, 1) if self.query_len > 1 else 1

    def last_position(self, request: InferenceRequest) -> int:
        """Most tokens that a request stores in the KV cache: all but the last generated one."""
        if self.pooling is not None:
            return len(request.input_ids)
        room = self.max_model_len - len(request.input_ids)
        max_tokens = request.sampling.max_tokens
        return len(request.input_ids) + (room if max_tokens is None else min(max_tokens, room)) - 1

    def max_blocks_needed(self, request: InferenceRequest, kv: BlockManager) -> int:
        """Most blocks that a request may hold. Beams are certain to share only the prompt's full blocks, if any."""
        common = 0 if self.has_recurrent_states else len(request.input_ids) // kv.block_size
        return kv.max_blocks_of_forks(self.last_position(request), request.sampling.beam_width, common)

    def rejection_reason(self, request: InferenceRequest) -> str:
        """Why a request can never run, apart from the blocks that it needs, in a sentence; empty if it can."""
        if request.pooling != (self.pooling is not None):
            return NO_POOLING if self.pooling is None else self.pooling.refusal
        if why := _token_id_rejection(request.sampling, self.vocab_size) or _queue_rejection(request):
            return why
        if request.adapter and not self.max_adapters:
            return f"The request has the adapter {request.adapter!r}, but adapters are off; start the engine with enable_lora."
        if request.images and self.no_images:
            return f"The prompt has images, but this model is served without: {self.no_images}."
        prompt = np.asarray(request.input_ids)
        if prompt.ndim != 1 or prompt.size == 0:
            return "The prompt is empty; give at least one token."
        if prompt.dtype.kind not in "iu" or prompt.min() < 0 or prompt.max() >= self.vocab_size:
            return f"The prompt has a token id outside 0..{self.vocab_size - 1}, the vocabulary of this model; use its tokenizer."
        if self.pooling is not None and prompt.size > self.max_model_len:
            return (
                f"The prompt has {prompt.size} tokens, but max_model_len is {self.max_model_len}; shorten the prompt, or raise "
                "max_model_len as far as the model and the KV cache allow."
            )
        if self.pooling is None and prompt.size >= self.max_model_len:
            return (
                f"The prompt has {prompt.size} tokens, but max_model_len is {self.max_model_len} and the answer needs at least "
                "one; shorten the prompt, or raise max_model_len as far as the model and the KV cache allow."
            )
        if not self.chunked_context and prompt.size > self.max_num_tokens:
            return (
                f"The prompt has {prompt.size} tokens, but a step has at most {self.max_num_tokens} and chunked context is off; "
                "shorten the prompt, raise max_num_tokens or turn enable_chunked_context on."
            )
        return ""

    def blocks_rejection(self, request: InferenceRequest, kv: BlockManager) -> str:
        """Why the KV cache is too small for a request; empty if it is not."""
        blocks = self.max_blocks_needed(request, kv)
        if -(-blocks // kv.num_groups) > kv.num_blocks // kv.num_groups:
            return (
                f"The request may need {blocks} KV cache blocks, but the engine has {kv.num_blocks}; lower max_tokens (or "
                "beam_width) or give the KV cache more memory."
            )
        return ""


def _queue_rejection(request: InferenceRequest) -> str:
    """Why `priority` or `cache_salt` is invalid; checked here, because the loop uses them while other requests run."""
    if not isinstance(request.priority, (int, np.integer)):
        return f"priority must be a whole number, but is {request.priority!r}."
    try:
        request.cache_salt.encode()
    except (AttributeError, UnicodeEncodeError):
        return f"cache_salt must be a string, empty for none, but is {request.cache_salt!r}."
    return ""


def _token_id_rejection(params: SamplingParams, vocab_size: int) -> str:
    """Why a token id of the sampling parameters is invalid."""
    token_ids = {name: getattr(params, name) or () for name in ("logit_bias", "allowed_token_ids", "stop_token_ids")}
    for word in params.bad_words or ():
        if isinstance(word, str):
            return f"bad_words holds the text {word!r}, but the engine takes token ids; see `encode_bad_words`."
        if len(word) > MAX_BAD_WORD_TOKENS:
            return f"bad_words holds a word of {len(word)} tokens; give words of at most {MAX_BAD_WORD_TOKENS} tokens."
    token_ids["bad_words"] = [token for word in params.bad_words or () for token in word]
    for name, ids in token_ids.items():
        if ids and max(ids) >= vocab_size:
            return f"{name} holds the token id {max(ids)}, but this model's vocabulary is 0..{vocab_size - 1}."
    return ""


def conflicting_fields(params: SamplingParams, eos: Sequence[int]) -> str:
    """Why two fields exclude each other, in a sentence; empty if none do. `eos` are the model's end-of-sequence tokens."""
    allowed = params.allowed_token_ids
    if allowed is None:
        return ""
    if params.structured_outputs is not None:
        return "structured_outputs and allowed_token_ids both restrict the tokens; give one of them."
    stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos)}
    if params.min_tokens and stops.issuperset(allowed):
        return "allowed_token_ids holds stop tokens alone, which min_tokens bans; allow other tokens too, or leave min_tokens out."
    return ""
