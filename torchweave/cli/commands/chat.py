"""`torchweave chat MODEL`: a conversation in the terminal. Ctrl-C ends an answer early, Ctrl-D ends the conversation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from torchweave.cli.arguments import Parser, engine_parser
from torchweave.cli.session import check_sampling_args, engine, sampling_params_from_args
from torchweave.engine.request import SamplingParams

if TYPE_CHECKING:
    from torchweave.engine.llm import LLM

DESCRIPTION = """Talk with a model through its chat template. Ctrl-C ends an answer early; Ctrl-D or /bye ends the conversation;
/new forgets it."""


def parser() -> Parser:
    cli_parser = engine_parser("chat", DESCRIPTION)
    cli_parser.add_argument("--system", metavar="TEXT", help="a system message that begins the conversation")
    cli_parser.add_config(SamplingParams, "sampling", skip=("n", "logprobs", "prompt_logprobs"))
    return cli_parser


def run(argv: Sequence[str]) -> int:
    args = parser().parse_argv(argv)
    check_sampling_args(args)
    with engine(args) as llm:
        Conversation(llm, sampling_params_from_args(args, llm), args.system, sys.stdout).run()
    return 0


class Conversation:
    """Turns of a conversation, each answered as it comes."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, out: TextIO) -> None:
        self._llm, self._params, self._out = llm, params, out
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._system)

    def run(self) -> None:
        """Read turns until the end of input."""
        prompt = "\033[1m> \033[0m" if self._out.isatty() and sys.stdin.isatty() else ""
        while True:
            try:
                text = input(prompt).strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D ends the conversation)", file=sys.stderr)
                continue
            if text == "/bye":
                return
            if text == "/new":
                self.messages = list(self._system)
            elif text:
                self._turn(text)

    def _turn(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            stream = self._llm.stream(self._llm.encode_chat(messages), self._params)
        except ValueError as error:  # too long, or refused by the template: the conversation goes on without this turn
            print(f"torchweave: {error} (/new forgets the conversation)", file=sys.stderr)
            return
        answer = ""
        try:
            for delta in stream:
                answer += delta.text
                self._out.write(delta.text)
                self._out.flush()
        except KeyboardInterrupt:
            stream.close()  # type: ignore[attr-defined]  # a generator: closing it stops the request
            self._out.write(" [ended]")
        self._out.write("\n")
        self.messages = [*messages, {"role": "assistant", "content": answer}]
