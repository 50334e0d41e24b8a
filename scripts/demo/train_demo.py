"""Train the built-in models: `demo`, and the smaller `demo_draft` with the same tokenizer.

    python scripts/demo/train_demo.py --out torchweave/models/demo --draft-out torchweave/models/demo_draft --seconds 300

`scripts/demo/demo_tasks.py` generates the text; nothing is read or downloaded. The saved folders are loaded again and graded on
held-out questions. Exit code 1 if `demo` misses a required accuracy.
"""

# ruff: noqa: E402  (the project's folders come first, so that no installation is needed)

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import demo_tasks as tasks
import torch
from demo_eval import evaluate, missed, score
from demo_folder import save_folder
from demo_training import CAUSAL, Outcome, Recipe, Run, train
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import __version__ as transformers_version

from torchweave.report import Report

PRESETS = {
    "full": {
        "demo": Recipe(192, 5, 8, 4, 512, learning_rate=2e-3, share=0.75),
        "draft": Recipe(96, 3, 4, 2, 256, learning_rate=3e-3, share=0.25, tokens_per_step=32768),
    },
    # For a CPU: within minutes the loss falls and the first tasks are learnt.
    "small": {
        "demo": Recipe(96, 3, 4, 2, 256, learning_rate=3e-3, share=0.5, tokens_per_step=4096),
        "draft": Recipe(64, 2, 2, 1, 128, learning_rate=3e-3, share=0.5, tokens_per_step=4096),
    },
    # A few steps on a CPU: a smoke test of the script.
    "tiny": {
        "demo": Recipe(64, 2, 2, 1, 128, learning_rate=3e-3, share=0.5, tokens_per_step=2048),
        "draft": Recipe(32, 1, 2, 1, 64, learning_rate=3e-3, share=0.5, tokens_per_step=2048),
    },
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CONSOLE = Console(stderr=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--draft-out", type=Path, help="folder of the draft model; none is trained without it")
    parser.add_argument("--seconds", type=float, default=300.0, help="seconds of training, both models together")
    parser.add_argument("--steps", type=int, help="maximum number of training steps per model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--preset", choices=PRESETS, default="full")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the saved weights")
    parser.add_argument("--tasks", nargs="+", choices=tasks.TASKS, default=tasks.TASKS, help="train these tasks only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--workers", type=int, help="data-loading processes (default: number of cores minus two, at most 14)"
    )
    parser.add_argument("--questions", type=int, default=2000, help="number of held-out questions per task and form")
    parser.add_argument("--report", type=Path, help="write the results to this JSON file")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (default: on a GPU)")
    parser.add_argument("--learning-rate", type=float, help="peak learning rate of `demo` instead of the preset's")
    parser.add_argument("--tokens-per-step", type=int, help="tokens per training step instead of the preset's")
    return parser.parse_args(arguments)


def train_one(name: str, recipe: Recipe, options: argparse.Namespace, report: Report) -> Outcome:
    device = torch.device(options.device)
    workers = options.workers
    if workers is None:
        workers = max(min((os.cpu_count() or 1) - 2, 14), 0)
    done = 0.0
    with report.progress(f"train {name}", 100) as step:

        def advance(progress: float, note: str) -> None:
            nonlocal done
            moved = int(100 * min(progress, 1.0)) - int(done)
            done += moved
            step(moved, note)
            if not CONSOLE.is_terminal:
                CONSOLE.print(f"[{name}] {int(done):3d}%  {note}", soft_wrap=True, markup=False)

        run = Run(
            device=device,
            seed=options.seed,
            seconds=options.seconds * (recipe.share if options.draft_out else 1.0),
            max_steps=options.steps,
            workers=workers,
            compile_step=device.type == "cuda" if options.compile is None else options.compile,
            names=options.tasks,
            quick_questions=min(128, options.questions),
            say=lambda text: CONSOLE.print(f"[{name}] {text}", soft_wrap=True, markup=False),
            advance=advance,
        )
        return train(recipe, run)


def grade(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Load the saved folder with transformers and grade it in float32 and in the saved dtype."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {}
    for dtype in dict.fromkeys(("float32", options.dtype)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).to(options.device).eval()
        model.config._attn_implementation = CAUSAL
        found[dtype] = evaluate(model, tokenizer, options.questions, names=options.tasks)
    return found


def show(name: str, graded: dict[str, Any]) -> None:
    table = Table(title=f"{name}: exact matches on held-out questions")
    table.add_column("task")
    for dtype, result in graded.items():
        for form in next(iter(result["accuracy"].values())):
            table.add_column(f"{form}\n{dtype}", justify="right")
    for task in next(iter(graded.values()))["accuracy"]:
        table.add_row(
            task, *(f"{share:.2%}" for result in graded.values() for share in result["accuracy"][task].values())
        )
    CONSOLE.print(table)
    for task, examples in graded["float32"]["wrong"].items():
        for example in examples:
            wrong = f"{example['prompt']!r} -> {example['got']!r}, not {example['expected']!r}"
            CONSOLE.print(f"  {task} ({example['form']}): {wrong}", markup=False, soft_wrap=True)


def describe(options: argparse.Namespace, arguments: list[str] | None, seconds: float) -> dict[str, Any]:
    """Where and how the models were trained, so that anyone can do it again."""
    device = torch.device(options.device)
    return {
        "command": shlex.join(
            ["python", "scripts/demo/train_demo.py", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "transformers": transformers_version,
        "held_out_one_in": tasks.HELD_OUT_ONE_IN,
        "required": tasks.REQUIRED_ACCURACY,
    }


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    begin = time.monotonic()
    torch.set_float32_matmul_precision("high")
    report = Report()
    folders = {"demo": options.out, **({"draft": options.draft_out} if options.draft_out else {})}
    models: dict[str, Any] = {}
    failures: list[str] = []
    for name, folder in folders.items():
        recipe = PRESETS[options.preset][name]
        if options.learning_rate and name == "demo":
            recipe = replace(recipe, learning_rate=options.learning_rate)
        if options.tokens_per_step:
            recipe = replace(recipe, tokens_per_step=options.tokens_per_step)
        outcome = train_one(name, recipe, options, report)
        size = save_folder(folder, outcome.model.to(DTYPES[options.dtype]))
        graded = grade(folder, options)
        show(name, graded)
        models[name] = {
            "folder": str(folder),
            "bytes": size,
            "recipe": asdict(recipe),
            **outcome.facts,
            "graded": graded,
        }
        if name == "demo":
            failures = [
                f"{name}, {dtype}, {line}" for dtype, result in graded.items() for line in missed(result["accuracy"])
            ]
        CONSOLE.print(f"[{name}] {size / 1e6:.2f} MB, mean {score(graded['float32']['accuracy']):.2%}", markup=False)
        if options.report:  # after each model: what is done stays done when the next is cut off
            facts = describe(options, arguments, time.monotonic() - begin)
            options.report.parent.mkdir(parents=True, exist_ok=True)
            options.report.write_text(json.dumps({**facts, "missed": failures, "models": models}, indent=1) + "\n")
    for line in failures:
        CONSOLE.print(f"missed: {line}", markup=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
