"""`torchweave chat MODEL`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from torchweave.cli.arguments import COMMON_SAMPLING_OPTIONS, Parser, config_from_args, engine_parser
from torchweave.cli.session import engine, sampling_params_from_args
from torchweave.engine.request import SamplingParams

if TYPE_CHECKING:
    from torchweave.engine.llm import LLM

DESCRIPTION = """Chat with a model through its chat template. Ctrl-C stops a response; /new starts a new conversation; Ctrl-D or
/bye exits."""


def parser() -> Parser:
    cli_parser = engine_parser("chat", DESCRIPTION)
    cli_parser.add_argument("--system", metavar="TEXT", help="system message at the start of the conversation")
    cli_parser.add_config(
        SamplingParams,
        "sampling",
        skip=("n", "logprobs", "prompt_logprobs", "detokenize", "output_kind"),
        common=COMMON_SAMPLING_OPTIONS,
        show_defaults=False,
    )
    return cli_parser


def run(argv: Sequence[str]) -> int:
    args = parser().parse_argv(argv)
    config_from_args(SamplingParams, args)  # raises for invalid options before a model is loaded
    with engine(args, needs="chat template") as llm:
        Conversation(llm, sampling_params_from_args(args, llm), args.system, sys.stdout).run()
    return 0


class Conversation:
    """A chat whose responses are streamed to `out`."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, out: TextIO) -> None:
        self._llm, self._params, self._out = llm, params, out
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._system)

    def run(self) -> None:
        """Read and answer user messages until the end of input."""
        prompt = "\033[1m> \033[0m" if self._out.isatty() and sys.stdin.isatty() else ""
        while True:
            try:
                text = input(prompt).strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D exits)", file=sys.stderr)
                continue
            if text == "/bye":
                return
            if text == "/new":
                self.messages = list(self._system)
            elif text:
                self._answer(text)

    def _answer(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            stream = self._llm.stream(self._llm.encode_chat(messages), self._params)
        except ValueError as error:  # too long, or rejected by the template: drop this message and continue
            print(f"torchweave: {error} (/new starts a new conversation)", file=sys.stderr)
            return
        answer = ""
        try:
            for delta in stream:
                answer += delta.text
                self._out.write(delta.text)
                self._out.flush()
        except KeyboardInterrupt:
            stream.close()  # type: ignore[attr-defined]  # closing the generator cancels the request
            self._out.write(" [ended]")
        self._out.write("\n")
        self.messages = [*messages, {"role": "assistant", "content": answer}]
