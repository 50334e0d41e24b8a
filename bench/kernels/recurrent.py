"""Times of the recurrent ops inside CUDA graphs, over states larger than the L2 cache.

    python -m bench.kernels.recurrent --out recurrent.json [--only decode|prefill] [--models qwen3-next,falcon-h1,...]

A number is one layer's call. Beside it stand the bytes that the call must move (states read and written once, inputs read and
results written once) over copy bandwidth, and fla-core's function for the same inputs where it is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.kernels.attention import graph_us
from torchweave.ops.attention.op import AttentionMetadata
from torchweave.ops.recurrent.op import run_recurrent_op, state_shape

OPS = torch.ops.torchweave
COLD_BYTES = 256 << 20  # bytes of states between two reads of the same address: five times the L2 cache
MAX_LAYERS = 36
DECODE = (1, 32, 128)
PREFILL = ((1, 1024), (16, 1024))


@dataclass
class Inputs:
    """Arguments of one call, without its state, and the name of those that have a row per token."""

    op: Any
    args: dict[str, Any]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def conv(tokens: int, channels: int, width: int) -> Inputs:
    x = draw(tokens, channels)
    args = {"x": x, "weight": draw(channels, width), "bias": None, "out": torch.empty_like(x), "activation": "silu"}
    return Inputs(OPS.causal_conv.default, args)


def delta(tokens: int, heads: int, value_heads: int, dim: int, by_channel: bool = False) -> Inputs:
    g = (
        draw(tokens, value_heads, dim, dtype=torch.float32)
        if by_channel
        else draw(tokens, value_heads, dtype=torch.float32)
    )
    args = {
        "q": draw(tokens, heads, dim),
        "k": draw(tokens, heads, dim),
        "v": draw(tokens, value_heads, dim),
        "g": -g.abs() * 0.1,
        "beta": draw(tokens, value_heads).sigmoid(),
        "out": torch.empty(tokens, value_heads, dim, device="cuda", dtype=torch.bfloat16),
        "normalize": True,
    }
    return Inputs(OPS.gated_delta.default, args)


def ssd(tokens: int, heads: int, head_dim: int, state: int, groups: int = 1) -> Inputs:
    x = draw(tokens, heads, head_dim)
    args = {
        "x": x,
        "dt": draw(tokens, heads),
        "A": -draw(heads, dtype=torch.float32).exp(),
        "B": draw(tokens, groups, state),
        "C": draw(tokens, groups, state),
        "D": draw(heads, dtype=torch.float32),
        "dt_bias": draw(heads),
        "out": torch.empty_like(x),
        "softplus": True,
        "dt_min": 0.0,
        "dt_max": float("inf"),
    }
    return Inputs(OPS.ssd.default, args)


def scan(tokens: int, channels: int, state: int) -> Inputs:
    x = draw(tokens, channels)
    args = {
        "x": x,
        "dt": draw(tokens, channels),
        "A": -draw(channels, state, dtype=torch.float32).exp(),
        "B": draw(tokens, state),
        "C": draw(tokens, state),
        "D": draw(channels, dtype=torch.float32),
        "z": draw(tokens, channels),
        "dt_bias": draw(channels),
        "out": torch.empty_like(x),
    }
    return Inputs(OPS.selective_scan.default, args)


def lru(tokens: int, channels: int) -> Inputs:
    x = draw(tokens, channels)
    return Inputs(OPS.rg_lru.default, {"a": draw(tokens, channels).sigmoid(), "x": x, "out": torch.empty_like(x)})


MODELS: dict[str, Callable[[int], Inputs]] = {
    "qwen3-next-conv": lambda tokens: conv(tokens, 8192, 4),
    "lfm2-conv": lambda tokens: conv(tokens, 2048, 3),
    "qwen3-next": lambda tokens: delta(tokens, 16, 32, 128),
    "kimi-linear": lambda tokens: delta(tokens, 32, 32, 128, True),
    "falcon-h1": lambda tokens: ssd(tokens, 24, 128, 256),
    "nemotron-h": lambda tokens: ssd(tokens, 128, 64, 128, 8),
    "mamba": lambda tokens: scan(tokens, 8192, 16),
    "recurrent-gemma": lambda tokens: lru(tokens, 2560),
}


def metadata(rows: int, length: int) -> AttentionMetadata:
    """`rows` rows of `length` tokens; those of one token continue a sequence, others start one."""
    past = 100 if length == 1 else 0
    start = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * length
    lens = torch.full((rows,), length + past, dtype=torch.int32, device="cuda")
    empty = torch.empty(0, dtype=torch.int64, device="cuda")
    slots = torch.randperm(rows, device="cuda").int()
    return AttentionMetadata(slots, start, lens, empty, empty, rows, rows * length, length == 1, length + past)


def copy_gb_per_s() -> float:
    """Bandwidth of a copy of 1 GiB, reads and writes added."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * source.numel() / graph_us(copy) / 1e3


def num_bytes(tensors: Sequence[Any]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor))


def fla_function(model: str, inputs: Inputs, rows: int, length: int) -> Callable[[], Any] | None:
    """fla-core's function for the same inputs; None where it has none or is not installed."""
    if model not in ("qwen3-next", "kimi-linear"):
        return None
    try:
        from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
            chunk_gated_delta_rule,
            fused_recurrent_gated_delta_rule,
        )
        from fla.ops.kda import chunk_kda, fused_recurrent_kda  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    functions = {
        "qwen3-next": (fused_recurrent_gated_delta_rule, chunk_gated_delta_rule),
        "kimi-linear": (fused_recurrent_kda, chunk_kda),
    }
    function = functions[model][length > 1]
    batched = {name: inputs.args[name].unflatten(0, (rows, length)) for name in ("q", "k", "v", "g", "beta")}
    before = torch.zeros(rows, *state_shape(inputs.op, (), {"state": 0, **inputs.args})[0], device="cuda")
    return lambda: function(
        **batched, initial_state=before, output_final_state=True, use_qk_l2norm_in_kernel=True
    )  # fmt: skip


def measure(model: str, rows: int, length: int, gb_per_s: float) -> dict[str, Any]:
    """One result: microseconds of a call, the memory floor, and fla-core's time."""
    inputs = MODELS[model](rows * length)
    meta = metadata(rows, length)
    shape, dtype = state_shape(inputs.op, (), {"state": 0, **inputs.args})
    state_bytes = rows * num_bytes([torch.empty(shape, dtype=dtype, device="cuda")])
    layers = max(2, min(MAX_LAYERS, COLD_BYTES // state_bytes))
    states = [torch.randn(rows, *shape, device="cuda").to(dtype) for _ in range(layers)]

    def run() -> None:
        for layer in range(layers):
            run_recurrent_op(meta, states, inputs.op, (), {"state": layer, **inputs.args})

    us = graph_us(run) / layers
    moved = num_bytes(list(inputs.args.values())) + (2 if length == 1 else 1) * state_bytes
    floor = moved / gb_per_s / 1e3
    result = {"model": model, "rows": rows, "length": length, "us": us, "floor_us": floor, "floor_share": floor / us}
    function = fla_function(model, inputs, rows, length)
    if function is not None:
        try:
            result["fla_us"] = graph_us(function)
        except Exception as error:  # a function that reads the device cannot be recorded
            torch.cuda.synchronize()
            result["fla_error"] = f"{type(error).__name__}: {error}"[:200]
    return result


def results(models: Sequence[str], only: str | None) -> Iterator[dict[str, Any]]:
    gb_per_s = copy_gb_per_s()
    print(f"copy bandwidth {gb_per_s:.0f} GB/s", file=sys.stderr)
    for model in models:
        for rows in DECODE if only != "prefill" else ():
            yield measure(model, rows, 1, gb_per_s)
        for rows, length in PREFILL if only != "decode" else ():
            yield measure(model, rows, length, gb_per_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=["decode", "prefill"])
    parser.add_argument("--models", default=",".join(MODELS))
    arguments = parser.parse_args()
    found = []
    for result in results(arguments.models.split(","), arguments.only):
        found.append(result)
        print(json.dumps(result), flush=True)
    if arguments.out:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": found}
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
