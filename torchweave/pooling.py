"""What becomes of a prompt's hidden states: an embedding, or the logits of a classification head. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

Tokens = TypeVar("Tokens", list[int], np.ndarray)
NO_POOLING = (
    "This model generates text; for embeddings, scores or classes start another engine of it with runner=pooling."
)
"""The answer of an engine that generates to a request that pools."""


@dataclass(frozen=True)
class Pooling:
    """How a model pools, and what its rows mean.

    Attributes:
        task: `embed` returns hidden states, `classify` the logits of a sequence classification head.
        size: numbers of a row: the width of the hidden states, or the number of classes.
        pooling_type: the row of a prompt: that of its last token, or the mean over its tokens.
        normalize: divide embeddings by their L2 norm.
        activation: maps logits to what `classify` returns.
        labels: name of each class.
        dimensions: lengths to which embeddings may be cut, as the checkpoint declares; empty: it declares none.
        pad_token_id: a classification head ignores these tokens at the end of a prompt, as transformers does; None: none.
    """

    task: Literal["embed", "classify"]
    size: int
    pooling_type: Literal["last", "mean"] = "last"
    normalize: bool = True
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    labels: tuple[str, ...] = ()
    dimensions: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def refusal(self) -> str:
        """Why a model that pools generates no text, as a sentence."""
        what = "embeddings" if self.task == "embed" else "classes"
        use = "LLM.embed or /v1/embeddings" if self.task == "embed" else "LLM.classify or /classify"
        return f"This model was started with runner=pooling and computes {what}, no text; use {use}, or set runner=generate."

    def task_error(self, task: Literal["embed", "classify", "score"]) -> str:
        """Why the model does not do `task`, as a sentence; empty if it does."""
        if task == "score" and self.task == "classify" and self.size > 1:
            return (
                f"A score needs a classification head with one class, or embeddings; this model has {self.size} classes, so use "
                "LLM.classify or /classify."
            )
        if task == "embed" and self.task == "classify":
            return "This model has a classification head and returns no embeddings; use LLM.classify or /classify."
        if task == "classify" and self.task == "embed":
            return "This model returns embeddings and has no classification head; use LLM.embed or /v1/embeddings."
        return ""

    def strip(self, token_ids: Tokens) -> Tokens:
        """The prompt without the padding at its end that the classification head ignores."""
        end = len(token_ids)
        while self.task == "classify" and end > 1 and token_ids[end - 1] == self.pad_token_id:
            end -= 1
        return token_ids[:end]

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise ValueError for a length to which embeddings cannot be cut."""
        if dimensions is None:
            return
        if self.dimensions and dimensions not in self.dimensions:
            known = ", ".join(map(str, self.dimensions))
            raise ValueError(f"dimensions must be one of {known}, those of this model, but is {dimensions}.")
        if not 1 <= dimensions <= self.size:
            raise ValueError(f"dimensions must be from 1 to {self.size}, the model's width, but is {dimensions}.")

    def embedding(self, row: np.ndarray, dimensions: int | None = None) -> np.ndarray:
        """The embedding of a row, float32 `[size]`, cut to its first `dimensions` numbers before it is normalized."""
        cut = row if dimensions is None else row[:dimensions]
        if not self.normalize:
            return cut
        return cut / np.maximum(np.linalg.norm(cut), np.float32(1e-12))

    def probabilities(self, row: np.ndarray) -> np.ndarray:
        """The logits of a row, float32 `[size]`, after the activation."""
        if self.activation == "none":
            return row
        if self.activation == "sigmoid":
            return np.exp(-np.logaddexp(np.float32(0), -row))
        weights = np.exp(row - row.max())
        return weights / weights.sum()

    def label(self, row: np.ndarray) -> str:
        """Name of the class with the largest logit."""
        best = int(row.argmax())
        return self.labels[best] if best < len(self.labels) else f"LABEL_{best}"


def cosine_similarity(one: np.ndarray, two: np.ndarray) -> float:
    """Cosine of the angle between two rows; 0 if one of them is zero."""
    norms = float(np.linalg.norm(one)) * float(np.linalg.norm(two))
    return float(np.dot(one, two)) / norms if norms else 0.0


def pairs(num_queries: int, num_documents: int) -> list[tuple[int, int]]:
    """(query, document) of each score: one query with every document, or the queries with the documents in order.

    Raises:
        ValueError: both are several, and their numbers differ.
    """
    if num_queries not in (1, num_documents) or not num_documents:
        raise ValueError(
            f"text_1 must be one text, or as many as text_2, but text_1 has {num_queries} and text_2 has {num_documents}."
        )
    return [(0 if num_queries == 1 else index, index) for index in range(num_documents)]
