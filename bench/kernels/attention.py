"""Times of the attention kernels inside CUDA graphs, over a KV cache larger than the L2 cache.

    python -m bench.kernels.attention --out attention.json [--only decode|prefill|mixed|varlen] [--defaults] [--models llama-8b]
                                   [--batches 1 8]

A number is one layer's call, KV write included. Decode is compared with the bytes of keys and values over copy bandwidth, prefill
with causal operations per second. One run compares every launch configuration; `--defaults` takes only the backend's choice. For
mixed steps (decode rows and one prefill row) the kernels run in sequence and as branches of the graph. `varlen` is the attention of
vision towers, beside torch's and with the error against float64; its inputs stay in the L2 cache, where projections leave them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchweave.ops.attention.backends.triton import (
    DecodeConfig,
    PrefillConfig,
    TritonBackend,
    default_decode_config,
    default_prefill_config,
)
from torchweave.ops.attention.choose import available_backends, get_backend
from torchweave.ops.attention.op import (
    AttentionBackend,
    AttentionCall,
    AttentionMetadata,
    LayerKVCache,
    LayerSpec,
)
from torchweave.ops.attention.varlen import VarlenConfig, default_varlen_config, launch_varlen_attention

COPY_GB_PER_S = 3020.0  # measured on an H100 80GB HBM3
COLD_BYTES = 256 << 20  # KV bytes between two reads of the same address: five times the L2 cache
HEADS = {
    "llama-1b": LayerSpec(8, 64, 64, 32),
    "llama-8b": LayerSpec(8, 128, 128, 32),
    "qwen3.5-35b": LayerSpec(2, 256, 256, 16),
}
BATCHES = (1, 8, 32, 128, 256)
CONTEXTS = (128, 192, 1024, 8192)
MAX_SEQ_LEN = 8192
"""The longest row that a launch has to allow for: CUDA graphs hold launches for the model's limit, not for the rows of a step."""
PREFILLS = ((16, 1024), (4, 8192), (1, 1000), (1, 16))
Heads = dict[str, LayerSpec]
MIXED = (64, 128, 256, 384, 512, 1024, 2048)
"""Tokens of a mixed step: MIXED_ROWS decode rows with MIXED_CONTEXT tokens; the others are the second half of a prompt."""
MIXED_ROWS, MIXED_CONTEXT = 48, 640
DECODE_CONFIGS = (
    DecodeConfig(64, 4, 3, 1, 4),
    DecodeConfig(64, 4, 3, 2, 2),
    DecodeConfig(64, 4, 3, 2, 4),
    DecodeConfig(64, 4, 3, 2, 8),
    DecodeConfig(64, 4, 3, 4, 4),
    DecodeConfig(64, 2, 3, 2, 4),
    DecodeConfig(32, 2, 4, 2, 8),
    DecodeConfig(32, 2, 4, 4, 4),
    DecodeConfig(128, 4, 2, 2, 2),
)
WIDE_DECODE_CONFIGS = (
    DecodeConfig(32, 4, 2, 2, 4),
    DecodeConfig(32, 4, 2, 2, 2),
    DecodeConfig(32, 4, 2, 2, 1),
    DecodeConfig(32, 8, 2, 2, 4),
    DecodeConfig(32, 8, 2, 2, 2),
    DecodeConfig(32, 8, 2, 2, 1),
    DecodeConfig(16, 4, 3, 2, 2),
    DecodeConfig(16, 8, 3, 2, 2),
    DecodeConfig(64, 8, 2, 2, 1),
)
"""For heads of more than 128 channels."""
PREFILL_CONFIGS = (
    PrefillConfig(128, 64, 4, 3),
    PrefillConfig(128, 64, 4, 2),
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 64, 8, 2),
    PrefillConfig(128, 128, 8, 2),
    PrefillConfig(128, 128, 8, 3),
    PrefillConfig(64, 64, 4, 3),
    PrefillConfig(64, 64, 4, 2),
    PrefillConfig(256, 64, 8, 3),
)
VARLEN_SHAPES = {
    72: ((1, 4096), (4, 1024), (1, 1024), (1, 256)),
    80: ((1, 4096), (1, 1024), (64, 64)),
    96: ((1, 4096),),
}
"""Sequences and their length by head size, 16 heads: SigLIP and Qwen3-VL have 72, Qwen2-VL 80 and windows of 64."""
VARLEN_CONFIGS = (
    VarlenConfig(128, 64, 4, 3),
    VarlenConfig(128, 64, 8, 3, 128),
    VarlenConfig(128, 64, 8, 3),
    VarlenConfig(128, 64, 4, 4),
    VarlenConfig(128, 64, 8, 4, 128),
    VarlenConfig(128, 32, 8, 4),
    VarlenConfig(64, 64, 4, 3),
)
VARLEN_FEW = 3
"""Configurations for head sizes other than the first."""


@dataclass
class Bench:
    """A step and the inputs of a layer; the calls cycle through `caches`."""

    meta: AttentionMetadata
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    caches: list[LayerKVCache]
    scale: float


def make(spec: LayerSpec, rows: Sequence[tuple[int, int]], block_size: int, layers: int, padded_rows: int = 0) -> Bench:
    """A sequence per row of `rows` (tokens of this step, keys including them) in shuffled blocks, then padding rows."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    tokens = sum(new for new, _ in rows)
    most = max(length for _, length in rows)
    per_row = -(-most // block_size)
    table = torch.randperm(len(rows) * per_row, device=device).view(len(rows), per_row).int()
    starts, mapping = [0], []
    for row, (new, length) in enumerate(rows):
        positions = torch.arange(length - new, length, device=device)
        mapping.append(table[row].long()[positions // block_size] * block_size + positions % block_size)
        starts.append(starts[-1] + new)

    def numbers(values: Sequence[int], padding: int) -> torch.Tensor:
        return torch.tensor([*values, *[padding] * padded_rows], dtype=torch.int32, device=device)

    meta = AttentionMetadata(
        slots=numbers(range(len(rows)), -1),
        query_start=numbers(starts, tokens),
        seq_lens=numbers([length for _, length in rows], 0),
        block_table=table,
        slot_mapping=torch.cat(mapping),
        num_rows=len(rows) + padded_rows,
        num_tokens=tokens,
        decode_only=all(new == 1 for new, _ in rows),
        max_seq_len=max(most, MAX_SEQ_LEN),
    )

    def draw(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(tokens, heads, dim, device=device, dtype=dtype)

    backend = TritonBackend(device)
    caches = [backend.allocate(spec, len(rows) * per_row, block_size, dtype, device) for _ in range(layers)]
    for cache in caches:
        cache.k.normal_()
        cache.v.normal_()
    q, k, v = (
        draw(spec.num_heads, spec.head_dim),
        draw(spec.num_kv_heads, spec.head_dim),
        draw(spec.num_kv_heads, spec.value_dim),
    )
    return Bench(meta, q, k, v, caches, spec.head_dim**-0.5)


def time_us(backend: AttentionBackend, bench: Bench) -> float:
    """Microseconds per layer: the median over replays of a graph of all layers."""
    out = torch.empty_like(bench.q)

    def run() -> None:
        step = backend.begin(bench.meta)
        for cache in bench.caches:
            step.forward(AttentionCall(bench.q, bench.k, bench.v, out, 0, bench.scale), cache)

    return graph_us(run) / len(bench.caches)


def graph_us(run: Callable[[], None], replays: int = 20) -> float:
    """Median microseconds of a graph of `run`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still fill the inputs
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) * 1e3 for a, b in pairwise(events))
    return times[len(times) // 2]


def decode_results(
    heads: Heads, block_size: int, defaults: bool, batches: Sequence[int] = BATCHES
) -> Iterator[dict[str, Any]]:
    """One result per heads, batch, context and configuration."""
    for model, spec in heads.items():
        others = WIDE_DECODE_CONFIGS if spec.head_dim > 128 else DECODE_CONFIGS
        for context in CONTEXTS:
            for batch in batches:
                chosen = default_decode_config(spec.head_dim, torch.bfloat16, torch.bfloat16, batch)
                configs = [chosen] if defaults else list(dict.fromkeys((chosen, *others)))
                kv_bytes = batch * context * spec.bytes_per_token(torch.bfloat16)
                layers = max(2, min(48, COLD_BYTES // kv_bytes))
                bench = make(spec, [(1, context)] * batch, block_size, layers)
                for config in configs:
                    us = _try(lambda c=config, b=bench: time_us(TritonBackend(torch.device("cuda"), decode=c), b))
                    facts = {"model": model, "batch": batch, "context": context, "default": config == chosen}
                    yield {"kind": "decode", **facts, "config": asdict(config), **_speed(us, kv_bytes)}
                del bench


def prefill_results(heads: Heads, block_size: int, defaults: bool) -> Iterator[dict[str, Any]]:
    """One result per heads, shape and configuration, and FlashAttention 3 if installed."""
    fa3 = available_backends("cuda")["fa3"] is None
    for model, spec in heads.items():
        chosen = default_prefill_config(spec.head_dim, spec.num_heads // spec.num_kv_heads, torch.bfloat16)
        configs = [chosen] if defaults else list(dict.fromkeys((chosen, *PREFILL_CONFIGS)))
        for rows, length in PREFILLS:
            operations = 4 * spec.num_heads * spec.head_dim * rows * length * (length + 1) / 2
            bench = make(spec, [(length, length)] * rows, block_size, 4)
            facts = {"kind": "prefill", "model": model, "rows": rows, "length": length}
            for config in configs:
                us = _try(lambda c=config, b=bench: time_us(TritonBackend(torch.device("cuda"), prefill=c), b))
                rate = {"us": us, "tflops": operations / us / 1e6} if isinstance(us, float) else {"error": us}
                yield {**facts, "default": config == chosen, "config": asdict(config), **rate}
            if fa3:
                bench = make(spec, [(length, length)] * rows, 128, 4)
                us = _try(lambda b=bench: time_us(get_backend("fa3", "cuda", torch.bfloat16), b))
                rate = {"us": us, "tflops": operations / us / 1e6} if isinstance(us, float) else {"error": us}
                yield {**facts, "default": False, "config": "fa3", **rate}
            del bench


def mixed_results(heads: Heads, block_size: int, defaults: bool) -> Iterator[dict[str, Any]]:
    """A result per heads and step size, in both orders, padded as in recorded graphs."""
    for model, spec in heads.items():
        for tokens in MIXED:
            new = tokens - MIXED_ROWS
            rows = [(1, MIXED_CONTEXT)] * MIXED_ROWS + [(new, 2 * new)]
            bench = make(spec, rows, block_size, 8, min(tokens, 512) - len(rows))
            for branches in (False, True):
                us = time_us(TritonBackend(torch.device("cuda"), branches=branches), bench)
                yield {
                    "kind": "mixed",
                    "model": model,
                    "tokens": tokens,
                    "default": branches,
                    "branches": branches,
                    "us": us,
                }
            del bench


def varlen_results(_: Heads, block_size: int, defaults: bool) -> Iterator[dict[str, Any]]:
    """One result per head size, shape and configuration, with the largest error against float64 and the time of the first call,
    which builds a Triton kernel or cuDNN's plan; and torch's attention: its own choice, and flash."""
    repeats = 8
    for head_dim, shapes in VARLEN_SHAPES.items():
        few = VARLEN_CONFIGS if head_dim == next(iter(VARLEN_SHAPES)) else VARLEN_CONFIGS[:VARLEN_FEW]
        for rows, length in shapes:
            packed = torch.randn(3, rows * length, 16, head_dim, device="cuda", dtype=torch.bfloat16).unbind()
            q, k, v = (tensor.view(rows, length, 16, head_dim).transpose(1, 2) for tensor in packed)
            bounds = torch.arange(rows + 1, device="cuda") * length
            scale = head_dim**-0.5
            scores = [
                (a.double() @ b.double().mT * scale).softmax(-1) @ c.double() for a, b, c in zip(q, k, v, strict=True)
            ]
            exact = torch.stack(scores).transpose(1, 2).reshape(rows * length, 16, head_dim)
            chosen = default_varlen_config(rows * length, rows, 16)
            calls: dict[str | VarlenConfig, Callable[[], torch.Tensor]] = {
                "sdpa": lambda q=q, k=k, v=v, s=scale: F.scaled_dot_product_attention(q, k, v, scale=s),
                "flash": lambda q=q, k=k, v=v, s=scale: _flash(q, k, v, s),
            }
            for config in [chosen] if defaults else dict.fromkeys((chosen, *few)):
                calls[config] = lambda p=packed, b=bounds, s=scale, c=config: launch_varlen_attention(*p, b, s, c)
            for config, call in calls.items():
                name = config if isinstance(config, str) else asdict(config)
                facts = {"kind": "varlen", "head_dim": head_dim, "rows": rows, "length": length, "config": name}

                def run(call: Callable[[], torch.Tensor] = call) -> None:
                    for _ in range(repeats):
                        call()

                torch.cuda.synchronize()
                begin = time.perf_counter()
                failed = _try(lambda call=call: float(call().isnan().sum()))
                facts["first_ms"] = (time.perf_counter() - begin) * 1e3
                us = failed if isinstance(failed, str) else graph_us(run) / repeats
                if isinstance(us, str):
                    yield {**facts, "default": config == chosen, "error": us}
                    continue
                out = call()
                out = out.transpose(1, 2).reshape(exact.shape) if isinstance(config, str) else out
                error = (out.double() - exact).abs().max().item()
                tflops = 4 * 16 * head_dim * rows * length**2 / us / 1e6
                yield {**facts, "default": config == chosen, "us": us, "tflops": tflops, "max_error": error}


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """torch's flash attention, which a compiled layer calls; in eager code torch prefers cuDNN on some GPUs."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)


def varlen_table(results: list[dict[str, Any]]) -> str:
    """A line per result of `varlen_results`."""
    lines = [
        f"{'heads of':>8} {'shape':>9} {'configuration':<20} {'us':>8} {'TFLOP/s':>8} {'error':>9} {'first ms':>9}"
    ]
    for result in results:
        config = result["config"]
        name = (
            config
            if isinstance(config, str)
            else " ".join(str(value) for value in config.values() if value) + " *" * result["default"]
        )
        start = f"{result['head_dim']:>8} {result['rows']:>3} x {result['length']:<4} {name:<20}"
        if "us" in result:
            error, first = result["max_error"], result["first_ms"]
            lines.append(f"{start} {result['us']:>8.1f} {result['tflops']:>8.0f} {error:>9.1e} {first:>9.1f}")
        else:
            lines.append(f"{start} {result['error'].splitlines()[0]}")
    return "\n".join(lines)


def _try(run: Callable[[], float]) -> float | str:
    """A configuration that exceeds shared memory is a result too."""
    try:
        return run()
    except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError) as error:
        return str(error)[:200]


def _speed(us: float | str, kv_bytes: int) -> dict[str, Any]:
    if isinstance(us, str):
        return {"error": us}
    rate = kv_bytes / us / 1e3
    return {"us": us, "gb_per_s": rate, "of_copy_bandwidth": rate / COPY_GB_PER_S}


def summary(results: list[dict[str, Any]]) -> str:
    """A row per shape: the default, and the fastest configuration if different."""
    shapes: dict[tuple, list[dict[str, Any]]] = {}
    for result in results:
        if "us" in result:
            key = tuple(
                result[name]
                for name in ("kind", "model", "tokens", "batch", "rows", "context", "length")
                if name in result
            )
            shapes.setdefault(key, []).append(result)
    lines = []
    for key, found in shapes.items():
        best = min(found, key=lambda result: result["us"])
        chosen = next((result for result in found if result["default"]), best)
        if "branches" in chosen:
            apart = next(result for result in found if not result["branches"])
            lines.append(
                f"{' '.join(map(str, key)):<34} {chosen['us']:>9.1f} us, one after the other {apart['us']:.1f} us"
            )
            continue
        speed = f"{chosen['tflops']:.0f} TFLOP/s" if "tflops" in chosen else f"{chosen['gb_per_s']:.0f} GB/s"
        config = best["config"] if isinstance(best["config"], str) else tuple(best["config"].values())
        faster = "" if best is chosen else f"; fastest {best['us']:.1f} us {config}"
        lines.append(f"{' '.join(map(str, key)):<34} {chosen['us']:>9.1f} us  {speed:>12}{faster}")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and write its JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="write the results to this JSON file")
    parser.add_argument("--only", choices=("decode", "prefill", "mixed", "varlen"))
    parser.add_argument("--models", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), help="rows of a decode step")
    parser.add_argument("--block-size", type=int, default=TritonBackend.block_size)
    parser.add_argument("--defaults", action="store_true", help="time only the backend's default configurations")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.kernels.attention needs a CUDA GPU")
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    decode = partial(decode_results, batches=args.batches)
    runs = {"prefill": prefill_results, "decode": decode, "mixed": mixed_results, "varlen": varlen_results}
    for kind, run in runs.items():
        if args.only in (None, kind):
            for result in run({name: HEADS[name] for name in args.models}, args.block_size, args.defaults):
                results.append(result)
                record = {
                    "command": " ".join(["python -m bench.kernels.attention", *sys.argv[1:]]),
                    "gpu": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "triton": triton.__version__,
                    "block_size": args.block_size,
                    "results": results,
                }
                args.out.write_text(json.dumps(record, indent=1))
    of_towers = [result for result in results if result["kind"] == "varlen"]
    print(summary([result for result in results if result["kind"] != "varlen"]))
    if of_towers:
        print(varlen_table(of_towers))


if __name__ == "__main__":
    main()
