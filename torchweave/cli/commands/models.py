"""`torchweave models list|verify`: built-in and supported models, and their comparison with transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torchweave.cli.arguments import Parser
from torchweave.cli.output import check_output_file, write_output
from torchweave.report import Report

ACTIONS = ("list", "verify")


def parser() -> Parser:
    cli_parser = Parser(
        prog="torchweave models",
        usage=f"torchweave models {'|'.join(ACTIONS)} [NAME...] [OPTION...]",
        description="List models, or compare their tokens with transformers.",
    )
    cli_parser.add_argument("action", metavar="ACTION", choices=ACTIONS, help=" or ".join(ACTIONS))
    cli_parser.add_argument("names", metavar="NAME", nargs="*", default=[], help="architectures to verify")
    cli_parser.add_argument("--all", action="store_true", help="verify every architecture")
    cli_parser.add_argument(
        "--tensor_parallel_size",
        metavar="N[,N]",
        default="1",
        help="tensor-parallel ranks to verify with, as processes of this machine",
    )
    cli_parser.add_argument(
        "--pipeline_parallel_size",
        metavar="N",
        type=int,
        default=1,
        help="pipeline stages to verify with, each of the tensor-parallel ranks",
    )
    cli_parser.add_argument(
        "--num_speculative_tokens",
        metavar="N",
        type=int,
        default=0,
        help="verify with speculation, with up to N drafts",
    )
    cli_parser.add_argument(
        "--speculative_method",
        choices=("ngram", "draft_model"),
        default="ngram",
        help="drafter of --num_speculative_tokens: prompt lookup, or each model as its own draft model (for image-text models a "
        "Llama)",
    )
    cli_parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of the engine; transformers runs on the CPU"
    )
    cli_parser.add_argument("--json", action="store_true", help="print a JSON object")
    cli_parser.add_argument(
        "--write", metavar="FILE", default="", help="write the table of verify to FILE (docs/reference/models.md)"
    )
    cli_parser.add_argument("--quiet", action="store_true", help="draw no progress bars")
    return cli_parser


def run(argv: Sequence[str]) -> int:
    args = parser().parse_argv(argv)
    if args.action == "list":
        if extra := [*args.names, *(["--all"] if args.all else []), *(["--write"] if args.write else [])]:
            raise ValueError(f"`torchweave models list` takes no {extra[0]}; remove it")
        return _list(args.json)
    if args.write and args.pipeline_parallel_size > 1:
        raise ValueError("--write cannot be combined with --pipeline_parallel_size: the table has no column for stages")
    if args.write and args.num_speculative_tokens:
        raise ValueError("--write cannot be combined with --num_speculative_tokens: the table has no column for it")
    if args.write and args.device != "cpu":
        raise ValueError("--write cannot be combined with --device cuda: the table is of engines on a CPU")
    write = check_output_file("--write", args.write)
    ranks = _sizes(args.tensor_parallel_size)
    if bool(args.names) == args.all:
        raise ValueError("name architectures to verify, or give --all (`torchweave models list` lists them)")
    from torchweave.verify.verify import table, verify

    report = Report(show=False if args.quiet else None)
    result: dict[str, Any] = verify(
        None if args.all else args.names,
        report,
        ranks,
        args.pipeline_parallel_size,
        args.num_speculative_tokens,
        args.device,
        args.speculative_method,
    )
    if write is not None:
        write_output("--write", write, table(result))
    if args.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0 if result["passed"] == result["total"] else 1


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"tensor_parallel_size is {text!r}: expected a number of ranks, or a list such as 1,2,4"
        ) from None


def _list(as_json: bool) -> int:
    from torchweave.config.model_shapes import SHAPES
    from torchweave.config.model_source import BUILT_IN
    from torchweave.verify.image_zoo import IMAGE_MODELS
    from torchweave.verify.zoo import ZOO_MODELS

    models = {
        "built_in": sorted(BUILT_IN),
        "shapes": sorted(SHAPES),
        "architectures": sorted(entry.name for entry in (*ZOO_MODELS, *IMAGE_MODELS)),
    }
    if as_json:
        print(json.dumps(models))
        return 0
    print("built in          " + ", ".join(models["built_in"]))
    print("shapes            " + ", ".join(models["shapes"]) + "  (with --load_format dummy)")
    print(
        f"architectures     {len(models['architectures'])}, checked against transformers by `torchweave models verify`:"
    )
    for name in models["architectures"]:
        print(f"  {name}")
    return 0


def _print(result: dict[str, Any]) -> None:
    for row in result.get("results", ()):
        ranks = f"{row['ranks']} ranks " if row["ranks"] > 1 else ""
        ranks += f"{row['stages']} stages " if row["stages"] > 1 else ""
        print(f"{'ok  ' if row['passed'] else 'FAIL'}  {row['name']:<24} {ranks}{row.get('reason') or ''}".rstrip())
    print(f"{result['passed']} of {result['total']} architectures give the tokens of transformers")
