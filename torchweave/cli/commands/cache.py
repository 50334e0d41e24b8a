"""`torchweave cache list|inspect|verify|prune|export|import`: manage the compile cache."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchweave.cli.arguments import Parser
from torchweave.config.options import cache_dir
from torchweave.report import Report

if TYPE_CHECKING:
    from torchweave.compiler.cache.maintenance import Summary
    from torchweave.compiler.cache.store import CompileCache

ACTIONS = {
    "list": "list the entries",
    "inspect": "show the cache key factors of entries: KEY... (a prefix suffices)",
    "verify": "check every entry; exit code 1 if one is damaged",
    "prune": "remove damaged entries and those selected by --older_than, --max_size or --all",
    "export": "write all entries, or KEY..., to FILE for import on a machine of the same kind",
    "import": "add the entries of FILE; they contain code that Torchweave runs, so import trusted files only",
}
DESCRIPTION = "Manage the compile cache: captured graphs and compiled pieces of earlier starts."
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TIMES = {"m": 60, "h": 3600, "d": 86400}


def parser() -> Parser:
    actions = "\n".join(f"  {name:<8} {text}" for name, text in ACTIONS.items())
    cli_parser = Parser(
        prog="torchweave cache",
        usage=f"torchweave cache {'|'.join(ACTIONS)} [FILE] [KEY...] [OPTION...]",
        description=f"{DESCRIPTION}\n\n{actions}",
    )
    cli_parser.add_argument("action", metavar="ACTION", choices=ACTIONS, help=argparse.SUPPRESS)
    cli_parser.add_argument("names", metavar="FILE|KEY", nargs="*", default=[], help=argparse.SUPPRESS)
    cli_parser.add_argument("--compile_cache_dir", metavar="DIR", help="folder of the compile cache")
    cli_parser.add_argument("--older_than", metavar="TIME", help="prune: entries unused for TIME, such as 30d or 12h")
    cli_parser.add_argument(
        "--max_size", metavar="SIZE", help="prune: least recently used entries above SIZE in total, such as 2G"
    )
    cli_parser.add_argument("--all", action="store_true", help="prune: all entries, compiled CPU code and bytecode")
    cli_parser.add_argument("--dry_run", action="store_true", help="prune: list the entries without removing them")
    cli_parser.add_argument("--json", action="store_true", help="print a JSON object")
    return cli_parser


def run(argv: Sequence[str]) -> int:
    args = parser().parse_argv(argv)
    _check(args)
    folder = args.compile_cache_dir
    try:
        folder = cache_dir(args.compile_cache_dir)
        return _act(folder, args)
    except BrokenPipeError:  # standard output's
        raise
    except OSError as error:
        at = error.filename or folder or "the compile cache"
        raise ValueError(
            f"`torchweave cache {args.action}` failed at {at}: {error.strerror or error}; fix that, or choose another folder with "
            "--compile_cache_dir"
        ) from error


def _check(args: argparse.Namespace) -> None:
    """Reject arguments that the action would ignore."""
    if args.names and args.action in ("list", "verify", "prune"):
        raise ValueError(f"`torchweave cache {args.action}` applies to all entries; remove {args.names[0]!r}")
    if args.action == "import" and len(args.names) > 1:
        raise ValueError(f"`torchweave cache import` takes one file; remove {args.names[1]!r}")
    of_prune = [name for name in ("older_than", "max_size", "all", "dry_run") if getattr(args, name)]
    if of_prune and args.action != "prune":
        raise ValueError(f"--{of_prune[0]} is an option of `torchweave cache prune`; remove it")


def _act(folder: Path, args: argparse.Namespace) -> int:
    from torchweave.compiler.cache.store import CompileCache

    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the compile cache with --compile_cache_dir")
    if not folder.exists() and args.action != "import":
        raise ValueError(f"there is no compile cache at {folder}; the first start of a model creates it")
    cache = CompileCache(folder, Report(show=False))
    actions = {
        "list": _list,
        "inspect": _inspect,
        "verify": _verify,
        "prune": _prune,
        "export": _export,
        "import": _import,
    }
    return actions[args.action](cache, args)


def _list(cache: CompileCache, args: argparse.Namespace) -> int:
    from torchweave.compiler.cache.maintenance import num_side_bytes, summaries

    entries, side_bytes = list(summaries(cache)), num_side_bytes(cache)
    if args.json:
        facts = {"folder": str(cache.folder), "entries": [_facts(each) for each in entries], "side_bytes": side_bytes}
        print(json.dumps(facts))
        return 0
    for each in entries:
        print(f"{each.key[:12]}  {_size(each.num_bytes):>9}  {_age(each.used):>8}  {_describe(each)}")
    print(f"{_total(entries, side_bytes)}, in {cache.folder}")
    return 0


def _inspect(cache: CompileCache, args: argparse.Namespace) -> int:
    from torchweave.compiler.cache.maintenance import find

    if not args.names:
        raise ValueError("name an entry: `torchweave cache inspect KEY`; `torchweave cache list` shows the keys")
    entries = find(cache, args.names)
    if args.json:
        print(json.dumps({"entries": [_facts(each, whole=True) for each in entries]}))
        return 0
    for each in entries:
        print(f"{each.key}\n  {_describe(each)}, {_size(each.num_bytes)}, last used {_age(each.used)} ago, {each.path}")
        if each.entry is not None:
            for title, facts in (("factors", each.entry.factors), ("facts", each.entry.facts)):
                print(f"  {title}")
                for name, value in facts.items():
                    print(f"    {name:<26} {value if isinstance(value, str) else json.dumps(value)}")
    return 0


def _verify(cache: CompileCache, args: argparse.Namespace) -> int:
    from torchweave.compiler.cache.maintenance import summaries

    entries = list(summaries(cache))
    damaged = [each for each in entries if each.entry is None]
    if args.json:
        print(json.dumps({"entries": len(entries), "damaged": [_facts(each) for each in damaged]}))
    else:
        for each in damaged:
            print(f"{each.path.relative_to(cache.folder)}: {each.fault}")
        print(f"{len(entries) - len(damaged)} of {len(entries)} entries are valid")
    return 1 if damaged else 0


def _prune(cache: CompileCache, args: argparse.Namespace) -> int:
    from torchweave.compiler.cache.maintenance import (
        clear_side_files,
        clear_unfinished,
        num_side_bytes,
        summaries,
        to_prune,
    )

    older = None if args.older_than is None else _number(args.older_than, _TIMES, "--older_than", "30d, 12h or 90m")
    size = None if args.max_size is None else _number(args.max_size, _UNITS, "--max_size", "500M or 2G")
    removed = to_prune(summaries(cache), older, size, args.all)
    side_bytes = num_side_bytes(cache) if args.all else 0
    for each in removed if not args.dry_run else ():
        each.path.unlink(missing_ok=True)
    if not args.dry_run:
        clear_unfinished(cache)
    if args.all and not args.dry_run:
        clear_side_files(cache)
    if args.json:
        facts = {"removed": [_facts(each) for each in removed], "side_bytes": side_bytes, "dry_run": args.dry_run}
        print(json.dumps(facts))
    else:
        verb = "would be removed" if args.dry_run else "removed"
        print(f"{_total(removed, side_bytes)} {verb}")
    return 0


def _export(cache: CompileCache, args: argparse.Namespace) -> int:
    from torchweave.compiler.cache.maintenance import export, find, summaries

    file, keys = _file(args)
    try:
        count = export(cache, file, find(cache, keys) if keys else summaries(cache))
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror}") from error
    print(json.dumps({"exported": count}) if args.json else f"{count} entries written to {file}")
    return 0


def _import(cache: CompileCache, args: argparse.Namespace) -> int:
    from torchweave.compiler.cache.maintenance import import_archive

    file, _ = _file(args)
    if not file.is_file():
        raise ValueError(f"there is no file {file}; name a file written by `torchweave cache export`")
    added, faults = import_archive(cache, file)
    if args.json:
        print(json.dumps({"imported": added, "faults": faults}))
    else:
        print("\n".join([*faults, f"{added} new entries in {cache.folder}"]))
    return 1 if faults else 0


def _file(args: argparse.Namespace) -> tuple[Path, list[str]]:
    if not args.names:
        raise ValueError(f"name a file: `torchweave cache {args.action} FILE`")
    return Path(args.names[0]), args.names[1:]


def _facts(each: Summary, whole: bool = False) -> dict[str, Any]:
    facts: dict[str, Any] = {"key": each.key, "bytes": each.num_bytes, "used": each.used, "what": _describe(each)}
    if whole and each.entry is not None:
        facts |= {name: value for name, value in asdict(each.entry).items() if name in ("kind", "factors", "facts")}
    return facts | ({"fault": each.fault} if each.fault else {})


def _describe(each: Summary) -> str:
    """An entry's kind, name and device."""
    if each.entry is None:
        return f"damaged: {each.fault}"
    factors = each.entry.factors
    name = factors.get("module") or f"{str(factors.get('piece', ''))[:12]}"
    return f"{each.entry.kind:<6} {name}, {factors.get('device', '?')}, torch {factors.get('torch', '?')}"


def _number(text: str, units: dict[str, int], option: str, example: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]?)(?:i?[Bb])?", text.strip())
    unit = match[2] if match is not None else None
    unit = unit if unit in units else (unit or "").upper() if (unit or "").upper() in units else None
    if match is None or unit is None:
        raise ValueError(f"{option}={text!r} is not valid: expected a number with a unit, such as {example}")
    return int(float(match[1]) * units[unit])


def _total(entries: Sequence[Summary], num_side_bytes: int) -> str:
    total = f"{len(entries)} entries, {_size(sum(each.num_bytes for each in entries))}"
    return f"{total}, and {_size(num_side_bytes)} of compiled CPU code and bytecode" if num_side_bytes else total


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB" if num_bytes >= 1 << 20 else f"{num_bytes / (1 << 10):.1f} KiB"


def _age(when: float) -> str:
    seconds = max(time.time() - when, 0)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
