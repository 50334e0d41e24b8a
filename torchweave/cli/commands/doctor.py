"""`torchweave doctor TARGET`: obstacles to capturing a model or a module as one fast graph, with location, cause and fix."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchweave.cli.arguments import Parser, add_engine_options, engine_config
from torchweave.cli.output import print_advice
from torchweave.report import Report

if TYPE_CHECKING:
    from torchweave.doctor.finding import Finding

DESCRIPTION = """Run, trace and compile a model, module or function, and report obstacles with file and line, cause and fix. Exit
code 0: notes only, 1: findings, 2: invalid usage."""
_MODULE = re.compile(r"(?!shape:)(?P<path>[\w./~-]+):(?P<name>[A-Za-z_][\w.]*)$")
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def parser() -> Parser:
    cli_parser = Parser(
        prog="torchweave doctor", usage="torchweave doctor MODEL|module:function [OPTION...]", description=DESCRIPTION
    )
    cli_parser.add_argument("target", metavar="TARGET", help="a model, or module:function, module:Class, file.py:Class")
    cli_parser.add_argument(
        "--input",
        metavar="NAME=SPEC",
        action="append",
        default=[],
        help="an argument of the function, in order: 'x=float32[T,16]', 'ids=int64[T]<1000', 'n=int', 'sizes=ints'; names in "
        "brackets are dynamic sizes. Replaces the target's attribute doctor_inputs",
    )
    cli_parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_engine_options(cli_parser)
    return cli_parser


def run(argv: Sequence[str]) -> int:
    args = parser().parse_argv(argv)
    findings = _examine(args)
    if args.json:
        print(json.dumps({"target": args.target, "findings": [asdict(each) for each in findings]}))
    else:
        _print(args.target, findings)
    return 1 if any(each.severity != "note" for each in findings) else 0


def _examine(args: Any) -> list[Finding]:
    match = _MODULE.match(args.target)
    if match is None or Path(args.target).exists():
        if args.input:
            raise ValueError("--input applies to module:function only; remove it for a model")
        from torchweave.doctor.model import examine_model

        args.model = args.target
        print_advice(args.advice)
        return examine_model(engine_config(args), Report(show=False if args.quiet else None))
    from torchweave.doctor.examine import examine
    from torchweave.doctor.subject import find

    return examine(find(args.target, _inputs(args.input)))


def _inputs(given: Sequence[str]) -> dict[str, str] | None:
    specs = {}
    for text in given:
        name, equals, spec = text.partition("=")
        if not equals:
            raise ValueError(f"--input {text} must be NAME=SPEC, such as x=float32[T,16]")
        specs[name.strip()] = spec
    return specs or None


def _print(target: str, findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for each in findings:
        console.print(
            Text.assemble(
                (f"{each.severity:<8}", _COLOURS[each.severity]), (_relative_path(each.where) or "(no line)", "bold")
            )
        )
        console.print(Text.assemble(f"        {each.cause}  ", (f"[{each.kind}: {each.rule}]", "dim")))
        console.print(Text.assemble(("        fix: ", "green"), each.fix))
    counts = {name: sum(each.severity == name for each in findings) for name in _COLOURS}
    summary = ", ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count)
    good = "no findings: one graph, correct at every tested size"
    console.print(Text(f"{target}: {summary or good}"))  # not plain text, in which rich replaces `:M:` by an emoji


def _relative_path(where: str) -> str:
    """A path relative to the current folder."""
    return where.removeprefix(f"{Path.cwd()}/")
