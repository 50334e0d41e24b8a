"""Gain of each fusion, and whether Inductor makes it redundant: four builds of the same operations, in CUDA graphs.

    python bench/compiler/fusions.py --json bench/results/fusions_h100_202611.json [--models 1b 8b] [--tokens 1 8 32 256 2048]

Builds: `fx` separate operations; `fx fused` Torchweave's kernel; `inductor` Inductor's code; `inductor kept` Inductor's code
with the op kept. A graph holds a call on each of many copies of the operands, so that caches stay cold; the graphs of all
builds are replayed in turn. For attention with fused rotary embedding, `inductor` is Inductor's rotary embedding followed by
attention and `inductor kept` attention alone. The JSON holds microseconds per call and their noise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave.compiler import compile_graph
from torchweave.compiler.passes.manager import default_passes
from torchweave.compiler.runtime.forward import call_op
from torchweave.compiler.tuning.measure import Call, GraphClock
from torchweave.config.options import TorchCompileConfig
from torchweave.ops.attention.backends.triton import TritonBackend
from torchweave.ops.attention.op import AttentionCall, AttentionMetadata, LayerSpec

EPS = 1e-5
COPIES_BYTES = 256 << 20
MOST_COPIES = 200
KEYS, BLOCK = 192, 64


@dataclass(frozen=True)
class Model:
    """Widths of a decoder layer."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int


MODELS = {"1b": Model(2048, 8192, 32, 8, 64), "8b": Model(4096, 14336, 32, 8, 128)}


class Norm(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(model.hidden))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32)
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


class AddNorm(Norm):
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h = residual + x
        return super().forward(h), h


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class Rope(nn.Module):
    """Queries and keys of a merged product `[T, (H + 2 * KH) * D]`."""

    def __init__(self, model: Model, normed: bool = False) -> None:
        super().__init__()
        self.model, self.normed = model, normed
        self.norms = nn.ParameterList([torch.rand(model.dim), torch.rand(model.dim)])

    def forward(self, product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        model, (cos, sin) = self.model, (angle[None].unsqueeze(1) for angle in (cos, sin))
        sizes = [count * model.dim for count in (model.heads, model.kv_heads, model.kv_heads)]
        turned = []
        for part, weight in zip(product[None].split(sizes, -1)[:2], self.norms, strict=True):
            x = part.view(1, part.shape[1], -1, model.dim)
            if self.normed:
                y = x.to(torch.float32)
                x = weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
            x = x.transpose(1, 2)
            half = model.dim // 2
            x = x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
            turned.append(x.squeeze(0).transpose(0, 1))
        return turned[0], turned[1]


def operations(model: Model) -> dict[str, tuple[nn.Module, Callable[[int], dict[str, Tensor]]]]:
    """Each fusion's module, and its operands for a token count."""

    def draw(tokens: int, width: int) -> Tensor:
        return torch.randn(tokens, width, device="cuda").to(torch.bfloat16)

    def product(tokens: int) -> dict[str, Tensor]:
        width = (model.heads + 2 * model.kv_heads) * model.dim
        return {"product": draw(tokens, width), "cos": draw(tokens, model.dim), "sin": draw(tokens, model.dim)}

    return {
        "raise_rms_norm": (Norm(model), lambda tokens: {"x": draw(tokens, model.hidden)}),
        "add_rms_norm": (
            AddNorm(model),
            lambda tokens: {"x": draw(tokens, model.hidden), "residual": draw(tokens, model.hidden)},
        ),
        "gated_activation": (Gate(), lambda tokens: {"x": draw(tokens, 2 * model.intermediate)}),
        "rope": (Rope(model), product),
        "qk_norm_rope": (Rope(model, normed=True), product),
    }


def builds(module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """The module in every build."""
    module = module.cuda().to(torch.bfloat16).requires_grad_(False)
    dynamic = {name: {0: "T"} for name in inputs}
    aten = [each for each in default_passes() if each.stage == "aten"]
    kept = [each for each in aten if each.name != "expand"]

    def build(inductor: bool, passes: list[Any]) -> Any:
        config = TorchCompileConfig(enable_inductor=inductor, compile_cache=False)
        return compile_graph(module, inputs, dynamic, config=config, passes=passes)

    return {
        "fx": build(False, []),
        "fx fused": build(False, kept),
        "inductor": build(True, []),
        "inductor kept": build(True, kept),
    }


def measure(name: str, module: nn.Module, operands: Any, tokens: list[int], clock: GraphClock) -> list[dict[str, Any]]:
    """One row per build and token count."""
    built = builds(module, operands(64))
    rows = []
    for count in tokens:
        size = sum(tensor.nbytes for tensor in operands(count).values())
        copies = [tuple(operands(count).values()) for _ in range(min(MOST_COPIES, max(4, COPIES_BYTES // size)))]

        def call(compiled_graph: Any, copies: list[Any] = copies) -> Call:
            return lambda i: compiled_graph(call_op, *copies[i])

        times = clock.time({build: call(compiled_graph) for build, compiled_graph in built.items()}, len(copies))
        rows += [{"fusion": name, "tokens": count, "build": build} | asdict(timing) for build, timing in times.items()]
    return rows


def measure_attention(model: Model, tokens: list[int], clock: GraphClock, normed: bool) -> list[dict[str, Any]]:
    """Decode steps of `tokens` sequences with separate caches: Inductor's RoPE and attention, or attention alone."""
    module = Rope(model, normed)
    backend = TritonBackend(torch.device("cuda"))
    spec = LayerSpec(model.kv_heads, model.dim, model.dim, model.heads)
    name = "rotary_attention, norms" if normed else "rotary_attention"
    operands = operations(model)["rope"][1]
    piece = builds(module, operands(64))["inductor"]
    weights = tuple(module.norms) if normed else ()
    rows = []
    for count in (each for each in tokens if each <= 256):
        step, caches, given = _decode_step(backend, spec, count), [], []
        copies = max(4, min(32, COPIES_BYTES // (count * KEYS * spec.bytes_per_token(torch.bfloat16))))
        for _ in range(copies):
            caches.append(backend.allocate(spec, count * KEYS // BLOCK, BLOCK, torch.bfloat16, torch.device("cuda")))
            given.append(operands(count))
        out = torch.empty(count, model.heads, model.dim, device="cuda", dtype=torch.bfloat16)

        def heads(i: int, given: list[Any] = given) -> list[Tensor]:
            sizes = [each * model.dim for each in (model.heads, model.kv_heads, model.kv_heads)]
            return [part.unflatten(-1, (-1, model.dim)) for part in given[i]["product"].split(sizes, -1)]

        def apart(
            i: int, given: list[Any] = given, caches: list[Any] = caches, out: Tensor = out, step: Any = step
        ) -> None:
            q, k = piece(call_op, *given[i].values())
            step.forward(AttentionCall(q, k, heads(i)[2], out, i, 0.125), caches[i])

        def inside(
            i: int, given: list[Any] = given, caches: list[Any] = caches, out: Tensor = out, step: Any = step
        ) -> None:
            norm = dict(zip(("q_weight", "k_weight"), weights, strict=False), norm_eps=EPS)
            call = AttentionCall(*heads(i), out, i, 0.125, cos=given[i]["cos"], sin=given[i]["sin"], **norm)
            step.forward(call, caches[i])

        times = clock.time({"inductor": apart, "inductor kept": inside}, copies)
        rows += [{"fusion": name, "tokens": count, "build": build} | asdict(timing) for build, timing in times.items()]
    return rows


def _decode_step(backend: TritonBackend, spec: LayerSpec, rows: int) -> Any:
    """Every row has KEYS keys in its own blocks, the last of them new."""
    blocks = KEYS // BLOCK
    table = torch.arange(rows * blocks, device="cuda", dtype=torch.int32).view(rows, blocks)
    meta = AttentionMetadata(
        slots=torch.arange(rows, device="cuda", dtype=torch.int32),
        query_start=torch.arange(rows + 1, device="cuda", dtype=torch.int32),
        seq_lens=torch.full((rows,), KEYS, device="cuda", dtype=torch.int32),
        block_table=table,
        slot_mapping=table[:, -1].long() * BLOCK + BLOCK - 1,
        num_rows=rows,
        num_tokens=rows,
        decode_only=True,
        max_seq_len=KEYS,
    )
    backend.workspace(spec.num_heads // spec.num_kv_heads, spec.head_dim, spec.value_dim, torch.bfloat16)
    return backend.begin(meta)


def table(rows: list[dict[str, Any]]) -> str:
    """Microseconds of every build, a row per fusion, model and token count."""
    names = ("fx", "fx fused", "inductor", "inductor kept")
    lines = [f"{'fusion':26} {'model':6} {'T':>5}" + "".join(f"{name:>16}" for name in names)]
    for model, fusion, tokens in dict.fromkeys((row["model"], row["fusion"], row["tokens"]) for row in rows):
        found = {
            row["build"]: f"{row['microseconds']:.2f}"
            for row in rows
            if (row["model"], row["fusion"], row["tokens"]) == (model, fusion, tokens)
        }
        lines.append(f"{fusion:26} {model:6} {tokens:>5}" + "".join(f"{found.get(name, '-'):>16}" for name in names))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every measurement to this JSON file")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 256, 2048])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    clock = GraphClock(failed=lambda name, error: print(f"{name} cannot run: {error}"))
    rows: list[dict[str, Any]] = []
    for name in arguments.models:
        model = MODELS[name]
        found = []
        for fusion, (module, operands) in operations(model).items():
            found += measure(fusion, module, operands, arguments.tokens, clock)
        for normed in (False, True):
            found += measure_attention(model, arguments.tokens, clock, normed)
        rows += [{"model": name} | row for row in found]
    print(table(rows))
    if arguments.json:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        facts = {
            "command": " ".join(sys.argv), "commit": commit, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
            "results": rows,
        }  # fmt: skip
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
