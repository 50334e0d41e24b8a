"""`torchweave tune MODEL`: measure kernel candidates on this machine and keep the results in the compile cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchweave.cli.arguments import Parser, engine_config, engine_parser
from torchweave.cli.output import print_advice, print_table
from torchweave.report import Report

if TYPE_CHECKING:
    from torchweave.compiler.tuning.table import Table

DESCRIPTION = """Time candidates for MODEL's matrix products of few tokens and, if enabled, for streams, static sizes and passes
that need measurements, inside CUDA graphs with weights read from memory. Winners by more than the noise go to the compile cache,
override the measurements shipped for this kind of GPU, and apply to every later start."""


def parser() -> Parser:
    cli_parser = engine_parser("tune", DESCRIPTION)
    cli_parser.add_argument(
        "--all", action="store_true", help="repeat measurements that already exist for this kind of GPU"
    )
    return cli_parser


def run(argv: Sequence[str]) -> int:
    args = parser().parse_argv(argv)
    print_advice(args.advice)
    config = engine_config(args)
    from torchweave.engine.startup.tune import tune

    table = tune(config, Report(show=False if args.quiet else None), remeasure=args.all)
    _print(table)
    return 0


def _print(table: Table) -> None:
    if not table.entries:
        print("All measurements for this model exist; --all repeats them.")
        return
    rows: list[tuple[str, ...]] = []
    for each in sorted(table, key=lambda entry: (entry.subject, entry.shape, entry.tokens)):
        figures = (f"{each.microseconds:.2f}", f"{each.baseline:.2f}", f"{each.saved:.2f}" if each.choice else "-")
        rows.append((each.subject, each.shape, str(each.tokens), each.choice or "unchanged", *figures))
    columns = ("subject", "shape", "tokens", "choice", "us", "us without", "us saved")
    print_table(f"Measured on {table.device}", columns, rows, right=("tokens", *columns[4:]))
