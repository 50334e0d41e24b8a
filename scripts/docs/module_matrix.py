"""Compile modules of transformers, timm and torchvision with a dynamic batch, and write the table of docs/reference/modules.md.

    pip install timm torchvision        # of the versions that fit torch; modules of a library that is missing are left out
    python scripts/docs/module_matrix.py --write docs/reference/modules.md                # pieces as FX code
    python scripts/docs/module_matrix.py --inductor --write docs/reference/modules.md     # the column with Inductor

Each module of `module_zoo.py` is compiled by `torchweave.compile` with a dynamic batch, in a process of its own with
a time limit, and called with batches of 1, 2, 3 and 5. Its results are compared with those of the module itself, in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import sys
import time
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from module_zoo import Entry, entries
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import torchweave
from torchweave.compiler.errors import CompileError

BATCHES = (2, 1, 3, 5)
TOLERANCE = 2e-4
"""Largest difference, as a part of the largest magnitude in the result."""
Rows = dict[tuple[str, str], dict[str, str]]
"""Results by family and name, then by mode."""
BEGIN, END = "<!-- modules: begin -->", "<!-- modules: end -->"
_MODES = ("FX", "Inductor")
_PACKAGES = ("torch", "transformers", "timm", "torchvision")


def check(entry: Entry, inductor: bool, seed: int = 0) -> str:
    """Compile a module and compare it: `equal`, or `refused`, `wrong` or `not compared` and why. Other errors are raised."""
    torch.manual_seed(seed)
    with torch.no_grad():
        module, inputs = entry.build()
        module.eval().requires_grad_(False)
        perturb(module)
        example = inputs(4)
        dynamic = {name: {0: "B"} for name in example}
        config = torchweave.TorchCompileConfig(enable_inductor=inductor, compile_cache=False)
        batches = [inputs(batch) for batch in BATCHES]
        if not rows_differ(run(module, batches[0])):
            amplify(module)
        expected = [run(module, batch) for batch in batches]
        if not rows_differ(expected[0]):
            return "not compared: the module's own results do not depend on its inputs"
        try:
            compiled = torchweave.compile(module, example, dynamic, config)
        except CompileError as error:
            return f"refused: {error}"
        for batch, result in zip(batches, expected, strict=True):
            try:
                found = compiled(**batch)
            except ValueError as error:  # a size that the compiled graph does not hold for
                return f"refused: {error}"
            if why := difference(found, result):
                return f"wrong: batch {len(next(iter(batch.values())))}, {why}"
    return "equal"


def perturb(module: nn.Module) -> None:
    """Replace constant weights, such as zero biases and heads, and statistics of batch norms: all must affect the result."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.numel() > 1 and parameter.min() == parameter.max():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0.0, 0.1)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)


def amplify(module: nn.Module) -> None:
    """Scale matrices that are small for their number of inputs, for a signal that vanishes against the biases."""
    for parameter in module.parameters():
        if parameter.dim() > 1 and (scale := float(parameter.std()) * math.sqrt(parameter[0].numel())) < 1:
            parameter.div_(max(scale, 1e-6))


def run(module: nn.Module, inputs: dict[str, Tensor]) -> Any:
    """The module's own result."""
    return module(**{name: tensor.clone() for name, tensor in inputs.items()})


def rows_differ(result: Any) -> bool:
    """Whether the rows of some tensor in the result differ: otherwise a comparison shows nothing."""
    for tensor in tensors_of(result):
        if tensor.dim() > 1 and len(tensor) == BATCHES[0] and tensor.is_floating_point():
            scale = tensor.abs().max()
            if scale.isfinite() and (tensor[0] - tensor[1]).abs().max() > 10 * TOLERANCE * scale:
                return True
    return False


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors of a result, which may be an output class of transformers."""
    return [
        leaf for leaf in tree_flatten(dict(result) if hasattr(result, "keys") else result)[0] if torch.is_tensor(leaf)
    ]


def difference(found: Any, expected: Any) -> str:
    """How a result differs from the expected one; "" if it does not."""
    if type(found) is not type(expected):
        return f"a {type(found).__name__} instead of a {type(expected).__name__}"
    pairs = tensors_of(found), tensors_of(expected)
    if [(each.shape, each.dtype) for each in pairs[0]] != [(each.shape, each.dtype) for each in pairs[1]]:
        return (
            f"shapes {[tuple(each.shape) for each in pairs[0]]} instead of {[tuple(each.shape) for each in pairs[1]]}"
        )
    for one, other in zip(*pairs, strict=True):
        if not other.is_floating_point():
            if not torch.equal(one, other):
                return f"other values of {other.dtype}"
            continue
        finite = other.isfinite()
        if not torch.equal(torch.where(finite, 0, one), torch.where(finite, 0, other)) and not torch.equal(
            one[~finite].nan_to_num(), other[~finite].nan_to_num()
        ):
            return "other infinities or NaN"
        if finite.any():
            relative = float((one - other)[finite].abs().max() / other[finite].abs().max().clamp(min=1e-30))
            if not relative <= TOLERANCE:
                return f"differs by {relative:.1e} of the largest value"
    return ""


def run_alone(entry: Entry, inductor: bool, limit: float) -> tuple[str, float]:
    """`check` in a forked process: its result or `crashed: REASON`, and seconds."""
    context, begin = multiprocessing.get_context("fork"), time.monotonic()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, entry, inductor))
    process.start()
    sender.close()
    try:
        result = receiver.recv() if receiver.poll(limit) else f"crashed: not done after {limit:.0f} s"
    except EOFError:
        process.join()
        result = f"crashed: the process ended with code {process.exitcode}"
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()
    return result, time.monotonic() - begin


def _send_result(sender: Any, entry: Entry, inductor: bool) -> None:
    os.setpgrp()
    try:
        result = check(entry, inductor)
    except Exception as error:
        result = f"crashed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    sender.send(result)
    sender.close()
    sys.stdout.flush()
    os._exit(0)


def preload(known: list[Entry]) -> None:
    """Import before the fork what each module would import again: a module of each library is built, and one compiled."""
    import torch._inductor.compile_fx  # noqa: F401

    for library in {entry.family.partition(",")[0]: entry for entry in known}.values():
        library.build()
    check(known[0], inductor=False)


def read_rows(page: str) -> Rows:
    """The results in a page, by family and name, then by mode."""
    rows: Rows = {}
    for line in page.partition(BEGIN)[2].partition(END)[0].splitlines():
        cells = re.split(r"(?<!\\) ?\| ?", line.strip().strip("|").strip())
        if len(cells) == 5 and cells[2] != _MODES[0] and not cells[0].startswith("-"):
            row = dict(zip(_MODES, cells[2:4], strict=True))
            why = cells[4].replace("\\|", "|")
            rows[cells[0], cells[1].strip("`")] = {
                mode: f"{result}: {why}" if result not in ("equal", "-") else result for mode, result in row.items()
            }
    return rows


def table(rows: Rows) -> str:
    """Totals by family, and a row for each module."""
    kinds = ("equal", "refused", "wrong", "crashed", "not compared")
    families = list(dict.fromkeys(family for family, _ in rows))
    lines = [
        f"| family | modules | {' | '.join(f'{mode}: {kind}' for mode in _MODES for kind in ('run', *kinds))} |",
        f"|---|{'---|' * (1 + 6 * len(_MODES))}",
    ]
    for family in (*families, "all"):
        members = [row for (of, _), row in rows.items() if family in (of, "all")]
        counts = []
        for mode in _MODES:
            found = [row.get(mode, "-").partition(":")[0] for row in members]
            counts += [sum(each != "-" for each in found), *(found.count(kind) for kind in kinds)]
        lines.append(f"| {family} | {len(members)} | {' | '.join(map(str, counts))} |")
    lines += ["", f"| family | module | {' | '.join(_MODES)} | why |", "|---|---|---|---|---|"]
    for (family, name), row in rows.items():
        found = [row.get(mode, "-").partition(": ") for mode in _MODES]
        why = next((sentence for _, _, sentence in found if sentence), "").replace("|", "\\|")
        lines.append(f"| {family} | `{name}` | {' | '.join(kind for kind, _, _ in found)} | {why} |")
    return "\n".join(lines)


def without_folders(text: str) -> str:
    """A sentence with source files named from their package on."""
    return re.sub(r"\S*/site-packages/", "", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="run these modules; keep other rows of the page")
    parser.add_argument("--inductor", action="store_true", help="compile pieces with Inductor, not as FX code")
    parser.add_argument("--limit", type=float, default=240, metavar="SECONDS", help="time limit of a module")
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no module after this time"
    )
    parser.add_argument("--missing", action="store_true", help="skip modules that the page has a result of")
    parser.add_argument("--write", metavar="FILE", type=Path, help="replace the tables in this page")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    mode, begin = _MODES[args.inductor], time.monotonic()
    known = [entry for entry in entries() if find_spec(entry.family.partition(",")[0]) is not None]
    page = args.write.read_text(encoding="utf-8") if args.write is not None else ""
    rows = read_rows(page)
    preload(known)
    for entry in known:
        if (args.names and entry.name not in args.names) or time.monotonic() - begin > args.budget:
            continue
        row = rows.setdefault((entry.family, entry.name), {})
        if args.missing and row.get(mode, "-") != "-":
            continue
        result, seconds = run_alone(entry, args.inductor, args.limit)
        row[mode] = without_folders(result)
        print(json.dumps([entry.family, entry.name, mode, row[mode], round(seconds, 1)]), flush=True)
        if args.write is not None:
            args.write.write_text(replace_tables(page, rows), encoding="utf-8")


def replace_tables(page: str, rows: Rows) -> str:
    """The page with these results, in the order of the entries, and the versions of the libraries."""
    order = [(entry.family, entry.name) for entry in entries()]
    ordered = {key: rows[key] for key in order if key in rows}
    versions = ", ".join(f"{package} {version(package)}" for package in _PACKAGES if find_spec(package) is not None)
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    return f"{before}{BEGIN}\n{versions}.\n\n{table(ordered)}\n{END}{after}"


if __name__ == "__main__":
    main()
