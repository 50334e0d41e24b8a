"""`torchweave tune MODEL`: measure on this machine what runs the model's steps best, and keep it in the compile cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchweave.cli.arguments import Parser, engine_config, engine_parser
from torchweave.report import Report

if TYPE_CHECKING:
    from torchweave.compiler.tuning.table import Table

DESCRIPTION = """Time the candidates for every product of few tokens of MODEL, and for streams, fixed sizes and passes that wait for
a measurement where they are asked for, inside CUDA graphs with weights that come from memory. What wins by more than the noise is
kept in the compile cache, goes before what the package ships for this kind of GPU, and is used by every later start."""


def parser() -> Parser:
    cli_parser = engine_parser("tune", DESCRIPTION)
    cli_parser.add_argument("--all", action="store_true", help="also measure what is known of this kind of GPU already")
    return cli_parser


def run(argv: Sequence[str]) -> int:
    args = parser().parse_argv(argv)
    config = engine_config(args)
    from torchweave.engine.startup.tune import tune

    table = tune(config, Report(show=False if args.quiet else None), remeasure=args.all)
    _print(table)
    return 0


def _print(table: Table) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as Rows

    if not table.entries:
        print("Everything that can be asked about this model is known; --all measures it anew.")
        return
    rows = Rows(
        title=f"Measured on {table.device}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("subject", "shape", "tokens", "choice", "us", "us without", "us saved"):
        rows.add_column(
            column, overflow="fold", justify="left" if column in ("subject", "shape", "choice") else "right"
        )
    for each in sorted(table, key=lambda entry: (entry.subject, entry.shape, entry.tokens)):
        figures = (f"{each.microseconds:.2f}", f"{each.baseline:.2f}", f"{each.saved:.2f}" if each.choice else "-")
        rows.add_row(each.subject, each.shape, str(each.tokens), each.choice or "as it is", *figures)
    Console(highlight=False).print(rows)
