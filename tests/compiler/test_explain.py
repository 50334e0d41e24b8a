"""`explain --json` follows its schema, and the page is one file that shows the events."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

import torchweave
from tests.compiler.toy import BOUNDARY, DYNAMIC, example, toy
from tests.doctor.doctor_zoo.performance import LinearsThatDoNotMerge
from torchweave.compiler import Fusion, compile_graph
from torchweave.compiler.cache.store import CompileCache
from torchweave.compiler.explain.facts import Facts, as_json, explain, schema
from torchweave.compiler.explain.page import _repeat, page, seconds_text, size_text
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

aten = torch.ops.aten
FX = TorchCompileConfig(enable_inductor=False, compile_cache=False)


def valid(facts: Facts) -> Facts:
    read = json.loads(as_json(facts))
    jsonschema.Draft202012Validator(schema()).validate(read)
    return read


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A toy decoder of five layers with a cache, and events that need a GPU, a tuner or a fallback."""
    report = Report(show=False)
    cache = CompileCache(tmp_path_factory.mktemp("cache"), report)
    with report.stage("compilation"):
        compile_graph(toy(layers=5), example(), DYNAMIC, boundary_ops=BOUNDARY, config=FX, cache=cache, report=report)
    piece = report.select("piece")[1]["hash"]
    measured = {"shape": "64x64", "choice": "row", "microseconds": 5.0, "baseline": 9.0}
    for tokens in (1, 8):
        report.event("tuned", subject="merge_linears", tokens=tokens, **measured)
    for size in (2, 1):
        report.event("graph", step="decode", kind="whole", key=size, segments=1, bytes=size << 20, seconds=0.1)
    spans = [
        {"stream": 0, "start": 0.0, "end": 4.0, "nodes": ["a", "b"]},
        {"stream": 1, "start": 1.0, "end": 3.0, "nodes": ["c"]},
    ]
    report.event("streams", piece=piece, lanes=spans, serial=6.0, makespan=4.0, kept=True, why="predicted")
    report.event("fallback", what="something <b>bold</b>", why="a reason & more")
    report.event("memory", total=80 << 30, in_use=1, activations=2 << 30, graphs_expected=3)
    return report


def test_explain_has_every_section_and_follows_the_schema(report: Report) -> None:
    facts = valid(explain(None, report))
    (merged,) = [row for row in facts["passes"] if row["name"] == "merge_linears"]
    assert merged["matches"] == 10 and merged["ops_after"] != merged["ops_before"] > 0
    assert [(each["tokens"], each["saved"]) for each in merged["microseconds"]] == [(1, 4.0), (8, 4.0)]
    assert [piece["shared_by"] for piece in facts["pieces"]] == [1, 4, 1]
    assert [part.get("boundary") for part in facts["parts"]] == [None, *["toy::attention", None] * 5]
    assert facts["cache"]["misses"] == 1 and facts["cache"]["entries"][0]["factors"]["torch"] == torch.__version__
    assert facts["graphs"] and facts["streams"] and facts["fallbacks"] and facts["stages"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 2),
        (("passes", 0, "matches"), -1),
        (("parts", 0), {"piece": "a", "boundary": "b"}),
        (("extra",), 1),
    ],
)
def test_schema_violations_are_rejected(report: Report, path: tuple, value: Any) -> None:
    facts = json.loads(as_json(explain(None, report)))
    place = facts
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema()).validate(facts)


def test_a_near_miss_is_named_where_a_module_does_not_fuse() -> None:
    report = Report(show=False)
    torchweave.compile(LinearsThatDoNotMerge().eval(), {"x": torch.ones(3, 16)}, {"x": {0: "T"}}, FX, report)
    (row,) = [row for row in valid(explain(None, report))["passes"] if row["name"] == "merge_linears"]
    assert row["matches"] == 0 and any("bias" in miss for miss in row["near_misses"])
    assert row["near_misses"][0] in page(explain(None, report)).replace("&#39;", "'")


def _silu(x: Tensor):
    return aten.silu.default(x)


def _spelled_out(x: Tensor):
    return aten.mul.Tensor(x, aten.sigmoid.default(x))


def _add(x: Tensor, y: Tensor):
    return aten.add.Tensor(x, y)


def test_matches_are_those_of_the_model_whatever_the_number_of_variants() -> None:
    report = Report(show=False)
    everywhere = Fusion("everywhere", _silu, _spelled_out)
    small = Fusion("small", _add, lambda x, y: aten.add.Tensor(y, x), token_range=(None, 8))
    config = TorchCompileConfig(enable_inductor=False, compile_cache=False)
    compile_graph(
        toy(layers=3),
        example(),
        DYNAMIC,
        boundary_ops=BOUNDARY,
        config=config,
        report=report,
        passes=[everywhere, small],
    )
    events = [event for event in report.select("pass") if event["name"] == "everywhere" and event["matches"]]
    assert len(events) == 4, "two distinct pieces with two variants each"
    row, _ = explain(None, report)["passes"]
    assert row["matches"] == 3 and row["diff"] == {
        "aten.silu.default": -3,
        "aten.sigmoid.default": 3,
        "aten.mul.Tensor": 3,
    }
    assert len([run for run in row["runs"] if run["matches"]]) == 4


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        self.links += [value for name in ("src", "href") if (value := facts.get(name))]
        self.ids |= {value for value in [facts.get("id")] if value}
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_one_valid_file_without_network_access(report: Report) -> None:
    text = page(explain(None, report))
    read = _Text()
    read.feed(text)
    assert not read.open, "a tag was left open"
    assert all(link.startswith("#") and link[1:] in read.ids for link in read.links)
    assert not re.search(r"https?://|@import|url\(|<script", text)
    assert "prefers-color-scheme: dark" in text and "max-width: 640px" in text
    pieces = report.select("piece")
    assert pieces and all(piece["hash"] in text for piece in pieces)
    assert "4 &times;" in text, "repeated layers are folded"
    assert "something &lt;b&gt;bold&lt;/b&gt;" in text and "saves 4.0 us at T = 1" in text


def test_page_of_an_empty_report() -> None:
    text = page(valid(explain(None, Report(show=False))))
    assert "Nothing was captured" in text and "No pass ran" in text


def test_the_dump_folder_holds_the_page_and_the_data(tmp_path: Path) -> None:
    config = TorchCompileConfig(enable_inductor=False, compile_cache=False, dump_dir=str(tmp_path))
    torchweave.compile(torch.nn.Linear(4, 8), {"input": torch.ones(3, 4)}, {"input": {0: "T"}}, config)
    jsonschema.Draft202012Validator(schema()).validate(json.loads((tmp_path / "explain.json").read_text()))
    assert "<!doctype html>" in (tmp_path / "report.html").read_text()


def test_repetitions_are_folded_and_numbers_are_short() -> None:
    assert _repeat(list("abababc"), 0) == (2, 3)
    assert _repeat(list("abc"), 0) == (1, 1)
    assert _repeat(list("aab"), 0) == (1, 2)
    assert (size_text(3 << 29), size_text(2048), size_text(7)) == ("1.50 GiB", "2.0 KiB", "7 B")
    assert (seconds_text(1.234), seconds_text(0.0012)) == ("1.23 s", "1.2 ms")
