"""The dump folder: its files, and that artifacts are only generated for a listener."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest
import torch

import torchweave
from tests.compiler.toy import DYNAMIC, example, toy
from torchweave.compiler.cache.store import CompileCache
from torchweave.compiler.dump import open_dump
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_dump_dir_holds_graphs_around_passes_and_the_code_of_pieces(tmp_path: Path) -> None:
    config = TorchCompileConfig(compile_cache=False, dump_dir=str(tmp_path / "dump"))
    report = Report(show=False)
    torchweave.compile(toy(layers=1), example(), DYNAMIC, config, report)
    folder = tmp_path / "dump"
    for event in report.select("piece"):
        fx = (folder / "pieces" / event["hash"] / "fx.py").read_text()
        assert "def forward(self" in fx and ': "f32[s' in fx  # with shapes
        assert "async_compile" in (folder / "pieces" / event["hash"] / "inductor.py").read_text()
    before, after = (folder / "passes" / "01-merge_linears" / f"{name}.py" for name in ("before", "after"))
    assert before.read_text().count("torch._C._nn.linear") > after.read_text().count("torch._C._nn.linear") > 0
    assert "LOAD_" in (folder / "dynamo" / "transformed_code.txt").read_text()
    assert_graph_and_code(folder)
    timeline = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
    assert [event["event"] for event in timeline] == [event["event"] for event in report.events()]
    assert {"capture", "pass", "piece", "stage"} <= {event["event"] for event in timeline}


def assert_graph_and_code(folder: Path) -> None:
    graph, code = (folder / "computation_graph.py").read_text(), (folder / "transformed_code.py").read_text()
    for text in (graph, code):
        ast.parse(text)
    calls = graph.partition("\n\n")[0].splitlines()[1:]
    assert calls and all("piece_" in call for call in calls)
    assert ': "f32[s' in graph and "def forward(boundary" in code


def test_a_second_dump_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    config = TorchCompileConfig(enable_inductor=False, compile_cache=False, dump_dir=str(tmp_path))
    (tmp_path / "mine.txt").write_text("kept")
    torchweave.compile(torch.nn.Linear(4, 8), {"input": torch.ones(3, 4)}, {"input": {0: "T"}}, config)
    first = files(tmp_path)
    torchweave.compile(torch.nn.Linear(4, 16), {"input": torch.ones(3, 4)}, {"input": {0: "T"}}, config)
    assert "mine.txt" in files(tmp_path)
    assert len({name.split("/")[1] for name in files(tmp_path) if name.startswith("pieces/")}) == 1
    assert files(tmp_path) != first


def test_a_piece_from_the_cache_is_dumped_with_its_code(tmp_path: Path) -> None:
    from torchweave.compiler import compile_graph

    for start in ("cold", "warm"):
        report, texts = Report(show=False), {}
        report.keep(texts.__setitem__)
        compile_graph(
            torch.nn.Linear(4, 8),
            {"input": torch.ones(3, 4)},
            {"input": {0: "T"}},
            cache=CompileCache(tmp_path / "cache", report),
            report=report,
        )
        (piece,) = report.select("piece")
        assert piece["built"] == ("inductor" if start == "cold" else "cache")
        assert "def call" in texts[f"pieces/{piece['hash']}/inductor.py"]
        assert f"piece_{piece['hash']}(" in texts["computation_graph.py"]
        assert f"piece_{piece['hash']}(" in texts["transformed_code.py"]


def test_artifacts_are_generated_for_a_listener_only() -> None:
    report, made = Report(show=False), []
    report.artifact("a.txt", lambda: made.append("a") or "a")
    texts: dict[str, str] = {}
    report.keep(texts.__setitem__)
    report.artifact("b.txt", lambda: made.append("b") or "b")
    report.artifact("c.txt", lambda: str(1 / 0))
    assert made == ["b"] and texts["b.txt"] == "b"
    assert "ZeroDivisionError" in texts["c.txt"]


def test_unwritable_folder_ends_the_dump_only(tmp_path: Path) -> None:
    report = Report(show=False)
    folder = open_dump(TorchCompileConfig(dump_dir=str(tmp_path / "dump")), report)
    assert folder is not None
    shutil.rmtree(folder)
    folder.write_text("")
    report.event("plan")
    report.artifact("passes/a.py", "a")
    report.event("piece")
    assert ["stopped writing" in each["why"] for each in report.select("warning")] == [True]
    assert len(report.select("piece")) == 1


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"dump_dir=.*name another folder"):
        open_dump(TorchCompileConfig(dump_dir=str(tmp_path / "file" / "below")), Report(show=False))
