"""Cost of requests with penalties or grammars for the rest of the batch: milliseconds per token of the others.

    python bench/engine/mixed_batch.py [--model demo] [--others 8] [--beside 0 1 8] [--tokens 200] [--rounds 7] [--json FILE]

`others` are plain greedy requests. `plain` adds more of them (the cost of a larger batch), the baseline for `penalties` (all
three, a bias and a bad word) and `grammar` (a JSON schema). Requests with a grammar join every second step. Rounds cycle
through all cases; results are medians, and ratios to plain the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave import LLM, SamplingParams
from torchweave.bench.result import environment
from torchweave.engine.request import StructuredOutputs
from torchweave.report import Report

PLAIN = SamplingParams(temperature=0.0, ignore_eos=True)
SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 400}
KINDS = {
    "plain": PLAIN,
    "penalties": replace(
        PLAIN,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias={20: 1.0},
        bad_words=[[30, 31]],
    ),
    "grammar": replace(PLAIN, structured_outputs=StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)),
}


def round_of(llm: LLM, others: int, beside: int, kind: str, tokens: int) -> float:
    """Milliseconds per step while the others decode, without the slowest tenth of the steps."""
    prompts = [np.random.default_rng(n).integers(8, 100, 16).tolist() for n in range(others + beside)]
    params = [replace(PLAIN, max_tokens=tokens)] * others + [replace(KINDS[kind], max_tokens=tokens + 20)] * beside
    llm.manager.timings.clear()
    llm.generate(prompts, params)
    steps = sorted(1e3 * sum(timing) for timing in list(llm.manager.timings)[5 : tokens - 5])
    return statistics.mean(steps[: -(len(steps) // 10)])


def measure(llm: LLM, args: argparse.Namespace) -> list[dict[str, Any]]:
    cases, refused = [], {}
    for kind, params in KINDS.items():
        try:
            llm.generate([[9, 10]], replace(params, max_tokens=2))
        except (ValueError, RuntimeError) as error:
            refused[kind] = str(error)
        else:
            cases += [(kind, beside) for beside in args.beside if beside or kind == "plain"]
    times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _ in range(args.rounds + 1):
        for kind, beside in cases:
            times[kind, beside].append(round_of(llm, args.others, beside, kind, args.tokens))
    found: list[dict[str, Any]] = []
    for (kind, beside), own in times.items():
        own, plain = own[1:], times["plain", beside][1:]
        ratio = statistics.median(a / b for a, b in zip(own, plain, strict=True))
        found.append(
            {
                "beside": beside,
                "kind": kind,
                "ms_per_token": round(statistics.median(own), 3),
                "to_plain": round(ratio, 3),
                "rounds": [round(value, 3) for value in own],
            }
        )
    return found + [{"kind": kind, "skipped": why} for kind, why in refused.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load_format", default="auto")
    parser.add_argument("--others", type=int, default=8)
    parser.add_argument("--beside", type=int, nargs="+", default=[0, 1, 8])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with LLM(args.model, load_format=args.load_format, max_model_len=512, report=Report(show=False)) as llm:
        results = measure(llm, args)
        facts = environment(llm.plan.device)
        facts["load_average"] = round(os.getloadavg()[1], 1)  # over five minutes: other load of the machine
    for row in results:
        if "skipped" in row:
            print(f"{row['kind']:<10} skipped: {row['skipped']}")
        else:
            print(
                f"{row['kind']:<10} {row['beside']} more {row['ms_per_token']:>8.3f} ms/token, {row['to_plain']:.2f} x plain"
            )
    if args.json:
        whole = {"scenario": "mixed_batch", "model": args.model, "others": args.others, "tokens": args.tokens}
        args.json.write_text(json.dumps({**whole, "environment": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
