"""`LLM`: offline inference with vLLM's interface.

Importing this module does not import torch: several ranks are started first and import in parallel.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from torchweave.compiler.explain.page import save_explanation
from torchweave.config.options import EngineConfig, use_passive_openmp, vllm_variables
from torchweave.config.peer_options import read_options
from torchweave.engine import pooling_methods
from torchweave.engine.client import AsyncInbox, Client, CompletionStream, RequestLoop, stream_deltas
from torchweave.engine.control.methods import ControlMethods, result_of
from torchweave.engine.detokenizer import encode_bad_words
from torchweave.engine.lora_request import LoRARequest
from torchweave.engine.outputs import (
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    ClassificationOutput,
    CompletionOutput,
    Counter,
    EmbeddingOutput,
    Gauge,
    Metric,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from torchweave.engine.pooling_methods import PoolingParams
from torchweave.engine.prompts import Prompt, as_ids, as_list, as_lists, text_and_images, text_of, truncated
from torchweave.engine.request import InferenceRequest, SamplingParams
from torchweave.engine.sampling.structured_output import rejection_reason
from torchweave.engine.startup.early_start import prestart_workers, stored_bytecode
from torchweave.images import EncodedPrompt, ImageProcessor, has_images
from torchweave.report import Report
from torchweave.utils import gc
from torchweave.utils.registry import path_of
from torchweave.utils.suggest import suggest_keywords

if TYPE_CHECKING:
    from torchweave.distributed.launchers.local import WorkerPool
    from torchweave.engine.batch_manager import BatchManager
    from torchweave.engine.startup.build import Engine
    from torchweave.models.load import LoadedModel
    from torchweave.tokenizer import Tokenizer

Messages = Sequence[dict[str, Any]]
_METRICS_PREFIX = "torchweave_"
_POLL_SECONDS = 1.0  # between checks that the engine is alive while it drains


class LLM(ControlMethods):
    """An engine, ready when the constructor returns.

    Args:
        model: a folder in Hugging Face's layout, a hub id, or a built-in name (`demo`).
        report: receives every decision; None creates one.
        disable_log_stats: return outputs without `metrics`.
        options: fields of `EngineConfig`, or vLLM's names of them (`enforce_eager`, `compilation_config`); nested configs may be
            dicts.

    Raises:
        ValueError: the model or an option is not supported; the message says why and what to do.
    """

    _with_metrics = True

    def __init__(
        self, model: str, *, report: Report | None = None, disable_log_stats: bool | None = False, **options: Any
    ) -> None:
        if not isinstance(disable_log_stats, bool | None):
            raise ValueError(f"disable_log_stats={disable_log_stats!r} must be True or False")
        self._with_metrics = not disable_log_stats
        if "logits_processors" in options:
            options["logits_processors"] = tuple(map(path_of, options["logits_processors"] or ()))
        config, advice = read_options({"model": model, **options}, vllm_variables())
        report = report if report is not None else Report()
        for option, sentence in advice:
            report.event("warning", what=option, why=sentence)
        self._open(config, report, None)

    @classmethod
    def from_config(
        cls, config: EngineConfig, report: Report | None = None, worker_pool: WorkerPool | None = None
    ) -> LLM:
        """Create an engine from a config; `worker_pool` as in `open_engine`."""
        llm = cls.__new__(cls)
        llm._open(config, report, None, worker_pool)
        return llm

    @classmethod
    def from_loaded(cls, loaded: LoadedModel, config: EngineConfig, report: Report | None = None) -> LLM:
        """Create an engine over a model in memory; `config.model` is only its name."""
        llm = cls.__new__(cls)
        llm._open(config, report, loaded)
        return llm

    def _open(
        self,
        config: EngineConfig,
        report: Report | None,
        loaded: LoadedModel | None,
        worker_pool: WorkerPool | None = None,
    ) -> None:
        self.report = report if report is not None else Report()
        if "torch" not in sys.modules:  # else its OpenMP is loaded, and other code of the program may rely on it
            use_passive_openmp()
        starts_workers = worker_pool is None and loaded is None
        with (
            stored_bytecode(config),
            prestart_workers(config) if starts_workers else nullcontext(worker_pool) as worker_pool,
        ):
            with gc.gc_paused():
                from torchweave.compiler.dump import open_dump
                from torchweave.engine.batch_manager import BatchManager
                from torchweave.engine.startup.open import open_engine
            open_dump(config.torch_compile_config, self.report)
            self.engine: Engine = open_engine(config, self.report, loaded, worker_pool)
        self.plan = self.engine.plan
        self.tokenizer: Tokenizer | None = self.engine.loaded.tokenizer
        self._client = Client()
        self.manager = BatchManager(
            self.engine.scheduler,
            self.engine.steps,
            self._client.get_requests,
            poll_stop=self._client.poll_stop,
            send_responses=self._client.send_responses,
            notify_state_changes=self._client.notify_state_changes,
            run_ahead=self.plan.run_ahead,
            idle_seconds=None,
            seed=config.seed,
            call_ranks=self.engine.call_ranks,
        )
        self._finalizer = weakref.finalize(self, _shutdown_engine, self.manager, self.engine, os.getpid())
        self.report.event("ready")
        save_explanation(self.plan, self.report)

    def __repr__(self) -> str:
        return f"LLM({self.engine.loaded.name!r}, device={self.plan.device!r}, dtype={self.plan.dtype!r})"

    # -- complete outputs ----------------------------------------------------------------------------------------------

    @suggest_keywords
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate completions of prompts, batched together.

        Args:
            prompts: texts, lists of token ids, or `{"prompt": text, "multi_modal_data": {"image": PIL.Image or a list}}` with a
                placeholder of the model (`<image>`) in the text for each image.
            sampling_params: one for all, or one for each; None: `default_sampling_params()`.
            use_tqdm: show a progress bar on a terminal.
            lora_request: the adapter of all prompts, or one for each (None: the model's own answer); loaded unless it is.

        Returns:
            One output a prompt, in order.

        Raises:
            ValueError: a prompt, its parameters or its adapter are not supported; no request is started.
            RuntimeError: the engine failed or was shut down.
        """
        texts, params = as_lists(prompts, self._params_or_default(sampling_params))
        adapters = self.load_requested(lora_request, len(texts))
        ids, params = self._prepare(texts, params, adapters)
        with self._open_stream() as stream:
            request_ids = [
                stream.submit(prompt, each, each.stops_in_text, adapter=adapter)
                for prompt, each, adapter in zip(ids, params, adapters, strict=True)
            ]
            stream.wake_engine()
            num_requests = len(stream.completions)
            with self.report.progress("generating", num_requests) if use_tqdm else nullcontext(lambda: None) as advance:
                for _, final in stream.responses():
                    if final:
                        advance()
        return [
            self._request_output(stream, text, prompt, of_prompt)
            for text, prompt, of_prompt in zip(texts, ids, request_ids, strict=True)
        ]

    def _request_output(
        self,
        stream: CompletionStream,
        given: Prompt,
        prompt: EncodedPrompt,
        request_ids: Sequence[int],
        delta: bool = False,
    ) -> RequestOutput:
        """The output of a prompt so far, or (`delta`) since the last one."""
        first = request_ids[0]
        completions = [completion for each in request_ids for completion in stream.completions[each]]
        outputs = [completion.take_delta() if delta else completion.result() for completion in completions]
        metrics = stream.metrics[first]
        metrics.num_generation_tokens = sum(len(completion.token_ids) for completion in completions)
        return RequestOutput(
            request_id=str(first),
            prompt=text_of(given),
            prompt_token_ids=prompt.token_ids.tolist(),
            outputs=outputs,
            prompt_logprobs=stream.completions[first][0].prompt_logprob_dicts(),
            num_cached_tokens=stream.num_cached_tokens.get(first, 0),
            metrics=metrics if self._with_metrics else None,
        )

    @suggest_keywords
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate replies to conversations, lists of `{"role": ..., "content": ...}`, with the model's chat template.

        A content is a text or a list of parts: `{"type": "text", "text": ...}`, `{"type": "image", "image": PIL.Image}` or
        OpenAI's `{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`.

        Args:
            chat_template: Jinja source that replaces the model's template.
            add_generation_prompt: end the prompt with the beginning of a reply.
            continue_final_message: continue the last message; needs `add_generation_prompt=False`.
            tools: functions that the model may call, `{"type": "function", "function": {...}}`, for the template.
            chat_template_kwargs: variables of the template (`{"enable_thinking": False}`).
            lora_request: see `generate`.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError("A message is continued or a new one begins; set add_generation_prompt=False to continue.")
        variables: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        variables |= {"continue_final_message": True} if continue_final_message else {}
        variables |= {} if chat_template is None else {"chat_template": chat_template}
        variables |= {"tools": self._check_tools(tools, chat_template)} if tools else {}
        variables |= chat_template_kwargs or {}
        first = messages[0] if isinstance(messages, Sequence) and messages else None
        conversations = messages if isinstance(first, (list, tuple)) else [messages]
        prompts = [self.encode_chat(conversation, **variables) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best sequences of each prompt, found as transformers finds them; `lora_request` as of `generate`.

        Raises:
            ValueError: see `generate`; a temperature other than 0.
        """
        if params.temperature:
            raise ValueError("A beam search does not sample; leave temperature out or set it to 0.")
        sampling = SamplingParams(
            temperature=0.0,
            n=params.beam_width,
            beam_width=params.beam_width,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            length_penalty=params.length_penalty,
            logprobs=0,
        )
        outputs = self.generate(prompts, sampling, lora_request=lora_request)
        keep_end = params.include_stop_str_in_output
        return [
            BeamSearchOutput([self._beam(output, answer, keep_end) for answer in output.outputs]) for output in outputs
        ]

    def _beam(self, output: RequestOutput, answer: CompletionOutput, keep_end: bool) -> BeamSearchSequence:
        ended = answer.finish_reason == "stop"
        tokens = output.prompt_token_ids + (answer.token_ids[:-1] if ended and not keep_end else answer.token_ids)
        return BeamSearchSequence(
            tokens=tokens,
            logprobs=answer.logprobs or [],
            cum_logprob=answer.cumulative_logprob or 0.0,
            text=None if self.tokenizer is None else self.tokenizer.decode(tokens),
            finish_reason=answer.finish_reason,
            stop_reason=answer.token_ids[-1] if ended else None,
        )

    # -- models that pool ----------------------------------------------------------------------------------------------

    @suggest_keywords
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = False,
        *,
        dimensions: int | None = None,
        pooling_params: PoolingParams | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Embeddings of prompts (`output.outputs.embedding`), in order, by a model with runner=pooling.

        Args:
            dimensions: keep so many numbers of each embedding, then normalize it, for models trained for it (matryoshka).
            pooling_params: the same, as an object of vLLM's name.

        Raises:
            ValueError: the model generates or classifies; a prompt or `dimensions` is not supported.
            RuntimeError: the engine failed or was shut down.
        """
        if pooling_params is not None:
            dimensions = pooling_params.dimensions if dimensions is None else dimensions
        return pooling_methods.embed(self, as_list(prompts), dimensions, use_tqdm)

    @suggest_keywords
    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = False,
        *,
        use_activation: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Probabilities of classes (`output.outputs.probs`), in order, by a `ForSequenceClassification` model.

        Args:
            use_activation: apply the softmax or sigmoid of the model's problem type; else return logits.
            pooling_params: the same, as an object of vLLM's name.

        Raises:
            ValueError, RuntimeError: see `embed`.
        """
        if pooling_params is not None and pooling_params.use_activation is not None:
            use_activation = pooling_params.use_activation
        return pooling_methods.classify(self, as_list(prompts), use_activation, use_tqdm)

    @suggest_keywords
    def encode(
        self, prompts: Prompt | Sequence[Prompt], *, pooling_task: str | None = None, use_tqdm: bool = False
    ) -> Any:
        """What prompts pool to as tensors (`output.outputs.data`), in order: the numbers of `embed` or `classify`.

        Args:
            pooling_task: `embed` or `classify`. None is deprecated: the token ids of a text, which
                `get_tokenizer().encode(text)` returns, too.

        Raises:
            ValueError, RuntimeError: see `embed`.
        """
        if pooling_task is not None:
            return pooling_methods.encode(self, as_list(prompts), pooling_task, use_tqdm)
        if not isinstance(prompts, str):
            raise ValueError("LLM.encode needs pooling_task, which is embed or classify.")
        why = "LLM.encode(text) pools with pooling_task; use LLM.get_tokenizer().encode(text) for token ids"
        warnings.warn(why, DeprecationWarning, stacklevel=3)
        return self._require_tokenizer().encode(prompts)

    @suggest_keywords
    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], use_tqdm: bool = False
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Scores of pairs of texts (`output.outputs.score`): one `text_1` with each `text_2`, or pairs in order.

        A classification model with one class reads each pair as one prompt; an embedding model returns cosine similarities.

        Raises:
            ValueError, RuntimeError: see `embed`.
        """
        queries, documents = ([each] if isinstance(each, str) else list(each) for each in (text_1, text_2))
        return pooling_methods.score(self, queries, documents, use_tqdm)

    # -- streams -------------------------------------------------------------------------------------------------------

    @suggest_keywords
    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, lora_request: LoRARequest | None = None
    ) -> Iterator[CompletionOutput]:
        """Generate completions of a prompt; yields new text and tokens, with `finish_reason` in the last output of each.

        Leaving the iterator early stops the request.
        """
        checked: Any = prompt if isinstance(prompt, (str, EncodedPrompt, Mapping)) else as_ids(prompt)
        return (output for _, output in self.stream_all([checked], sampling_params, lora_request))

    def stream_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> Iterator[tuple[int, CompletionOutput]]:
        """Stream several prompts, batched together; yields (index of the prompt, new output). A beam search yields at its end."""
        texts, params = as_lists(prompts, self._params_or_default(sampling_params))
        if any(each.prompt_logprobs is not None for each in params):
            raise ValueError("A stream does not return prompt_logprobs; use generate.")
        adapters = self.load_requested(lora_request, len(texts))
        ids, params = self._prepare(texts, params, adapters)
        stream = self._open_stream()
        prompt_of: dict[int, int] = {}
        for number, (prompt, each, adapter) in enumerate(zip(ids, params, adapters, strict=True)):
            prompt_of |= dict.fromkeys(stream.submit(prompt, each, each.beam_width == 1, adapter=adapter), number)
        stream.wake_engine()
        return stream_deltas(stream, prompt_of, self)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def default_sampling_params(self) -> SamplingParams:
        """Sampling parameters of the checkpoint's generation config; greedy if it has none."""
        defaults = self.engine.loaded.generation
        return SamplingParams(
            temperature=0.0 if defaults.temperature is None else defaults.temperature,
            top_k=defaults.top_k or 0,
            top_p=1.0 if defaults.top_p is None else defaults.top_p,
            min_p=defaults.min_p or 0.0,
            repetition_penalty=1.0 if defaults.repetition_penalty is None else defaults.repetition_penalty,
            max_tokens=defaults.max_new_tokens or 256,
        )

    get_default_sampling_params = default_sampling_params  # vLLM's name

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges of the engine, under the names of the server's `/metrics`.

        Raises:
            RuntimeError: the engine failed or was shut down.
        """
        return result_of(self.manager, self.manager.run_on_loop(lambda _: self._read_metrics()))

    def _read_metrics(self) -> list[Metric]:
        scheduler, client = self.engine.scheduler, self._client
        kv, paused = scheduler.kv, scheduler.num_paused
        gauges = {
            "num_requests_running": scheduler.num_active - scheduler.num_waiting,
            "num_requests_waiting": max(scheduler.num_waiting - paused, 0),
            "num_requests_paused": paused,
            "kv_cache_usage_perc": kv.num_used / kv.num_blocks,
            "kv_cache_blocks": kv.num_blocks,
        }
        counters = {
            "prefix_cache_queries": (kv.reused_total + kv.missed_total) * kv.block_size,
            "prefix_cache_hits": kv.reused_total * kv.block_size,
            "prompt_tokens": client.num_prompt_tokens,
            "generation_tokens": client.num_generated_tokens,
            "num_preemptions": scheduler.paused_total,
        }
        if scheduler.limits.query_len > 1:
            counts = scheduler.speculation.as_dict()
            counters |= {f"spec_decode_{name}": value for name, value in counts.items() if isinstance(value, int)}
        return [
            *(Gauge(_METRICS_PREFIX + name, value) for name, value in gauges.items()),
            *(Counter(_METRICS_PREFIX + name, value) for name, value in counters.items()),
        ]

    def call(self, name: str, **arguments: Any) -> Any:
        """Run a control call on the leader and all ranks, between two steps; see docs/develop/control-calls.md.

        Raises:
            ValueError: the call or an argument is not known or invalid.
            ControlError: the call failed, on a rank that the message names; the engine continues.
            RuntimeError: the engine failed or was shut down.
        """
        return result_of(self.manager, self.manager.call(name, **arguments))

    @cached_property
    def llm_engine(self) -> RequestLoop:
        """Requests one by one: `add_request`, then `step` while there are unfinished ones."""
        return RequestLoop(self)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer from transformers.

        Raises:
            ValueError: the model has none.
        """
        return self._require_tokenizer().hf_tokenizer

    def _params_or_default(
        self, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> SamplingParams | Sequence[SamplingParams]:
        return self.default_sampling_params() if params is None else params

    def encode_chat(self, messages: Messages, **variables: Any) -> list[int] | EncodedPrompt:
        """Token ids of a conversation; with its images, if it has any."""
        if has_images(messages):
            return self.image_processor.chat(messages, **variables)
        return self._require_tokenizer().chat(messages, **variables)

    def _check_tools(self, tools: Sequence[dict[str, Any]], template: str | None) -> list[dict[str, Any]]:
        source = template or self.get_tokenizer().chat_template
        if isinstance(source, str) and "tools" not in source:
            raise ValueError(
                "The chat template of this model does not support tools; leave tools out, or give a chat_template that does."
            )
        return list(tools)

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self.engine.loaded.name} has no tokenizer; give the prompt as token ids.")
        return self.tokenizer

    def _prepare(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], adapters: Sequence[str]
    ) -> tuple[list[EncodedPrompt], list[SamplingParams]]:
        """Token ids of prompts, and their parameters as the engine reads them.

        Raises:
            ValueError: the engine does not support a prompt or its parameters.
        """
        encoded_params = [self._encode_bad_words(each.checked()) for each in params]
        encoded = [
            truncated(prompt, each, self.plan.max_model_len)
            for prompt, each in zip(self._encode_all(prompts), encoded_params, strict=True)
        ]
        self._validate(encoded, encoded_params, adapters)
        return encoded, encoded_params

    def _encode_bad_words(self, params: SamplingParams) -> SamplingParams:
        return encode_bad_words(params, lambda text: self._require_tokenizer().encode(text, add_special_tokens=False))

    def _encode_all(self, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
        return [self._encode_prompt(prompt) for prompt in prompts]

    def _encode_prompt(self, prompt: Prompt) -> EncodedPrompt:
        if isinstance(prompt, EncodedPrompt):
            return prompt
        if isinstance(prompt, Mapping):
            text, images = text_and_images(prompt)
            return self.image_processor.encode(text, images) if images else self._encode_prompt(text)
        return EncodedPrompt(as_ids(self._require_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt))

    @cached_property
    def image_processor(self) -> ImageProcessor:
        """The checkpoint's processor of images.

        Raises:
            ValueError: the model is served without images, or has no processor.
        """
        tokenizer = self._require_tokenizer()
        return ImageProcessor(tokenizer.folder, self.engine.scheduler.image_limits, tokenizer.trust_remote_code)

    def _validate(
        self, prompts: Sequence[EncodedPrompt], params: Sequence[SamplingParams], adapters: Sequence[str]
    ) -> None:
        grammar_errors: dict[int, str] = {}  # by grammar, since a check takes milliseconds and prompts mostly share one
        for number, (prompt, settings, adapter) in enumerate(zip(prompts, params, adapters, strict=True)):
            grammar = settings.structured_outputs
            request = InferenceRequest(0, prompt.token_ids, settings, images=prompt.images, adapter=adapter)
            why = self.engine.scheduler.rejection_reason(request)
            if not why and grammar is not None:
                if id(grammar) not in grammar_errors:
                    grammar_errors[id(grammar)] = rejection_reason(grammar)
                why = grammar_errors[id(grammar)]
            if why:
                raise ValueError(why if len(prompts) == 1 else f"Prompt {number}: {why}")

    def _open_stream(self, inbox: AsyncInbox | None = None) -> CompletionStream:
        return CompletionStream(self._client, self.manager, self.tokenizer, SimpleQueue() if inbox is None else inbox)

    def shutdown(self, drain: bool = True) -> None:
        """End the engine: after all requests have finished, or (`drain=False`) now, failing unfinished requests."""
        self._client.close()
        drain = drain and not self.manager.is_paused  # requests would wait for ever
        while drain and self.manager.alive and not self._client.wait_until_answered(_POLL_SECONDS):
            pass
        self.manager.shutdown(drain=drain)
        self.engine.close()
        self._client.fail_all("The engine was shut down before the request had finished.")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown(drain=exc[0] is None)


def _shutdown_engine(manager: BatchManager, engine: Engine, process: int) -> None:
    """End the threads and processes of an engine that was dropped; in a fork they are those of its parent."""
    if os.getpid() != process:
        return
    manager.shutdown(drain=False)
    engine.close()
