"""`LLM.embed`, `LLM.classify`, `LLM.score` and `LLM.encode`: prompts that end with their last token, with vLLM's interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from torchweave.engine.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)
from torchweave.engine.request import POOLING_PARAMS, InferenceRequest
from torchweave.images import EncodedPrompt
from torchweave.pooling import NO_POOLING, Pooling, cosine_similarity, pairs

if TYPE_CHECKING:
    from torchweave.engine.client import CompletionStream
    from torchweave.engine.startup.build import Engine
    from torchweave.report import Report
    from torchweave.tokenizer import Tokenizer


@dataclass
class PoolingParams:
    """Parameters of `LLM.embed`, `classify` and `encode`, under vLLM's names; None: the model's.

    Attributes:
        dimensions: numbers of each embedding, see `LLM.embed`.
        use_activation: apply the softmax or sigmoid, see `LLM.classify`.
    """

    dimensions: int | None = None
    use_activation: bool | None = None


class _LLM(Protocol):
    """What these functions use of an `LLM`."""

    engine: Engine
    report: Report

    def _encode_all(self, prompts: Sequence[Any]) -> list[EncodedPrompt]: ...
    def _require_tokenizer(self) -> Tokenizer: ...
    def _open_stream(self) -> CompletionStream: ...


NumbersOf = Callable[[np.ndarray], np.ndarray]
_Row = tuple[int, EncodedPrompt, np.ndarray, int]
"""Id, prompt, row and cached tokens of a request."""


def embed(
    llm: _LLM, prompts: Sequence[Any], dimensions: int | None, use_tqdm: bool
) -> list[PoolingRequestOutput[EmbeddingOutput]]:
    """See `LLM.embed`."""
    pooling = require_pooling(llm, "embed")
    pooling.check_dimensions(dimensions)
    rows = _pool(llm, pooling, llm._encode_all(prompts), use_tqdm)
    return [_output(row, EmbeddingOutput(pooling.embedding(row[2], dimensions).tolist())) for row in rows]


def classify(
    llm: _LLM, prompts: Sequence[Any], use_activation: bool, use_tqdm: bool
) -> list[PoolingRequestOutput[ClassificationOutput]]:
    """See `LLM.classify`."""
    pooling = require_pooling(llm, "classify")
    rows = _pool(llm, pooling, llm._encode_all(prompts), use_tqdm)
    values = [pooling.probabilities(row[2]) if use_activation else row[2] for row in rows]
    return [_output(row, ClassificationOutput(numbers.tolist())) for row, numbers in zip(rows, values, strict=True)]


def encode(llm: _LLM, prompts: Sequence[Any], task: str, use_tqdm: bool) -> list[PoolingRequestOutput[PoolingOutput]]:
    """See `LLM.encode`."""
    numbers_of, encoded = prepare(llm, prompts, task)
    return [tensor_output(row, numbers_of) for row in _wait_for_rows(llm, encoded, use_tqdm)]


def prepare(llm: _LLM, prompts: Sequence[Any], task: str | None) -> tuple[NumbersOf, list[EncodedPrompt]]:
    """How a row becomes the numbers of `task` (None: that of the model), and the prompts as the engine takes them.

    Raises:
        ValueError: the model does not do the task, or the engine does not support a prompt.
    """
    if task is None and (of_model := llm.engine.loaded.module.pooling) is not None:
        task = of_model.task
    if task not in ("embed", "classify", None):
        raise ValueError(f"pooling_task={task!r} is not supported: a prompt pools to one row; use embed or classify.")
    pooling = require_pooling(llm, "classify" if task == "classify" else "embed")
    encoded = _checked(llm, pooling, llm._encode_all(prompts))
    return (pooling.probabilities if task == "classify" else pooling.embedding), encoded


def tensor_output(row: _Row, numbers_of: NumbersOf) -> PoolingRequestOutput[PoolingOutput]:
    """The output of a request with the numbers of its row."""
    import torch

    return _output(row, PoolingOutput(torch.tensor(numbers_of(row[2]))))


def score(
    llm: _LLM, queries: Sequence[str], documents: Sequence[str], use_tqdm: bool
) -> list[PoolingRequestOutput[ScoringOutput]]:
    """See `LLM.score`."""
    pooling = require_pooling(llm, "score")
    numbered = pairs(len(queries), len(documents))
    if wrong := [text for text in (*queries, *documents) if not isinstance(text, str)]:
        raise ValueError(f"text_1 and text_2 are texts or lists of texts, but hold {wrong[0]!r:.80}.")
    if pooling.task == "embed":
        rows = _pool(llm, pooling, llm._encode_all([*queries, *documents]), use_tqdm)
        outputs = []
        for query, document in numbered:
            one, two = rows[query], rows[len(queries) + document]
            prompt = EncodedPrompt(np.concatenate([one[1].token_ids, two[1].token_ids]))
            similarity = cosine_similarity(one[2], two[2])
            outputs.append(_output((two[0], prompt, two[2], one[3] + two[3]), ScoringOutput(similarity)))
        return outputs
    tokenizer = llm._require_tokenizer()
    encoded = [tokenizer.encode_pair(queries[query], documents[document]) for query, document in numbered]
    rows = _pool(llm, pooling, [EncodedPrompt(np.asarray(ids, np.int64)) for ids in encoded], use_tqdm)
    return [_output(row, ScoringOutput(float(pooling.probabilities(row[2])[0]))) for row in rows]


def require_pooling(llm: _LLM, task: Literal["embed", "classify", "score"]) -> Pooling:
    """How the model pools.

    Raises:
        ValueError: it does not do `task`.
    """
    pooling = llm.engine.loaded.module.pooling
    if why := NO_POOLING if pooling is None else pooling.task_error(task):
        raise ValueError(why)
    assert pooling is not None
    return pooling


def _pool(llm: _LLM, pooling: Pooling, prompts: Sequence[EncodedPrompt], use_tqdm: bool) -> list[_Row]:
    """The row of each prompt, in order.

    Raises:
        ValueError: a prompt is refused; no request is started.
        RuntimeError: the engine failed or was shut down.
    """
    return _wait_for_rows(llm, _checked(llm, pooling, prompts), use_tqdm)


def _checked(llm: _LLM, pooling: Pooling, prompts: Sequence[EncodedPrompt]) -> list[EncodedPrompt]:
    prompts = [EncodedPrompt(np.asarray(pooling.strip(prompt.token_ids)), prompt.images) for prompt in prompts]
    for number, prompt in enumerate(prompts):
        request = InferenceRequest(0, prompt.token_ids, POOLING_PARAMS, images=prompt.images, pooling=True)
        if why := llm.engine.scheduler.rejection_reason(request):
            raise ValueError(why if len(prompts) == 1 else f"Prompt {number}: {why}")
    return prompts


def _wait_for_rows(llm: _LLM, prompts: Sequence[EncodedPrompt], use_tqdm: bool) -> list[_Row]:
    with llm._open_stream() as stream:
        ids = [stream.submit_pooling(prompt) for prompt in prompts]
        stream.wake_engine()
        with llm.report.progress("pooling", len(ids)) if use_tqdm else nullcontext(lambda: None) as advance:
            for _, final in stream.responses():
                if final:
                    advance()
    return [
        (request_id, prompt, stream.pooled[request_id], stream.num_cached_tokens[request_id])
        for request_id, prompt in zip(ids, prompts, strict=True)
    ]


def _output(row: _Row, output: Any) -> PoolingRequestOutput[Any]:
    request_id, prompt, _, num_cached_tokens = row
    return PoolingRequestOutput(str(request_id), output, prompt.token_ids.tolist(), num_cached_tokens)
