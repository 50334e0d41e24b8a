"""Cost of lowering a piece, and the speed of each lowered form as FX code: host time of a call on a CPU.

    python bench/compiler/lowering.py --json bench/results/lowering_cpu_202611.json [--model llama]

The piece between two attention ops of a tiny model for 7 tokens, where host time dominates. Forms: captured Torch IR; ATen with
composite ops, the form for passes; AOTAutograd's ATen without composites; the same with Inductor's decompositions. The best of 60
rounds, all forms in turn in each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.codegen.lower import as_piece, lower
from torchweave.compiler.codegen.pieces import build_fx
from torchweave.compiler.eager_semantics.size_answers import dynamic_shapes_mode
from torchweave.compiler.partition.split import Piece, split
from torchweave.compiler.passes.manager import PassManager
from torchweave.models import load
from torchweave.ops.registry import boundary_ops
from torchweave.report import Report
from torchweave.verify import zoo

TOKENS, ROUNDS, CALLS = 7, 60, 10


def middle_piece(name: str) -> Piece:
    """The module between two attention ops."""
    with tempfile.TemporaryDirectory() as folder:
        zoo.save(zoo.build(zoo.zoo_model(name)), folder)
        module: nn.Module = load(folder, torch.bfloat16, "cpu", "auto", False, Report(show=False), 128).module
    inputs = {
        "input_ids": torch.zeros(23, dtype=torch.int64),
        "positions": torch.arange(23),
        "logits_index": torch.tensor([4, 9, 22]),
    }
    dynamic = {"input_ids": {0: "T"}, "positions": {0: "T"}, "logits_index": {0: "N"}}
    graph = capture(module, inputs, dynamic, "backed_size_oblivious")
    graph.boundary_ops = boundary_ops()
    PassManager().run(graph, Report(show=False))
    return [part for part in split(graph) if isinstance(part, Piece)][1]


def taken_apart(piece: Piece, decompositions: Mapping[Any, Any]) -> Piece:
    """AOTAutograd's trace of the piece, below autograd, without composite ops."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FunctionalTensorMode()

    def functional(*arguments: Any) -> Any:
        return dispatch_functionalize(piece.module.forward, mode)(*arguments)

    tracer = make_fx(functional, tracing_mode="symbolic", decomposition_table=decompositions, _allow_fake_constant=True)
    with torch.no_grad():
        return as_piece(tracer(*piece.examples()))


def forms(piece: Piece) -> dict[str, tuple[Piece, float]]:
    """Each form of the piece, and its tracing time in seconds."""
    from torch._inductor.decomposition import select_decomp_table

    make: dict[str, Callable[[], Piece]] = {
        "torch_ir": lambda: piece,
        "lowered": lambda: lower(piece),
        "taken_apart": lambda: taken_apart(piece, {}),
        "decomposed": lambda: taken_apart(piece, select_decomp_table()),
    }
    made = {}
    with dynamic_shapes_mode("backed_size_oblivious"):
        lower(piece)  # the first trace of a process imports modules
        for name, function in make.items():
            begin = time.perf_counter()
            made[name] = (function(), time.perf_counter() - begin)
    return made


def measure(pieces: Mapping[str, Piece]) -> dict[str, float]:
    """Microseconds per call of each form."""
    example = pieces["torch_ir"].examples()
    shapes = [
        [TOKENS if isinstance(size, torch.SymInt) else size for size in getattr(each, "shape", ())] for each in example
    ]
    values = [TOKENS if isinstance(each, torch.SymInt) else torch.randn(shape).to(each.dtype)
              for each, shape in zip(example, shapes, strict=True)]  # fmt: skip
    calls, best = {name: build_fx(piece).call for name, piece in pieces.items()}, dict.fromkeys(pieces, float("inf"))
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, call in calls.items():
                begin = time.perf_counter()
                for _ in range(CALLS):
                    call(list(values))
                best[name] = min(best[name], (time.perf_counter() - begin) / CALLS * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="llama")
    args = parser.parse_args()
    torch.set_num_threads(1)
    made = forms(middle_piece(args.model))
    microseconds = measure({name: piece for name, (piece, _) in made.items()})
    results = [
        {
            "form": name,
            "operations": piece.num_calls(),
            "trace_seconds": round(seconds, 3),
            "us": round(microseconds[name], 1),
        }
        for name, (piece, seconds) in made.items()
    ]
    for row in results:
        print(
            f"{row['form']:<12} {row['operations']:>4} ops {row['us']:>8.1f} us {row['trace_seconds']:>7.3f} s to trace"
        )
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        head = {
            "command": f"bench/compiler/lowering.py --json {args.json}",
            "commit": commit.stdout.strip(),
            "model": args.model,
        }
        machine = {"torch": torch.__version__, "threads": 1, "tokens": TOKENS}
        args.json.write_text(json.dumps({**head, **machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
