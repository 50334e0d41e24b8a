"""Lower bound of a decode step's time: its bytes over the measured memory bandwidth."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchweave.engine.llm import LLM

_COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}  # bytes, far above cache sizes


def memory_bandwidth(device: str) -> float:
    """Bytes per second read and written by a copy on the device, median of seven; needs free memory."""
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
    """Bytes that a decode step reads: weights once, and keys and values of `context` tokens per request.

    Excludes an untied token embedding, of which a step reads a few rows. Counts the expected number of distinct experts
    under uniform routing.
    """
    loaded = llm.engine.loaded
    weights = loaded.weight_bytes
    model: Any = loaded.module.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is not None and head is not None and embedding.weight.data_ptr() != head.weight.data_ptr():
        weights -= embedding.weight.numel() * embedding.weight.element_size()
    for experts in (weight for weight in model.parameters() if weight.ndim == 3 and weight.shape[1] > 1):
        unread = (1 - loaded.config.get("num_experts_per_tok", len(experts)) / len(experts)) ** batch_size
        weights -= unread * experts.numel() * experts.element_size()
    per_token = sum(layer.bytes_per_token(loaded.dtype) for layer in loaded.module.attention_layers)
    states = 2 * sum(call.num_bytes for call in loaded.module.recurrent_layers)  # read and written
    return weights + batch_size * (context * per_token + states)


def add_roofline(rows: list[dict[str, Any]], llm: LLM, bandwidth: float) -> None:
    """Add `floor_ms` and `floor_fraction` (lower bound over measured time, at most 1) to each decode row."""
    for row in rows:
        if "median_tpot_ms" in row:
            context = row["input_len"] + row["output_len"] / 2
            row["floor_ms"] = decode_bytes(llm, row["batch_size"], context) / bandwidth * 1e3
            row["floor_fraction"] = row["floor_ms"] / row["median_tpot_ms"]
