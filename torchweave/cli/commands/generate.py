"""`torchweave generate MODEL [PROMPT...]`: stream completions of prompts; several prompts run in one batch."""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from torchweave.cli.arguments import COMMON_SAMPLING_OPTIONS, Parser, config_from_args, engine_parser
from torchweave.cli.session import engine, sampling_params_from_args
from torchweave.engine.outputs import CompletionOutput
from torchweave.engine.request import SamplingParams
from torchweave.engine.sampling.structured_output import rejection_reason

if TYPE_CHECKING:
    from torchweave.engine.llm import LLM

DESCRIPTION = """Complete prompts. Without PROMPT, each line of standard input is a prompt. The completion of a single prompt is
streamed. Several prompts run in one batch; each is printed with its completion, in order. Sampling options override the
checkpoint's generation_config.json; without either, decoding is greedy."""


def parser() -> Parser:
    cli_parser = engine_parser("generate", DESCRIPTION, "MODEL [PROMPT...]")
    cli_parser.add_argument("prompts", metavar="PROMPT", nargs="*", default=[], help="text to complete")
    cli_parser.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt and line, in order of completion"
    )
    cli_parser.add_config(
        SamplingParams,
        "sampling",
        skip=("prompt_logprobs", "detokenize", "output_kind"),
        common=COMMON_SAMPLING_OPTIONS,
        show_defaults=False,
    )
    return cli_parser


def run(argv: Sequence[str]) -> int:
    args = parser().parse_argv(argv)
    params = config_from_args(SamplingParams, args)
    if params.logprobs is not None and not args.json:
        raise ValueError("--logprobs needs --json: text output has no place for log-probabilities")
    if params.structured_outputs is not None and (reason := rejection_reason(params.structured_outputs)):
        raise ValueError(reason)
    if not args.prompts and sys.stdin.isatty():
        return _interactive(args)
    prompts = args.prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise ValueError("there is no prompt; pass prompts as arguments, or one per line on standard input")
    with engine(args, needs="tokenizer") as llm:
        _answer(llm, prompts, sampling_params_from_args(args, llm), as_json=args.json)
    return 0


def _interactive(args: argparse.Namespace) -> int:
    with engine(args, needs="tokenizer") as llm:
        params = sampling_params_from_args(args, llm)
        while True:
            try:
                prompt = input("> ")
            except EOFError:
                return 0
            if prompt.strip():
                _answer(llm, [prompt], params, as_json=args.json)


def _answer(llm: LLM, prompts: Sequence[str], params: SamplingParams, as_json: bool) -> None:
    deltas = llm.stream_all(prompts, params)
    if as_json:
        for line in json_lines(prompts, deltas, params.n, in_ascii=not _has_all_characters(sys.stdout)):
            print(line, flush=True)
    else:
        print_in_order(prompts, deltas, params.n, sys.stdout)


def _has_all_characters(out: TextIO) -> bool:
    return (out.encoding or "").lower().startswith("utf")


def json_lines(
    prompts: Sequence[str],
    deltas: Iterator[tuple[int, CompletionOutput]],
    num_answers: int,
    in_ascii: bool = False,
) -> Iterator[str]:
    """Yield a JSON object (`index`, `prompt`, `outputs`) per prompt when its last output ends.

    Requested log-probabilities are one object per token, by token id.
    """
    outputs: list[dict[int, dict[str, Any]]] = [{} for _ in prompts]
    for number, delta in deltas:
        answer = outputs[number].setdefault(delta.index, {"index": delta.index, "text": "", "token_ids": []})
        answer["text"] += delta.text
        answer["token_ids"] += delta.token_ids
        answer["finish_reason"] = delta.finish_reason
        if delta.logprobs is not None:
            answer["cumulative_logprob"] = delta.cumulative_logprob
            answer.setdefault("logprobs", []).extend(delta.logprobs)  # an entry is written as its number
        answers = outputs[number]
        if len(answers) == num_answers and all(answer["finish_reason"] for answer in answers.values()):
            ordered = [answers[index] for index in sorted(answers)]
            yield json.dumps({"index": number, "prompt": prompts[number], "outputs": ordered}, ensure_ascii=in_ascii)


def print_in_order(
    prompts: Sequence[str], deltas: Iterator[tuple[int, CompletionOutput]], num_answers: int, out: TextIO
) -> None:
    """Stream the first unfinished output and buffer later ones until their turn."""
    echo = len(prompts) * num_answers > 1
    bold, dim, plain = ("\033[1m", "\033[2m", "\033[0m") if out.isatty() else ("", "", "")
    keys = [(number, index) for number in range(len(prompts)) for index in range(num_answers)]
    waiting = deque(keys)
    buffered = dict.fromkeys(keys, "")
    finished: set[tuple[int, int]] = set()

    def begin() -> None:
        out.write(f"{dim}{prompts[waiting[0][0]]} \N{RIGHTWARDS ARROW} {plain}{bold}" if echo else bold)

    begin()
    for number, delta in deltas:
        buffered[number, delta.index] += delta.text
        if delta.finish_reason:
            finished.add((number, delta.index))
        while waiting:
            out.write(buffered.pop(waiting[0], ""))
            buffered[waiting[0]] = ""
            if waiting[0] not in finished:
                break
            out.write(f"{plain}\n")
            waiting.popleft()
            if waiting:
                begin()
        out.flush()
