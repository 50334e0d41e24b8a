"""Checks of the code style and the generated pages; tests/test_docs.py checks the others."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from torchweave import plug_points
from torchweave.utils.registry import Registry

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchweave"
SOURCES = sorted(PACKAGE.rglob("*.py"))
CODE = [path for folder in ("torchweave", "bench", "scripts") for path in (ROOT / folder).rglob("*.py")]
PAGES = [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_LINES, MAX_FUNCTION_LINES = 600, 60
MAX_MODULES = 14  # of a folder, besides __init__.py
MAX_KERNEL_LINES = 90  # a kernel shares no locals with a helper: splitting one costs registers


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def script(path: str) -> ModuleType:
    name = path.rpartition("/")[2]
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{path}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_imports_go_one_way():
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports_command as run; sys.exit(run())"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_and_functions_are_short():
    long_files = [name_of(path) for path in SOURCES if len(path.read_text().splitlines()) > MAX_LINES]
    long_functions = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= _limit(path) + _docstring_lines(node)
    ]
    assert not long_files and not long_functions


def test_folders_of_code_are_not_crowded():
    counts = Counter(path.parent for path in CODE if path.name != "__init__.py")
    assert len(counts) >= 40
    crowded = {name_of(folder): count for folder, count in counts.items() if count > MAX_MODULES}
    assert not crowded, "group them into sub-folders by subject"


def _limit(path: Path) -> int:
    return MAX_KERNEL_LINES if "kernels" in path.parts else MAX_FUNCTION_LINES


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return len((ast.get_docstring(node) or "").splitlines())


def test_only_the_config_reads_the_environment():
    reads = re.compile(r"os\.(environ|getenv)")
    found = [
        f"{name_of(path)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if reads.search(line) and path != PACKAGE / "config" / "options.py"
    ]
    assert not found


_NAMED = re.compile(r"torchweave(?:\.[a-z_]\w*)+(?::\w+)?")
_OTHER_NAMES = {
    "torchweave.request_id",
    "torchweave.warnings",
    "torchweave.send",
    "torchweave.relayed",
}  # keys of ASGI scopes and state


def _named_in_strings(path: Path) -> set[str]:
    """Texts of a file that are nothing but the name of a module, or of something in it; op names have `::`."""
    tree = ast.parse(path.read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text for text in texts if _NAMED.fullmatch(text)} - _OTHER_NAMES - _entry_point_groups(tree)


def _entry_point_groups(tree: ast.AST) -> set[str]:
    """The groups of registries: second arguments of `Registry`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    arguments = [call.args[1] for call in calls if call.func.id == "Registry" and len(call.args) > 1]  # type: ignore[attr-defined]
    return {node.value for node in arguments if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_strings_that_name_modules_resolve():
    """Entry points and lazy exports are strings, which neither pyright nor an import reads: a renamed module must fail here."""
    names = {name for path in SOURCES for name in _named_in_strings(path)} - {each.group for each in registries()}
    assert len(names) >= 6
    for name in sorted(names):
        path, _, attribute = name.partition(":")
        module = importlib.import_module(path)
        assert not attribute or callable(getattr(module, attribute)), name


def registries() -> list[Registry]:
    return [each for each in vars(plug_points).values() if isinstance(each, Registry)]


@pytest.mark.parametrize("registry", registries(), ids=lambda registry: registry.kind)
def test_own_entries_of_plug_points_are_what_their_registry_holds(registry: Registry):
    for name in registry.names(packages=()):
        assert registry.get(name) is not None
    page = (ROOT / "docs" / "how-to" / "write-a-plugin.md").read_text()
    assert f"`{registry.group}`" in page


def test_lazy_exports_resolve():
    import torchweave
    import torchweave.compiler as compiler

    for package, names in ((torchweave, torchweave.__all__), (compiler, compiler.LAZY_EXPORTS)):
        assert names
        for name in names:
            assert getattr(package, name) is not None, name
            assert name in dir(package), f"{name} is not completed in a Python shell"


def test_importing_the_package_is_light():
    code = "import sys, torchweave; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_every_module_says_what_it_is_for():
    silent = [
        name_of(path)
        for path in SOURCES
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent


def test_the_picture_is_drawn_from_code_that_exists():
    drawing = script("docs/draw_architecture")
    picture = (ROOT / "docs" / "images" / "architecture.svg").read_text(encoding="utf-8")
    for station in (*drawing.START, *drawing.STEP):
        assert drawing.paragraph(station)
        assert f">{station.symbol}<" in picture and f">torchweave/{station.file}<" in picture
    with pytest.raises(LookupError, match=r"has no Runner\.fly"):
        drawing.paragraph(drawing.Station("engine/runner/model_runner.py", "Runner.fly"))


def test_the_reference_names_every_option():
    from torchweave.cli.options import options_of
    from torchweave.config.options import EngineConfig
    from torchweave.engine.request import SamplingParams

    reference = script("docs/write_cli_reference")
    for name, page in reference.PAGES.items():
        text = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
        assert text == page(), "run scripts/docs/write_cli_reference.py"
        headings = [line for line in text.splitlines() if line.startswith("## ")]
        assert len(headings) == len(set(headings)), "a link to one of two finds the first"
    known = {"options.md": {*options_of(EngineConfig)} - {"model"}, "sampling-params.md": {*options_of(SamplingParams)}}
    for name, options in known.items():
        text = reference.PAGES[name]()
        assert not [option for option in sorted(options) if f"`--{option}`" not in text]


def test_the_walk_is_measured():
    measured = script("docs/measure_walk")
    text = measured.PAGE.read_text(encoding="utf-8").partition(measured.BEGIN)[2].partition(measured.END)[0]
    named = {name for name in re.findall(r"`(\w+(?:/\w+)*)`", text) if "/" in name or name == "tokenizer"}
    assert len(named) >= 25 and not [name for name in named if not (PACKAGE / f"{name}.py").is_file()]
    walk = measured.measure(measured.demo)
    others = named ^ set(walk.files)  # what runs once in a while may be in one of them
    assert len(others) <= 2, f"run scripts/docs/measure_walk.py: {others}"
    assert "engine/scheduler/scheduler" in walk.step and not any("/parts/" in file for file in walk.step)


def test_the_page_of_passes_is_current_and_whole():
    from torchweave.compiler.passes.base import document
    from torchweave.compiler.passes.manager import default_passes

    page = (ROOT / "docs" / "reference" / "passes.md").read_text(encoding="utf-8")
    assert page == script("docs/write_passes_page").page(), "run scripts/docs/write_passes_page.py"
    for each in default_passes():
        missing = [part for part in ("Before", "After", "When", "Numerics", "Pays") if part not in document(each)]
        assert not missing, f"the docstring of {each.name} has no {', '.join(missing)}"


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_of_a_requirement_exists():
    """docs/develop/requirements.md names tests by file and function; a row without tests is marked as not built."""
    page = (ROOT / "docs" / "develop" / "requirements.md").read_text(encoding="utf-8")
    rows = re.findall(r"^## ([A-Z]\d+): .+?$\n(.*?)(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE)
    assert len(rows) >= 55
    for row, text in rows:
        lists = re.findall(r"^- `(tests/[\w/]+\.py)`: (.+)$", text, flags=re.MULTILINE)
        assert lists or "not built" in text.lower(), f"{row} names no test"
        for file, tests in lists:
            missing = set(re.findall(r"`(\w+)`", tests)) - _functions(ROOT / file)
            assert not missing, f"{row}: {file} has no {', '.join(sorted(missing))}"


def test_identifiers_have_known_words():
    unknown = script("check_words").unknown_words()
    assert not unknown, "a word for docs/develop/glossary.md or scripts/ordinary_words.txt, or a better name"


def test_results_become_a_table():
    results = script("docs/results_table")
    environment = {"device": "GPU", "versions": {}}
    result = {
        "scenario": "suite", "model": "m", "dtype": "bfloat16", "environment": environment,
        "decode": [{"batch_size": 1, "median_tpot_ms": 1.234}, {"batch_size": 8, "skipped": "why"}],
        "mixed": {"output_throughput": 31234.5},
    }  # fmt: skip
    table = results.table([("bench/results/m.md", result)])
    assert "1: 1.23" in table and "31,234" in table and "8:" not in table
    assert (
        results.replaced(f"a {results.BEGIN} old {results.END} b", "new") == f"a {results.BEGIN}\nnew\n{results.END} b"
    )
    with pytest.raises(ValueError, match="results: begin"):
        results.replaced("no marks", "new")
    with pytest.raises(ValueError, match="peers: begin"):
        results.replaced("a page", "new", results.PEERS_BEGIN, results.PEERS_END)
    for page, text in results.pages().items():
        assert page.read_text(encoding="utf-8") == text, "run scripts/docs/results_table.py"
    table = results.peers(ROOT / "bench" / "results")
    assert len(re.findall(r"^\| .+ / .+ \|$", table, flags=re.MULTILINE)) == 6


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


RUN = """
import contextlib, io, json, sys, traceback

results = []
for code in json.load(sys.stdin):
    said, error = io.StringIO(), ""
    with contextlib.redirect_stdout(said):
        try:
            exec(compile(code, "example", "exec"), {"__name__": "__main__"})
        except BaseException:
            error = traceback.format_exc()
    results.append([said.getvalue(), error])
print(json.dumps(results))
"""


EXAMPLES = [(page, number) for page in PAGES for number, _ in enumerate(blocks(page))]


@functools.cache
def outcomes() -> list[tuple[str, str]]:
    """What each example printed, and its error: one after the other in a process, which imports torch once."""
    command, codes = [sys.executable, "-c", RUN], json.dumps([blocks(page)[number] for page, number in EXAMPLES])
    done = subprocess.run(command, cwd=ROOT, input=codes, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [(said, error) for said, error in json.loads(done.stdout)]


@pytest.mark.parametrize(
    ("page", "number"), EXAMPLES, ids=lambda value: name_of(value) if isinstance(value, Path) else None
)
def test_examples_run(page: Path, number: int):
    said, error = outcomes()[EXAMPLES.index((page, number))]
    assert not error, error[-3000:]
    if "12+30=" in blocks(page)[number]:
        assert "42" in said


def test_the_built_in_models_fit_their_budget():
    folders = [PACKAGE / "models" / name for name in ("demo", "demo_draft")]
    assert sum(path.stat().st_size for folder in folders for path in folder.iterdir()) <= 6_000_000
