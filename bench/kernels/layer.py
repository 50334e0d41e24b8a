"""A whole decoder layer at few tokens, in a CUDA graph over many layers' weights: current kernels against fused, dependent ones.

    python bench/kernels/linear.py --json /tmp/linear.json
    python bench/kernels/layer.py --linears /tmp/linear.json --json /tmp/layer.json

Variants: Inductor's code for norm, gate and residual between plain products; the same with dependent launches; products with
fused epilogues. Each product uses the best configuration of bench/kernels/linear.py for its variant. Attention runs over a paged
cache of 192 keys per row. A number is one layer: the graph's time over its layers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.kernels.linear import SUBJECTS, kind
from torchweave.compiler.tuning.measure import GraphClock
from torchweave.ops.attention.backends.triton import DecodeConfig, TritonBackend
from torchweave.ops.attention.op import AttentionCall, AttentionMetadata, LayerKVCache, LayerSpec, run_attention
from torchweave.ops.linear import LinearFusion, run, run_unfused
from torchweave.ops.linear_config import LinearConfig, choose

SPECS = {"1b": LayerSpec(8, 64, 64, 32), "8b": LayerSpec(8, 128, 128, 32)}
LAYERS = {"1b": 16, "8b": 8}
LENGTH, BLOCK = 192, 64
EPS = 1e-5


@dataclass(frozen=True)
class Layer:
    """Weights and KV cache of a layer."""

    weights: dict[str, Tensor]
    norms: tuple[Tensor, Tensor]
    cache: LayerKVCache


@dataclass(frozen=True)
class Variant:
    """A variant of running a layer.

    Attributes:
        fused: products take the norm, the gate and the residual in.
        kinds: which configurations a product may take, by `bench.kernels.linear.kind`; empty: what the op chooses by its rule.
        attention: dependent launch of attention, as in DecodeConfig.
        inductor_dependent: of the kernels of Inductor.
    """

    name: str
    fused: bool
    kinds: tuple[str, ...]
    attention: int
    inductor_dependent: bool = False


def _kinds(suffixes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(kernel + s + n for kernel in ("row", "dot", "split") for s in suffixes for n in ("", "/norm"))


ALONE, EARLY, LATE = _kinds(("",)), _kinds(("+early",)), _kinds(("+late",))
VARIANTS = (
    Variant("plain", False, (), 0),
    Variant("plain, late", False, LATE, 2, True),
    Variant("fused", True, ALONE, 0),
    Variant("fused, early", True, EARLY, 1),
    Variant("fused, late", True, LATE, 2),
    Variant("fused, late but attention", True, LATE, 1),
    Variant("fused, best", True, (*ALONE, *EARLY, *LATE), 2),
)


class Pieces:
    """Inductor's code for the operations between products."""

    def __init__(self, dependent: bool) -> None:
        options: dict[str, Any] = {"triton.enable_pdl": dependent}

        def built(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=True, fullgraph=True, options=options)

        self.add_norm = built(_add_norm)
        self.gate = built(_gate)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + x
    wide = h.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(h.dtype), h


def _gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class Chain:
    """Runs layers of a model for a token count."""

    def __init__(
        self, model: str, tokens: int, layers: list[Layer], best: Callable[[str, Variant], LinearConfig | None]
    ) -> None:
        spec = SPECS[model]
        self.spec, self.tokens, self.layers, self.best, self.model = spec, tokens, layers, best, model
        width = SUBJECTS[model]["qkv"].width
        self.hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        angles = torch.rand(tokens, spec.head_dim, device="cuda")
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        per_row = -(-LENGTH // BLOCK)
        table = torch.arange(tokens * per_row, device="cuda", dtype=torch.int32).view(tokens, per_row)
        self.meta = AttentionMetadata(
            slots=torch.arange(tokens, dtype=torch.int32, device="cuda"),
            query_start=torch.arange(tokens + 1, dtype=torch.int32, device="cuda"),
            seq_lens=torch.full((tokens,), LENGTH, dtype=torch.int32, device="cuda"),
            block_table=table,
            slot_mapping=table[:, -1].long() * BLOCK + (LENGTH - 1) % BLOCK,
            num_rows=tokens, num_tokens=tokens, decode_only=True, max_seq_len=2048,
        )  # fmt: skip

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Layer, backend: TritonBackend) -> Tensor:
        out = torch.empty(self.tokens, self.spec.num_heads * self.spec.head_dim, device="cuda", dtype=q.dtype)
        step, scale = backend.begin(self.meta), self.spec.head_dim**-0.5
        run_attention(step, AttentionCall(q, k, v, out, 0, scale, cos=self.cos, sin=self.sin), layer.cache)
        return out

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dim, heads, kv = self.spec.head_dim, self.spec.num_heads, self.spec.num_kv_heads
        q, k, v = qkv.split([heads * dim, kv * dim, kv * dim], -1)
        return q.unflatten(-1, (heads, dim)), k.unflatten(-1, (kv, dim)), v.unflatten(-1, (kv, dim))

    def product(self, name: str, variant: Variant, x: Tensor, w: Tensor, around: LinearFusion) -> Tensor:
        config = self.best(name, variant) if variant.kinds else choose(x.shape[0], w.shape[0], w.shape[1], x.dtype)
        if config is None:
            return run_unfused(x, w, around)
        outputs = w.shape[0] // 2 if around.activation else w.shape[0]
        out = torch.empty(x.shape[0], outputs, device="cuda", dtype=x.dtype)
        run(config, x, w, out, around)
        return out

    def run(self, variant: Variant, pieces: Pieces, backend: TritonBackend) -> Tensor:
        """Run all layers and return the last residual."""
        return self.run_fused(variant, backend) if variant.fused else self.run_plain(variant, pieces, backend)

    def run_plain(self, variant: Variant, pieces: Pieces, backend: TritonBackend) -> Tensor:
        x, residual = torch.zeros_like(self.hidden), self.hidden
        for layer in self.layers:
            w = layer.weights
            y, residual = pieces.add_norm(x, residual, layer.norms[0])
            q, k, v = self.heads(self.product("qkv", variant, y, w["qkv"], LinearFusion()))
            x = self.product("o", variant, self.attend(q, k, v, layer, backend), w["o"], LinearFusion())
            y, residual = pieces.add_norm(x, residual, layer.norms[1])
            y = pieces.gate(self.product("gate_up", variant, y, w["gate_up"], LinearFusion()))
            x = self.product("down", variant, y, w["down"], LinearFusion())
        return residual + x

    def run_fused(self, variant: Variant, backend: TritonBackend) -> Tensor:
        h = self.hidden
        for layer in self.layers:
            w = layer.weights
            q, k, v = self.heads(self.product("qkv", variant, h, w["qkv"], LinearFusion(norm=layer.norms[0], eps=EPS)))
            h = self.product("o", variant, self.attend(q, k, v, layer, backend), w["o"], LinearFusion(residual=h))
            gate_up = LinearFusion(norm=layer.norms[1], eps=EPS, activation="silu")
            y = self.product("gate_up", variant, h, w["gate_up"], gate_up)
            h = self.product("down", variant, y, w["down"], LinearFusion(residual=h))
        return h


def build_layers(model: str, rows: int) -> list[Layer]:
    spec, device, dtype = SPECS[model], torch.device("cuda"), torch.bfloat16
    backend = TritonBackend(device)
    width = SUBJECTS[model]["qkv"].width

    def layer() -> Layer:
        weights = {
            name: torch.empty(shape.outputs, shape.width, device=device, dtype=dtype).normal_(std=shape.width**-0.5)
            for name, shape in SUBJECTS[model].items()
            if name != "head"
        }
        norms = (torch.rand(width, device=device, dtype=dtype), torch.rand(width, device=device, dtype=dtype))
        cache = backend.allocate(spec, rows * -(-LENGTH // BLOCK), BLOCK, dtype, device)
        cache.k.normal_()
        cache.v.normal_()
        return Layer(weights, norms, cache)

    return [layer() for _ in range(LAYERS[model])]


def chooser(results: list[dict[str, Any]], model: str, tokens: int) -> Callable[[str, Variant], LinearConfig | None]:
    """The fastest configuration of a product among the kinds of a variant; None for cuBLAS."""

    def best(name: str, variant: Variant) -> LinearConfig | None:
        rows = [r for r in results if r["name"] == f"{model} {name}" and r["tokens"] == tokens]
        rows = [r for r in rows if r["config"] is None or kind(r["config"]) in variant.kinds]
        found = min(rows, key=lambda r: r["us"], default=None)
        return None if found is None or found["config"] is None else LinearConfig(**found["config"])

    return best


def compare(model: str, tokens: int, layers: list[Layer], linears: list[dict[str, Any]]) -> list[dict[str, Any]]:
    chain = Chain(model, tokens, layers, chooser(linears, model, tokens))
    backends = {on: TritonBackend(torch.device("cuda"), decode=DecodeConfig(dependent=on)) for on in (0, 1, 2)}
    for backend in backends.values():
        backend.workspace(
            SPECS[model].num_heads // SPECS[model].num_kv_heads,
            chain.spec.head_dim,
            chain.spec.value_dim,
            torch.bfloat16,
        )
    pieces = {on: Pieces(on) for on in (False, True)}
    expected, calls = None, {}
    for variant in VARIANTS:
        torch._dynamo.reset()

        def call(_: int, variant: Variant = variant) -> Tensor:
            return chain.run(variant, pieces[variant.inductor_dependent], backends[variant.attention])

        try:
            got = call(0).float()
            expected = got if expected is None else expected
            error = (got - expected).norm() / expected.norm()
            print(f"{model} {tokens} {variant.name}: differs by {error:.1e}", flush=True)
            assert error < 3e-2, "the variants do not agree"
            calls[variant.name] = call
        except Exception as error:
            print(f"{model} {tokens} {variant.name}: {str(error)[:400]}", flush=True)
    timings = GraphClock(rounds=20, failed=lambda name, error: print(name, str(error)[:300], flush=True)).time(calls, 1)
    base = next(iter(timings.values())).microseconds
    rows = []
    for name, timing in timings.items():
        us = timing.microseconds / len(layers)
        rows.append(
            {
                "model": model,
                "tokens": tokens,
                "variant": name,
                "us_a_layer": round(us, 2),
                "noise": round(timing.noise / len(layers), 3),
            }
        )
        print(f"{model} T={tokens:<3} {name:38} {us:8.2f} us per layer  {timing.microseconds / base:.3f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--linears", type=Path, required=True, help="JSON file of bench/kernels/linear.py")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", choices=list(SPECS), default=list(SPECS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    arguments = parser.parse_args()
    linears = json.loads(arguments.linears.read_text())["results"]
    results = []
    with torch.no_grad():
        for model in arguments.models:
            layers = build_layers(model, max(arguments.tokens))
            for tokens in arguments.tokens:
                results += compare(model, tokens, layers, linears)
            del layers
            torch.cuda.empty_cache()
    if arguments.json:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        facts = {
            "command": " ".join(sys.argv),
            "commit": commit,
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "results": results,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
