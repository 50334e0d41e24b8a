"""Prompt lookup on the built-in model's copying task: accepted drafts and tokens a second of one request at a time, on a CPU.

python bench/speculation.py [--num-speculative-tokens 3] [--questions 40]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import demo_tasks as tasks

from torchweave import LLM, SamplingParams
from torchweave.report import Report

GREEDY = SamplingParams(temperature=0, max_tokens=120)


def run(llm: LLM, prompts: list[str]) -> tuple[list[list[int]], float]:
    """Tokens of each answer, and tokens a second over all of them, one after the other."""
    begin, answers = time.perf_counter(), []
    for prompt in prompts:
        answers.append(llm.generate([prompt], GREEDY)[0].outputs[0].token_ids)
    return answers, sum(map(len, answers)) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--prompt-lookup-min", type=int, default=2)
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    prompts = [tasks.plain_prompt(one) for one in tasks.held_out_questions("copy", args.questions)]
    speculation: dict[str, Any] = {
        "method": "ngram",
        "num_speculative_tokens": args.num_speculative_tokens,
        "prompt_lookup_min": args.prompt_lookup_min,
    }
    report = Report(show=False)
    with (
        LLM("demo", device="cpu", report=report) as plain,
        LLM("demo", device="cpu", speculative_config=speculation, report=Report(show=False)) as speculating,
    ):
        engines, rates = (plain, speculating), ([], [])
        answers = [run(llm, prompts)[0] for llm in engines]  # warm up
        for _ in range(args.rounds):
            for llm, rate in zip(engines, rates, strict=True):
                rate.append(run(llm, prompts)[1])
        counts = speculating.engine.scheduler.speculation
    before, after = map(statistics.median, rates)
    print(f"{sum(map(len, answers[0]))} tokens of {len(prompts)} answers, equal: {answers[0] == answers[1]}")
    print(f"drafts accepted: {counts.num_accepted_tokens} of {counts.num_draft_tokens}; by position", end=" ")
    print(" ".join(f"{count / counts.num_drafts:.2f}" for count in counts.num_accepted_tokens_per_pos))
    print(f"tokens a second: {before:.0f} without, {after:.0f} with drafts: {after / before:.2f}x")


if __name__ == "__main__":
    main()
