"""The doctor names every problem of the zoo by line and rule, and finds nothing in clean modules."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.doctor import doctor_zoo
from tests.doctor.doctor_zoo import clean, graph_breaks, performance, recompiles, trace_failures
from torchweave.cli import main
from torchweave.doctor.examine import examine
from torchweave.doctor.finding import Finding, deduplicate, without_follow_on
from torchweave.doctor.source_reader import is_library
from torchweave.doctor.subject import InputSpec, find

ZOO = Path(doctor_zoo.__file__).parent
FAMILIES = {
    "trace_failure": trace_failures,
    "graph_break": graph_breaks,
    "recompile": recompiles,
    "performance": performance,
}


def specimens(module: object) -> list[type[nn.Module]]:
    return [
        item
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, nn.Module) and item.__module__ == module.__name__
    ]


def expected(specimen: type[nn.Module]) -> set[tuple[int, str]]:
    """(line, rule) of each `# FIND rule` in the class, or of `# FIND rule (torch 2.11: rule)`, where Dynamo gives less detail."""
    lines, start = inspect.getsourcelines(specimen)
    marks = [(at, re.search(r"# FIND (\w+)(?: \(torch 2\.11: (\w+)\))?", line)) for at, line in enumerate(lines, start)]
    old = torch.__version__.startswith("2.11.")
    return {(at, (old and mark[2]) or mark[1]) for at, mark in marks if mark is not None}


def found(findings: list[Finding]) -> set[tuple[int, str]]:
    return {(int(each.where.rpartition(":")[2] or 0), each.rule) for each in findings}


BROKEN = [(kind, each) for kind, module in FAMILIES.items() for each in specimens(module)]


def test_the_zoo_is_large_and_covers_the_guide() -> None:
    assert len(BROKEN) >= 25
    rules = {rule for _, each in BROKEN for _, rule in expected(each)}
    guide = {
        "missing_fake_kernel", "wrong_fake_kernel", "unrolled_loop", "print", "native_call", "data_dependent_shape", "item",
        "tolist", "custom_object", "data_dependent_control", "data_dependent_size", "zero_one", "changing_number",
        "op_takes_int", "min_max_of_list", "size_branch", "bit_length",
    }  # fmt: skip
    assert guide <= rules
    assert all(expected(each) for _, each in BROKEN)


@pytest.mark.parametrize(("kind", "specimen"), BROKEN, ids=[each.__name__ for _, each in BROKEN])
def test_every_problem_is_found_where_it_is(kind: str, specimen: type[nn.Module]) -> None:
    findings = examine(find(f"{specimen.__module__}:{specimen.__qualname__}"))
    assert found(findings) == expected(specimen)
    assert kind in {each.kind for each in findings}
    for each in findings:
        assert each.where.startswith(str(ZOO)) and len(each.fix) > 10 and "\n" not in each.cause


@pytest.mark.parametrize("specimen", [*specimens(clean), clean.doubled], ids=lambda each: each.__name__)
def test_nothing_is_found_in_a_clean_module(specimen: type[nn.Module]) -> None:
    assert examine(find(f"{clean.__name__}:{specimen.__name__}")) == []


def test_a_branch_in_a_function_that_forward_calls_is_named_by_its_line() -> None:
    function = recompiles.scaled_where_long
    findings = examine(find(f"{recompiles.__name__}:{function.__name__}", {"x": "float32[T,16]"}))
    assert found(findings) == {(function.__code__.co_firstlineno + 1, "size_branch")}


def test_command_prints_findings_and_sets_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{ZOO / 'graph_breaks.py'}:SliceByData"
    assert main.main(["doctor", name]) == 1
    text = capsys.readouterr().out
    assert "graph_breaks.py:" in text and "fix: " in text and "2 errors" in text
    assert main.main(["doctor", name, "--json"]) == 1
    read = json.loads(capsys.readouterr().out)
    assert {each["rule"] for each in read["findings"]} == {"item", "data_dependent_size"}
    assert main.main(["doctor", f"{clean.__name__}:FeedForward"]) == 0
    assert "no findings" in capsys.readouterr().out
    assert main.main(["doctor", f"{performance.__name__}:LinearsThatDoNotMerge"]) == 0, (
        "notes are no findings to act on"
    )


def test_last_line_repeats_the_subject_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import torch\nclass M(torch.nn.Identity):\n    doctor_inputs = {'input': 'float32[T]'}\n"
    (tmp_path / "short.py").write_text(text)
    assert main.main(["doctor", f"{tmp_path / 'short.py'}:M"]) == 0
    assert "short.py:M: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([f"{ZOO / 'nothing.py'}:A"], "there is no file"),
        (["no_such_package_here:A"], "cannot be imported"),
        ([f"{clean.__name__}:Nothing"], "has no Nothing"),
        ([f"{clean.__name__}:X"], "is of type dict; name a function"),
        (["torch.nn:Identity"], "give --input"),
        (["torch.nn:Linear", "--input", "x=float32[T,4]"], "cannot be made without arguments"),
        (["torch.nn:Identity", "--input", "input=floaty[T]"], "describes no input"),
        (["torch.nn:Identity", "--input", "input"], "must be NAME=SPEC"),
        (["torch.nn:Flatten", "--input", "input=float32[T]"], "raises on its inputs"),
        (["demo", "--input", "x=float32[T]"], "--input applies to module:function"),
    ],
)
def test_invalid_subject_gives_a_one_line_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


_ODD = """
import torch
class Fails(torch.nn.Module):
    def __init__(self):
        raise RuntimeError("no such device")
def listed(x): return x
listed.doctor_inputs = ["x"]
def counted(x): return x
counted.doctor_inputs = {"x": 3}
def whole(x): return x
"""


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("import sys; sys.exit(3)", ["whole"], "cannot be imported (SystemExit: 3)"),
        ("raise ValueError('no')", ["whole"], "cannot be imported (ValueError: no)"),
        (_ODD, ["Fails", "--input", "x=float32[T]"], "cannot be made (RuntimeError: no such device)"),
        (_ODD, ["listed"], "doctor_inputs of"),
        (_ODD, ["counted"], "doctor_inputs of"),
        (_ODD, ["whole", "--input", "x=arange[]"], "arange counts along one size"),
        (_ODD, ["whole", "--input", "x=int64[T]<0"], "no value is below 0"),
        (_ODD, ["whole", "--input", "x=int64[T]<N"], "x is to be below N, which is no size of an input"),
        (_ODD, ["whole", "--input", "class=float32[T]"], "an input cannot be called 'class' here"),
        (_ODD, ["whole", "--input", "self=float32[T]"], "an input cannot be called 'self' here"),
    ],
)
def test_unusable_module_gives_a_one_line_error(
    text: str, arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.py").write_text(text)
    assert main.main(["doctor", f"{tmp_path / 'odd.py'}:{arguments[0]}", *arguments[1:]]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_inputs_are_read_from_text() -> None:
    assert InputSpec.parse("int64[T, 4]<1000") == InputSpec("int64", ("T", 4), 1000)
    assert InputSpec.parse("arange[T]") == InputSpec("arange", ("T",))
    assert not InputSpec.parse("ints").is_tensor


def test_findings_are_merged_by_line_and_sorted_by_severity() -> None:
    note = Finding("performance", "near_miss", "a.py:9", "c", "f", "note")
    first = Finding("graph_break", "item", "a.py:12", "c", "f")
    follows = Finding("recompile", "data_dependent_size", "a.py:12", "c", "f")
    early = Finding("graph_break", "print", "a.py:3", "c", "f")
    assert deduplicate([note, first, follows, early, early]) == [early, first, note]


def test_findings_in_libraries_are_left_out_behind_a_break_of_the_subject() -> None:
    own = Finding("graph_break", "item", "/home/me/model.py:12", "c", "f")
    slow = Finding("performance", "near_miss", "/venv/site-packages/lib/a.py:9", "c", "f", "note")
    follows = Finding("recompile", "changing_number", "/venv/site-packages/lib/a.py:3", "c", "f")
    assert without_follow_on([own, slow, follows], is_library) == [own, slow]
    assert without_follow_on([slow, follows], is_library) == [slow, follows]


def test_a_break_inside_a_model_of_transformers_is_the_only_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "noisy.py").write_text(
        "import torch\n"
        "from transformers import LlamaConfig, LlamaModel\n"
        "class Branch(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * 2 if x.sum() > 0 else x\n"
        "class Noisy(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)\n"
        "        self.model = LlamaModel(LlamaConfig(num_key_value_heads=2, vocab_size=50, **sizes))\n"
        "        self.model.layers[0].mlp = Branch()\n"
        "    def forward(self, ids):\n"
        "        return self.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]\n"
    )
    assert main.main(["doctor", f"{tmp_path / 'noisy.py'}:Noisy", "--input", "ids=int64[T]<50", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["where"].endswith("noisy.py:5") and finding["rule"] == "data_dependent_control"


SEED_MODULE = """import torch

class TestCase(torch.nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x, data):
        y = x ** 2
        if torch.sum(data) >= 4:
            t = y
        else:
            t = y / 2
        t = t + 10
        return t

test_case = TestCase()
test_case = torch.compile(test_case, backend="eager")
x = torch.randn(5)
data = torch.ones(2, dtype=torch.int32)
data[0] = 2
data[1] = 2
test_case(x, data)
"""
"""TensorRT-LLM's example of data-dependent control flow, which compiles and calls itself when it is imported."""


@pytest.mark.parametrize("target", ["TestCase", "test_case"])
def test_data_dependent_control_flow_of_a_file_is_one_finding(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "graph_break.py"
    file.write_text(SEED_MODULE)
    subject = f"{file}:{target}"
    assert main.main(["doctor", subject, "--input", "x=float32[T]", "--input", "data=int32[2]"]) == 1
    said = capsys.readouterr().out
    assert re.search(
        r"^error +\S*graph_break\.py:9\n +the branch depends on a tensor's values  \[graph_break: data_dep", said
    )
    assert said.endswith(f"{subject}: 1 error\n")
