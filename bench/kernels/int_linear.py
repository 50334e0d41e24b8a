"""Products with weights in 4 or 8 bits on a GPU: Torchweave's kernels against cuBLAS in 16 bits; run by bench/kernels/linear.py.

    python bench/kernels/linear.py --weights int4 [--group 128] [--models 1b 8b] [--tokens 1 2 4 8 16 32 64 128 256 512]
    python bench/kernels/linear.py --weights int4 --layers --models 1b 8b   # a decoder layer, and its products alone

A candidate is a CUDA graph over 256 MB of distinct weights, so that caches stay cold; candidates of a row are replayed in turn. The
first is cuBLAS on 16-bit weights; "blas" dequantizes the weight and multiplies by cuBLAS; the chosen configuration is marked.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.compiler.tuning.measure import Call, GraphClock
from torchweave.ops.activation import gated_activation
from torchweave.ops.kernels.quant.dequantize import launch_dequantize
from torchweave.ops.norm import add_rms_norm
from torchweave.ops.quant.int_linear import IntConfig, choose, dequantize_int, num_groups

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512]
COLD_BYTES = 256 << 20
_ROWS = ((2, 4, 512), (4, 4, 512), (8, 4, 512), (4, 2, 256), (8, 2, 256), (16, 4, 256), (4, 4, 1024), (2, 8, 1024))
_SPLITS = ((16, 4, 4), (16, 8, 3), (32, 4, 4), (64, 4, 3), (64, 2, 4))
_TILES = {
    32: ((64, 4, 4), (128, 4, 4), (128, 8, 4)),
    64: ((64, 4, 3), (128, 4, 3), (128, 8, 3), (128, 8, 4)),
    128: ((64, 4, 3), (128, 4, 3), (128, 8, 4), (256, 8, 4)),
    256: ((128, 8, 3),),
}
"""Rows, warps and stages of tiles, by tokens of a program."""
_PROGRAMS = (1, 2, 4, 8)
"""Programs that divide K, of candidates with at least 64 rows."""
_FEWEST, _MOST = 64, 320
"""Launches of fewer programs than the first, where K could be divided once more, or of more than the second are not measured."""


class Weight(NamedTuple):
    """A weight as `torchweave::int_linear` takes it, without an order of inputs."""

    w: Tensor
    scale: Tensor
    zero: Tensor | None


def _divided(config: IntConfig, tokens: int, outputs: int, width: int) -> list[IntConfig]:
    """A configuration with as many programs for K as may fill a GPU."""
    tiles = -(-outputs // config.block_n) * -(-tokens // config.block_t)
    each = [count for count in _PROGRAMS if count == 1 or (tiles * count <= _MOST and count * 1024 <= width)]
    useful = [count for at, count in enumerate(each) if tiles * count >= _FEWEST or at + 1 == len(each)]
    return [replace(config, programs=count) for count in useful]


def candidates(tokens: int, outputs: int, width: int, bits: int) -> list[IntConfig]:
    """Candidate configurations of a product."""
    found = [IntConfig("row", *shape) for shape in _ROWS] if bits == 4 and tokens <= 4 else []
    if bits == 4 and tokens > 16:
        for size, shapes in _TILES.items():
            fits = size < 2 * tokens and (tokens <= size or size >= 128 or (size == 64 and tokens <= 192))
            for shape in shapes if fits else ():
                found += _divided(IntConfig("tile", *shape, block_t=size), tokens, outputs, width)
    if tokens <= (16 if bits == 4 else 64):
        size = next(size for size in (8, 16, 32, 64) if tokens <= size)
        for shape in _SPLITS:
            config = IntConfig("split", *shape, block_t=size)
            found += _divided(config, tokens, outputs, width) if shape[0] >= 64 else [config]
    return found


def random_weight(outputs: int, width: int, bits: int, group: int, zero: bool, dtype: torch.dtype) -> Weight:
    shape = (outputs, num_groups(width, group))
    if bits == 4:
        w = torch.randint(-(2**31), 2**31 - 1, (outputs, -(-width // 128) * 16), device="cuda", dtype=torch.int32)
    else:
        w = torch.randint(-128, 128, (outputs, width), device="cuda", dtype=torch.int8)
    points = torch.randint(0, 2**bits, shape, device="cuda", dtype=torch.uint8) if zero else None
    scale = (torch.rand(shape, device="cuda") + 0.5) / (width**0.5 * 2 ** (bits - 1))
    return Weight(w, scale.to(dtype), points)


def build_all(
    shapes: set[tuple[int, int]], tokens: list[int], bits: int, group: int, zero: bool, dtype: torch.dtype
) -> None:
    """Compile every kernel on all cores before timing, by launches on small weights with the real widths."""

    def build(job: tuple[int, int, IntConfig]) -> None:
        width, count, config = job
        x, out = (
            torch.zeros(count, width, device="cuda", dtype=dtype),
            torch.empty(count, 128, device="cuda", dtype=dtype),
        )
        with contextlib.suppress(Exception):  # failures are reported by the timing
            config.run(x, *random_weight(128, width, bits, group, zero, dtype), None, group, out)

    jobs = {
        (width, 1 if config.kernel == "row" else config.block_t, replace(config, programs=min(config.programs, 2)))
        for outputs, width in shapes
        for count in tokens
        for config in candidates(count, outputs, width, bits)
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, sorted(jobs, key=repr)))
    torch.cuda.synchronize()


def dequantized(weight: Weight, group: int, out: Tensor) -> Tensor:
    """The values of a weight, in out."""
    launch_dequantize(*weight, group, out)
    return out


def compare(
    name: str, outputs: int, width: int, tokens: int, weights: list[Weight], bits: int, group: int, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """All candidates of a product for a token count; the first is cuBLAS on 16-bit weights."""
    x, out = (
        torch.randn(tokens, width, device="cuda", dtype=dtype),
        torch.empty(tokens, outputs, device="cuda", dtype=dtype),
    )
    whole = dequantize_int(*weights[0], width, group, torch.float32)
    expected = x.float() @ whole.t()
    dense = [whole.to(dtype).clone() for _ in range(max(3, COLD_BYTES // (outputs * width * 2) + 1))]
    del whole
    buffer = torch.empty_like(dense[0])
    calls: dict[str, Call] = {
        "cublas": lambda i: F.linear(x, dense[i % len(dense)]),
        "blas": lambda i: F.linear(x, dequantized(weights[i % len(weights)], group, buffer)),
        "op": lambda i: torch.ops.torchweave.int_linear(x, *weights[i % len(weights)], None, None, group),
        "dequantize": lambda i: launch_dequantize(*weights[i % len(weights)], group, buffer),
    }
    configs: dict[str, IntConfig] = {}
    for config in candidates(tokens, outputs, width, bits):
        key = f"{config.kernel} {config.block_n}x{config.block_t},{config.num_warps},{config.depth},{config.programs}"
        try:
            out.fill_(torch.nan)
            config.run(x, *weights[0], None, group, out)
            torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
        except Exception as error:
            print(f"{name} {tokens}: {key}: {' '.join(str(error).split())[:200]}", flush=True)
            continue
        configs[key] = config
        calls[key] = lambda i, config=config: config.run(x, *weights[i % len(weights)], None, group, out)
    clock = GraphClock(failed=lambda which, error: print(name, which, str(error)[:200], flush=True))
    chosen, size = choose(tokens, outputs, width, bits), sum(each.nbytes for each in weights[0] if each is not None)
    moved = {"cublas": buffer.nbytes, "dequantize": size + buffer.nbytes}
    return [
        {
            "name": name, "outputs": outputs, "width": width, "tokens": tokens, "which": which,
            "config": asdict(configs[which]) if which in configs else None, "chosen": configs.get(which) == chosen,
            "us": round(timing.microseconds, 3), "noise": round(timing.noise, 3),
            "gb_per_s": round(moved.get(which, size) / timing.microseconds / 1e3, 1),
        }
        for which, timing in clock.time(calls, max(4, len(weights))).items()
    ]  # fmt: skip


def measure(
    shapes: dict[str, tuple[int, int]], tokens: list[int], bits: int, group: int, zero: bool, dtype: torch.dtype, seconds: float
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure all products until the time is up."""
    started = time.monotonic()
    build_all(set(shapes.values()), tokens, bits, group, zero, dtype)
    print(f"kernels built in {time.monotonic() - started:.1f} s", flush=True)
    results: list[dict[str, Any]] = []
    for name, (outputs, width) in shapes.items():
        count = max(4, COLD_BYTES * 8 // (outputs * width * bits) + 1)
        weights = [random_weight(outputs, width, bits, group, zero, dtype) for _ in range(count)]
        for number in tokens:
            if time.monotonic() > started + seconds:
                print(f"out of time at {name}, {number} tokens", flush=True)
                break
            results += compare(name, outputs, width, number, weights, bits, group, dtype)
    return results


class Layer(NamedTuple):
    """Products of a decoder layer from the attention's output to the next layer's queries, keys and values."""

    o: Weight
    gate_up: Weight
    down: Weight
    qkv: Weight


def compare_layer(
    model: str, layers: list[Layer], width: int, tokens: int, group: int, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """A layer with its norms and gate, and its products alone: what fusing them could save at most."""
    inner = layers[0].gate_up.scale.shape[0] // 2
    x, h = (torch.randn(tokens, width, device="cuda", dtype=dtype) for _ in range(2))
    wide, norm = torch.randn(tokens, inner, device="cuda", dtype=dtype), torch.rand(width, device="cuda", dtype=dtype)

    def product(x: Tensor, weight: Weight) -> Tensor:
        return torch.ops.torchweave.int_linear(x, *weight, None, None, group)

    def whole(i: int) -> Tensor:
        layer = layers[i % len(layers)]
        y, total = add_rms_norm(product(x, layer.o), h, norm, 1e-5)
        y = product(gated_activation(product(y, layer.gate_up), "silu"), layer.down)
        return product(add_rms_norm(y, total, norm, 1e-5)[0], layer.qkv)

    def products(i: int) -> Tensor:
        layer = layers[i % len(layers)]
        product(product(x, layer.o), layer.gate_up)
        return product(product(wide, layer.down), layer.qkv)

    calls: dict[str, Call] = {"whole": whole, "products": products}
    return [
        {
            "name": f"{model} layer", "width": width, "tokens": tokens, "which": which,
            "us": round(timing.microseconds, 3), "noise": round(timing.noise, 3),
        }
        for which, timing in GraphClock().time(calls, 4 * len(layers)).items()
    ]  # fmt: skip


def measure_layers(
    shapes: dict[str, tuple[int, int]], tokens: list[int], bits: int, group: int, zero: bool, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """A layer of each model; names of shapes are a model and a field of `Layer`."""
    results: list[dict[str, Any]] = []
    for model in dict.fromkeys(name.split()[0] for name in shapes):
        parts = {field: shapes[f"{model} {field}"] for field in Layer._fields}
        count = max(3, COLD_BYTES * 8 // (bits * sum(outputs * width for outputs, width in parts.values())) + 1)
        layers = [
            Layer(*(random_weight(*parts[field], bits, group, zero, dtype) for field in Layer._fields))
            for _ in range(count)
        ]
        for number in tokens:
            results += compare_layer(model, layers, parts["qkv"][1], number, group, dtype)
    return results


def layer_table(results: list[dict[str, Any]]) -> str:
    """A row per model and token count."""
    lines = ["layer, T: us of its products with norms and gate; of the products alone"]
    for name, tokens in dict.fromkeys((r["name"], r["tokens"]) for r in results):
        us = {r["which"]: r["us"] for r in results if (r["name"], r["tokens"]) == (name, tokens)}
        lines.append(f"{name:12} {tokens:>3} {us['whole']:>8.2f} {us['products']:>8.2f}")
    return "\n".join(lines)


def table(results: list[dict[str, Any]]) -> str:
    """A row per product and token count: cuBLAS, the op, the chosen configuration and the three fastest."""
    lines = [
        "product, T: us of cuBLAS in 16 bits; the op (gain, GB/s of weight); dequantization (GB/s, reads and writes); fastest "
        "configurations, the chosen one marked *"
    ]
    for name, tokens in dict.fromkeys((r["name"], r["tokens"]) for r in results):
        rows = {r["which"]: r for r in results if (r["name"], r["tokens"]) == (name, tokens)}
        base, op = rows.get("cublas"), rows.get("op")
        if base is None or op is None:
            continue
        others = (r for which, r in rows.items() if which not in ("cublas", "op", "dequantize"))
        ranked = sorted(others, key=lambda r: r["us"])
        shown = [r for at, r in enumerate(ranked) if at < 3 or r["chosen"]]
        best = "  ".join(f"{r['which']} {r['us']:.2f}{'*' * r['chosen']}" for r in shown)
        gain = f"{base['us'] / op['us']:.2f}, {op['gb_per_s']:.0f}"
        dense = f"{rows['dequantize']['us']:>6.1f} ({rows['dequantize']['gb_per_s']:.0f})"
        lines.append(f"{name:12} {tokens:>3} {base['us']:>8.2f}  {op['us']:>8.2f} ({gain})  {dense}  {best}")
    return "\n".join(lines)
