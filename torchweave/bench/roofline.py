"""The time below which no decode step can be: its bytes over the memory's measured bandwidth."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchweave.engine.llm import LLM

_COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}  # bytes, far beyond the caches


def memory_bandwidth(device: str) -> float:
    """Bytes a second that a copy reads and writes on a device; the median of seven. Run it while memory is free."""
    kind = torch.device(device).type
    source = torch.zeros(_COPY_BYTES[kind] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)

    def wait() -> None:
        if kind == "cuda":
            torch.cuda.synchronize(device)

    seconds = []
    for _ in range(8):
        wait()
        begin = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        wait()
        seconds.append((time.perf_counter() - begin) / 4)
    return 2 * source.numel() * 4 / statistics.median(seconds[1:])


def decode_bytes(llm: LLM, batch_size: int, context: float) -> float:
    """Bytes that a decode step must read: the weights once, and each request's keys and values of `context` tokens.

    A token embedding that is not also the output layer is left out: a step reads a few rows of it. Of a mixture's experts
    those are counted that the batch is expected to choose when every one is as likely as another.
    """
    loaded = llm.engine.loaded
    weights = loaded.weight_bytes
    model: Any = loaded.module.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is not None and head is not None and embedding.weight.data_ptr() != head.weight.data_ptr():
        weights -= embedding.weight.numel() * embedding.weight.element_size()
    for experts in (weight for weight in model.parameters() if weight.ndim == 3):
        unread = (1 - loaded.config.get("num_experts_per_tok", len(experts)) / len(experts)) ** batch_size
        weights -= unread * experts.numel() * experts.element_size()
    per_token = sum(layer.bytes_per_token(loaded.dtype) for layer in loaded.module.attention_layers)
    return weights + batch_size * context * per_token


def add_roofline(rows: list[dict[str, Any]], llm: LLM, bandwidth: float) -> None:
    """To each decode row: `floor_ms`, and `floor_fraction`: the floor's part of what was measured (1 is the limit)."""
    for row in rows:
        if "median_tpot_ms" in row:
            context = row["input_len"] + row["output_len"] / 2
            row["floor_ms"] = decode_bytes(llm, row["batch_size"], context) / bandwidth * 1e3
            row["floor_fraction"] = row["floor_ms"] / row["median_tpot_ms"]
