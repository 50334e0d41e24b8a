"""`torchweave doctor TARGET`: what keeps a model or a module from being one fast graph, each with place, cause and fix."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchweave.cli.arguments import Parser, add_engine_options, engine_config
from torchweave.report import Report

if TYPE_CHECKING:
    from torchweave.doctor.finding import Finding

DESCRIPTION = """Examine a model, or any module or function: run it, trace it, weave it, and name what stands in the way, with
file and line, the cause in one sentence, and the fix. Exit code 0: nothing but notes, 1: findings, 2: a fault in what was asked."""
_MODULE = re.compile(r"(?!shape:)(?P<path>[\w./~-]+):(?P<name>[A-Za-z_][\w.]*)$")
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def parser() -> Parser:
    found = Parser(
        prog="torchweave doctor", usage="torchweave doctor MODEL|module:function [OPTION...]", description=DESCRIPTION
    )
    found.add_argument("target", metavar="TARGET", help="a model, or module:function, module:Class, file.py:Class")
    found.add_argument(
        "--input",
        metavar="NAME=SPEC",
        action="append",
        default=[],
        help="an argument of the function, in order: 'x=float32[T,16]', 'ids=int64[T]<1000', 'n=int', 'sizes=ints'; names in "
        "brackets are sizes that vary. Not needed where it has an attribute doctor_inputs",
    )
    found.add_argument("--json", action="store_true", help="print a JSON object")
    add_engine_options(found)
    return found


def run(argv: Sequence[str]) -> int:
    args = parser().parse_argv(argv)
    findings = _examine(args)
    if args.json:
        print(json.dumps({"target": args.target, "findings": [each.as_dict() for each in findings]}))
    else:
        _print(args.target, findings)
    return 1 if any(each.severity != "note" for each in findings) else 0


def _examine(args: Any) -> list[Finding]:
    match = _MODULE.match(args.target)
    if match is None or Path(args.target).exists():
        if args.input:
            raise ValueError("--input is for module:function; a model's inputs are known")
        from torchweave.doctor.model import examine_model

        args.model = args.target
        return examine_model(engine_config(args), Report(show=False if args.quiet else None))
    from torchweave.doctor.examine import examine
    from torchweave.doctor.subject import find

    return examine(find(args.target, _inputs(args.input)))


def _inputs(given: Sequence[str]) -> dict[str, str] | None:
    found = {}
    for text in given:
        name, equals, spec = text.partition("=")
        if not equals:
            raise ValueError(f"--input {text} must be NAME=SPEC, such as x=float32[T,16]")
        found[name.strip()] = spec
    return found or None


def _print(target: str, findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for each in findings:
        console.print(
            Text.assemble((f"{each.severity:<8}", _COLOURS[each.severity]), (_near(each.where) or "(no line)", "bold"))
        )
        console.print(Text.assemble(f"        {each.cause}  ", (f"[{each.kind}: {each.rule}]", "dim")))
        console.print(Text.assemble(("        fix: ", "green"), each.fix))
    counts = {name: sum(each.severity == name for each in findings) for name in _COLOURS}
    said = ", ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count)
    good = "nothing was found; it is one graph, and right at every size that was tried"
    console.print(Text(f"{target}: {said or good}"))  # as it is: in plain text `:M:` of a name is an emoji to rich


def _near(where: str) -> str:
    """A path below the current folder by its end."""
    here = f"{Path.cwd()}/"
    return where.removeprefix(here)
