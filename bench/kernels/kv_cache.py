"""Cost of KV-cache formats inside CUDA graphs, and bandwidth of block copies to and from host memory.

    python -m bench.kernels.kv_cache --out kv_cache.json [--quick]

Decode and prefill are one layer's call, KV write included, as in `bench.kernels.attention`, over caches in bfloat16 and FP8 in one
run; `ratio` is relative to bfloat16. Copies are timed alone and next to a replayed decode graph, whose slow-down is reported.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.kernels.attention import COLD_BYTES, COPY_GB_PER_S, HEADS, make, time_us
from torchweave.engine.kv_cache.block_copy import CudaBlockCopier
from torchweave.ops.attention.backends.triton import TritonBackend
from torchweave.ops.attention.kv_cache_dtype import FP8_DTYPES

FORMATS: dict[str, torch.dtype | None] = {"bfloat16": None, **FP8_DTYPES}
DECODES = ((1, 8192), (1, 65536), (8, 8192), (8, 32768), (32, 1024), (32, 8192), (128, 1024), (128, 8192))
PREFILLS = ((1, 8192), (4, 8192), (16, 1024))
BLOCK_SIZE = 64


def attention_results(quick: bool) -> Iterator[dict[str, Any]]:
    """One result per heads, shape and format."""
    backend = TritonBackend(torch.device("cuda"))
    shapes = [("decode", rows, 1, length) for rows, length in DECODES]
    shapes += [("prefill", rows, length, length) for rows, length in PREFILLS]
    for model, spec in HEADS.items():
        for kind, rows, new, length in shapes[::3] if quick else shapes:
            wide = rows * length * spec.bytes_per_token(torch.bfloat16)
            layers = max(2, min(48, COLD_BYTES // wide)) if kind == "decode" else 2
            baseline = None
            for name, dtype in FORMATS.items():
                kept = replace(spec, cache_dtype=dtype)
                bench = make(kept, [(new, length)] * rows, BLOCK_SIZE, layers)
                us = time_us(backend, bench)
                baseline = baseline or us
                facts = {"kind": kind, "model": model, "rows": rows, "length": length, "cache": name}
                rate = rows * length * kept.bytes_per_token(torch.bfloat16) / us / 1e3
                yield {**facts, "us": us, "ratio": us / baseline, "of_copy_bandwidth": rate / COPY_GB_PER_S}
                del bench


def copy_results() -> Iterator[dict[str, Any]]:
    """GB/s to the host and back for blocks of Llama 8B, few and many at once."""
    spec, num_blocks = HEADS["llama-8b"], 256
    backend = TritonBackend(torch.device("cuda"))
    layers = [backend.allocate(spec, num_blocks, BLOCK_SIZE, torch.bfloat16, torch.device("cuda")) for _ in range(32)]
    tensors = [tensor for layer in layers for tensor in layer.tensors]
    block_bytes = sum(tensor[0].nbytes for tensor in tensors)
    copier = CudaBlockCopier(tensors, num_blocks * block_bytes)
    bench = make(spec, [(1, 8192)] * 8, BLOCK_SIZE, 8)
    alone = time_us(backend, bench)
    for count in (1, 16, 128):
        numbers = np.arange(count)
        for direction in ("to_host", "to_device"):
            times = []
            for _ in range(6):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                copier.store(numbers, numbers) if direction == "to_host" else copier.load(numbers, numbers)
                host = time.perf_counter() - begin
                torch.cuda.synchronize()
                times.append((time.perf_counter() - begin, host))
            seconds, host = min(times)
            facts = {"kind": "copy", "direction": direction, "blocks": count, "block_bytes": block_bytes}
            yield {**facts, "gb_per_s": count * block_bytes / seconds / 1e9, "host_us": host * 1e6}
    for direction, move in (("to_host", copier.store), ("to_device", copier.load)):
        for _ in range(20):
            move(np.arange(num_blocks), np.arange(num_blocks))
        beside = time_us(backend, bench)
        copying = not copier.is_done(copier._begun)  # false: the copies ended before the timing
        torch.cuda.synchronize()
        yield {"kind": "beside", "direction": direction, "decode_us": alone, "beside_us": beside, "throughout": copying}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time KV cache dtypes and block copies to and from host memory.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="time a third of the shapes")
    options = parser.parse_args()
    results = []
    for result in (*attention_results(options.quick), *copy_results()):
        results.append(result)
        print(
            {key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()}, flush=True
        )
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "command": " ".join(sys.argv)}
    options.out.write_text(json.dumps({**facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
