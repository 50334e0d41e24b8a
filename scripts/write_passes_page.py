"""Write docs/passes.md: every pass of the stack, from its own docstring and from the measurements that are committed.

python scripts/write_passes_page.py [--output docs/passes.md]

Measurements are read where they are kept: `bench/results/passes_*.json`, what a whole engine gains by each pass (bench/passes.py);
`fusions_*.json`, the operations of a pattern alone (bench/fusions.py); `rank_passes_*.json`, `collectives-*.json`, layers and sums
over several GPUs (bench/rank_passes.py, bench/collectives.py); `reinplace_*.json` (bench/reinplace.py); and the tables that the
package ships (bench/linear.py, the tuner), whose entries name a pass, or the op that it puts in, as `subject`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchweave.compiler.passes.base import Pass, document
from torchweave.compiler.passes.manager import default_passes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
TABLES = ROOT / "torchweave" / "compiler" / "tuning" / "tables"

OPS = {"small_linears": "linear"}
"""The op that a pass puts in, where tables name that."""
SUMS = {
    "all_reduce_norm": ("nccl + norm", "norm in one"),
    "all_reduce_norm_fp8": ("nccl + norm fp8", "norm fp8 in one"),
    "all_reduce_norm_fp4": ("nccl + norm fp4", "norm fp4 in one"),
    "userbuffers_prologue": ("norm in one", "norm in one, user buffer"),
}
"""What bench/collectives.py calls the ways without and with a pass."""

HEAD = """# Passes

Written by `scripts/write_passes_page.py` from the passes' docstrings and from `bench/results`; change those.

A pass is a named rewrite of the graph. Those of the *Torch IR* stage run once over the whole captured graph, where weights and
their layout can still be changed. Those of the *ATen* stage run over each distinct piece after it was lowered to functional ATen; a
piece in which nothing matches is built from Torch IR as it was. `exact` passes keep every rounding of the model (the order of a
sum is free, as it is in a BLAS); `tolerance` passes leave one out or add one, within the bound that they state, and run with
`pass_numerics=tolerance`. `torchweave explain MODEL` prints the list with what each pass matched, what it nearly matched and
why not, and how long it took.

    -cc.disabled_passes=small_linears    leaves a pass out
    -cc.enabled_passes=NAME              runs one although nothing says that it pays, or that it is exact
    -cc.passes=my_passes:SCALE_ONCE      adds one of your own behind the stack's
"""

OWN = """
## A pass of your own

A fusion is a pattern and a replacement, both plain functions. The pattern is written in explicit `aten` or `torchweave` ops, and
its annotations say what its parameters may stand for; every other argument must be in the graph as it stands in the pattern. The
replacement is any torch code. What nearly matches is reported with its reason.

```python
import torch
from torch import Tensor

import torchweave
from torchweave.compiler import Fusion, default_passes

aten = torch.ops.aten


def twice(x: Tensor, a: float, b: float):
    return aten.mul.Tensor(aten.mul.Tensor(x, a), b)


def once(x: Tensor, a: float, b: float):
    return x * (a * b)


SCALE_ONCE = Fusion("scale_once", twice, once, numerics="tolerance")


class Scaled(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * 4.0 + 1


config = torchweave.TorchCompileConfig(pass_numerics="tolerance")
compiled = torchweave.compile(
    Scaled(), {"x": torch.zeros(5)}, {"x": {0: "T"}}, config, passes=[*default_passes(), SCALE_ONCE]
)
x = torch.randn(7)
torch.testing.assert_close(compiled(x), Scaled()(x))
(event,) = (event for event in compiled.compiled_graph.report.select("pass") if event["name"] == "scale_once")
assert event["matches"] == 1
```

In an importable module, the config names it: `passes: ["my_passes:SCALE_ONCE"]`. What is no pattern is a class with a name and a
method: derive it from `torchweave.compiler.GraphPass`. A pass that leaves other inputs or outputs of the graph, or writes to an
input that it did not write to, is refused by its name. Test it alone, on five lines, as the stack's own passes are:

```python
import torch
from torch import Tensor

from torchweave.compiler import Fusion
from torchweave.compiler.passes.testing import T, check

aten = torch.ops.aten


def square(x: Tensor):
    return aten.mul.Tensor(x, x)


FUSION = Fusion("square", square, lambda x: torch.square(x))
check(FUSION, lambda x: torch.exp(x * x), [torch.randn(T, 8)], matches=1)
check(FUSION, lambda x: torch.exp(x * 2), [torch.randn(T, 8)], near_miss="argument other of mul is 2, not input_0")
```

`check` builds the graph with a symbolic token count, runs the pass, compares results at several token counts, and runs
`torch.library.opcheck` on the ops that the pass put in.
"""


def page() -> str:
    """The page as Markdown."""
    passes = default_passes()
    lines = [HEAD, "| | pass | stage | numerics | pays at | runs |", "|---|---|---|---|---|---|"]
    lines += [f"| {index} | [`{each.name}`](#{each.name}) | {_stage(each)} | {each.numerics} | {_tokens(each)} | {_runs(each)} |"
              for index, each in enumerate(passes)]  # fmt: skip
    for each in passes:
        lines += ["", *_section(each)]
    return "\n".join(lines) + "\n" + OWN


def _stage(each: Pass) -> str:
    return {"torch_ir": "Torch IR", "aten": "ATen"}[each.stage]


def _tokens(each: Pass) -> str:
    low, high = each.token_range
    if low is None and high is None:
        return "every T"
    return f"T >= {low}" if high is None else f"T <= {high}" if low in (None, 1) else f"{low} <= T <= {high}"


def _runs(each: Pass) -> str:
    when = "where measured" if each.gated else "always"
    needs = getattr(each, "needs", ())
    when += " with userbuffers" if "userbuffers" in needs else " over several ranks" if "ranks" in needs else ""
    when = when.removeprefix("always ")
    return when if len(each.builds) == 2 else f"{when}, {each.builds[0]} builds"


def _section(each: Pass) -> list[str]:
    """A pass: its first sentence, the graph before and after, then each paragraph that begins with a word of its own."""
    title, *blocks = re.split(r"\n\s*\n", document(each).strip())
    lines = [f"## `{each.name}`", "", " ".join(title.split())]
    for block in blocks:
        fields = re.split(r"^(?=[A-Z][a-z]+ {2,})", block, flags=re.MULTILINE)
        if block.startswith("Before"):
            lines += ["", "```", block, "```"]
        elif len(fields) > 1:
            lines += ["", *(_field(text) for text in fields if text.strip())]
        else:
            lines += ["", " ".join(block.split())]
    return lines + _measured(each)


def _field(text: str) -> str:
    name, _, rest = text.partition(" ")
    return f"- **{name}**: {' '.join(rest.split())}"


def _measured(each: Pass) -> list[str]:
    """A table of measurements: one row for each thing that was measured, the token counts side by side."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in (
        *_results(each),
        *_fusions(each),
        *_ranks(each),
        *_collectives(each),
        *_reinplace(each),
        *_tables(each),
    ):
        groups.setdefault((row.what, row.source), []).append(row)
    if not groups:
        return ["", "Measured: not yet."]
    lines = ["", "| measured | tokens | without, us | with, us | source |", "|---|---|---|---|---|"]
    for (what, source), rows in groups.items():
        columns = zip(*((str(row.tokens), f"{row.without:.2f}", f"{row.best:.2f}") for row in rows), strict=True)
        lines.append(f"| {what} | {' | '.join(' / '.join(column) for column in columns)} | {source} |")
    return lines


class Row(NamedTuple):
    """Microseconds without and with a pass, at one token count."""

    what: str
    source: str
    tokens: int
    without: float
    best: float


def _read(folder: Path, pattern: str = "*.json") -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(folder.glob(pattern)):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            yield f"[{path.stem}](../{path.relative_to(ROOT).as_posix()})", content


def _results(each: Pass) -> Iterator[Row]:
    """What bench/passes.py measured: a token of a whole engine, by default and without the pass."""
    for source, result in _read(RESULTS, "passes_*.json"):
        engines, model = result["results"], result["environment"]["model"].removeprefix("shape:")
        for batch, without in engines.get(f"without {each.name}", {"ms": {}})["ms"].items():
            best = engines["as by default"]["ms"][batch]
            yield Row(f"{model}, a token", source, int(batch), 1000 * without, 1000 * best)


def _fusions(each: Pass) -> Iterator[Row]:
    """What bench/fusions.py measured: what Inductor makes of the operations, and the op that the pass puts in within its code."""
    for source, result in _read(RESULTS, "fusions_*.json"):
        times = {
            (row["model"], row["fusion"], row["tokens"], row["build"]): row["microseconds"] for row in result["results"]
        }
        for (model, fusion, tokens, build), microseconds in times.items():
            name, _, form = fusion.partition(", ")
            if name == each.name and build == "inductor kept":
                what = f"the operations alone{form and f' with {form}'}, {model}, {result['gpu']}"
                yield Row(what, source, tokens, times[model, fusion, tokens, "inductor"], microseconds)


def _collectives(each: Pass) -> Iterator[Row]:
    """What bench/collectives.py measured: the sum by NCCL and what follows it, and both in one launch."""
    before, after = SUMS.get(each.name, ("", ""))
    for source, result in _read(RESULTS, "collectives-*.json"):
        for width in sorted({row["width"] for row in result["results"]}):
            mine = [row for row in result["results"] if row["width"] == width]
            times = {(row["rows"], row["way"]): row["microseconds"] for row in mine}
            for rows in (1, 8, 32, 128, 512):
                if (rows, before) in times and (rows, after) in times:
                    what = f"a sum of T x {width}: {before} / {after}, {result['gpu']}"
                    yield Row(what, source, rows, times[rows, before], times[rows, after])


def _ranks(each: Pass) -> Iterator[Row]:
    """What bench/rank_passes.py measured: a layer with a pass, and the form that comes before it."""
    before = {"fused": "apart", "userbuffers_prologue": "fused"}
    name = "fused" if each.name == "all_reduce_norm" else each.name
    for source, result in _read(RESULTS, "rank_passes_*.json"):
        for row in result["results"] if name in result["results"][0] else ():
            what = f"a layer of {result['shape']}, {result['gpu']}"
            yield Row(what, source, row["tokens"], row[before.get(name, "userbuffers_prologue")], row[name])


def _reinplace(each: Pass) -> Iterator[Row]:
    """What bench/reinplace.py measured: a graph with two ops that write into one tensor."""
    for source, result in _read(RESULTS, "reinplace_*.json") if each.name == "reinplace" else ():
        for row in result["results"]:
            what = f"two ops that write into one T x {result['width']}, {result['device']}"
            yield Row(what, source, row["tokens"], row["without"], row["with"])


def _tables(each: Pass) -> Iterator[Row]:
    for source, table in _read(TABLES):
        for entry in table["entries"]:
            if entry["subject"] in (each.name, OPS.get(each.name)) and entry["choice"]:
                yield Row(entry["shape"], source, entry["tokens"], entry["baseline"], entry["microseconds"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "passes.md")
    output = parser.parse_args(argv).output
    output.write_text(page(), encoding="utf-8")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
