"""`torchweave models list|verify`: what is built in and supported, and the proof against transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchweave.cli.arguments import Parser
from torchweave.cli.results import check_output_path, write_output
from torchweave.report import Report

ACTIONS = ("list", "verify")


def parser() -> Parser:
    found = Parser(
        prog="torchweave models",
        usage=f"torchweave models {'|'.join(ACTIONS)} [NAME...] [OPTION...]",
        description="List models, or compare them with transformers token by token.",
    )
    found.add_argument("action", metavar="ACTION", choices=ACTIONS, help=" or ".join(ACTIONS))
    found.add_argument("names", metavar="NAME", nargs="*", default=[], help="architectures to verify")
    found.add_argument("--all", action="store_true", help="verify every architecture")
    found.add_argument(
        "--tensor_parallel_size",
        metavar="N[,N]",
        default="1",
        help="verify with so many ranks, processes of this machine",
    )
    found.add_argument(
        "--pipeline_parallel_size",
        metavar="N",
        type=int,
        default=1,
        help="verify with so many stages of as many ranks each",
    )
    found.add_argument("--json", action="store_true", help="print a JSON object")
    found.add_argument("--write", metavar="FILE", default="", help="write the table of verify to FILE (docs/models.md)")
    found.add_argument("--quiet", action="store_true", help="draw no progress bars")
    return found


def run(argv: Sequence[str]) -> int:
    args = parser().parse_argv(argv)
    if args.action == "list":
        if extra := [*args.names, *(["--all"] if args.all else []), *(["--write"] if args.write else [])]:
            raise ValueError(f"`torchweave models list` takes no {extra[0]}; leave it out")
        return _list(args.json)
    if args.write and args.pipeline_parallel_size > 1:
        raise ValueError("the table of --write has no column for stages; leave --pipeline_parallel_size or --write out")
    write = check_output_path("--write", args.write) if args.write else None
    if write is not None and not write.parent.is_dir():
        raise ValueError(f"--write {args.write}: there is no such folder")
    ranks, stages = _sizes(args.tensor_parallel_size), args.pipeline_parallel_size
    return _verify(args.names, args.all, args.json, args.quiet, write, ranks, stages)


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"tensor_parallel_size is {text!r}: expected a number of ranks, or several like 1,2,4"
        ) from None


def _list(as_json: bool) -> int:
    from torchweave.models.resolve import BUILT_IN, SHAPES
    from torchweave.verify.zoo import ZOO_MODELS

    found = {
        "built_in": sorted(BUILT_IN),
        "shapes": sorted(SHAPES),
        "architectures": sorted(entry.name for entry in ZOO_MODELS),
    }
    if as_json:
        print(json.dumps(found))
        return 0
    print("built in          " + ", ".join(found["built_in"]))
    print("shapes            " + ", ".join(found["shapes"]) + "  (with --load_format dummy)")
    print(
        f"architectures     {len(found['architectures'])}, checked against transformers by `torchweave models verify`:"
    )
    for name in found["architectures"]:
        print(f"  {name}")
    return 0


def _verify(
    names: Sequence[str],
    everything: bool,
    as_json: bool,
    quiet: bool,
    write: Path | None,
    ranks: Sequence[int],
    stages: int,
) -> int:
    if bool(names) == everything:
        raise ValueError("name the architectures to verify, or give --all (`torchweave models list` shows them)")
    from torchweave.verify.verify import table, verify

    report = Report(show=False if quiet else None)
    result: dict[str, Any] = verify(None if everything else list(names), report, ranks, stages)
    if write is not None:
        write_output("--write", write, table(result))
    if as_json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0 if result["passed"] == result["total"] else 1


def _print(result: dict[str, Any]) -> None:
    for row in result.get("results", ()):
        ranks = f"{row['ranks']} ranks " if row["ranks"] > 1 else ""
        ranks += f"{row['stages']} stages " if row["stages"] > 1 else ""
        print(f"{'ok  ' if row['passed'] else 'FAIL'}  {row['name']:<24} {ranks}{row.get('reason') or ''}".rstrip())
    print(f"{result['passed']} of {result['total']} architectures give the tokens of transformers")
