"""Checks of the pages: links, the site's navigation, decisions and what refers to them, command lines, and that examples are run.

`make lint` builds the site strictly. tests/test_house.py compares generated pages with their sources and runs the examples in
```python, tests/serving/http/test_docs.py those in ```py and ```bash that call a server, tests/e2e/test_guide.py others in ```py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from site_hooks import links

from torchweave.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DECISIONS = DOCS / "develop" / "decisions"
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md")] + [
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "bench" / "results").glob("*.md")),
]
REFERRING = ("torchweave", "bench", "scripts", "tests", "examples")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    text = text_of(page)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(
        re.findall(r'<a id="([\w-]+)">', text)
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path):
    broken = []
    for link in links(text_of(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def _navigation(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for inner in entry.values():
            yield from _navigation(inner)
    elif isinstance(entry, list):
        for inner in entry:
            yield from _navigation(inner)


def test_every_page_is_in_the_navigation():
    text = re.sub(r"!!python/\S+", "", text_of(ROOT / "mkdocs.yml"))
    listed = list(_navigation(yaml.safe_load(text)["nav"]))
    assert len(listed) == len(set(listed))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert set(listed) - {"CONTRIBUTING.md", "CHANGELOG.md"} == pages, "list the page in mkdocs.yml"


@pytest.mark.parametrize("page", [page for page in PAGES if "results" not in page.parts], ids=name_of)
def test_a_list_begins_after_an_empty_line(page: Path):
    """A code host takes a list behind a paragraph as a list, the site as more of the paragraph."""
    item = re.compile(r"(?:[-*]|\d+\.) ")
    lines = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE).splitlines()
    wrong = [
        line
        for before, line in pairwise(lines)
        if item.match(line) and before.strip() and not item.match(before) and not before.startswith((" ", "#", "<!--"))
    ]
    assert not wrong


def numbers(page: Path) -> set[str]:
    return set(re.findall(r'^<a id="(\d{4})"></a>$', text_of(page), flags=re.MULTILINE))


def test_decisions_are_numbered_and_whole():
    pages = sorted(set(DECISIONS.glob("*.md")) - {DECISIONS / "README.md"})
    assert 20 <= len(pages) <= 30, "merge them by subject"
    assert not (DOCS / "decisions").exists(), "a decision is a section of a page in docs/develop/decisions"
    index, held = text_of(DECISIONS / "README.md"), list[str]()
    for page in pages:
        text, held_here = text_of(page), numbers(page)
        held += held_here
        for part in ("## What we will not build", "## History"):
            assert f"\n{part}\n" in text, f"{page.name} has no {part}"
        history = set(re.findall(r"^\| (\d{4}) \| ", text[text.index("## History") :], flags=re.MULTILINE))
        assert history == held_here, page.name
        assert held_here == set(re.findall(rf"\]\({page.name}#(\d{{4}})\)", index)), f"{page.name} in README.md"
    assert len(held) == len(set(held)) >= 141


def test_decisions_that_code_and_pages_name_exist():
    """`decision 0104`, or a link to one, in code, results and pages."""
    held = {number for page in DECISIONS.glob("*.md") for number in numbers(page)}
    named = re.compile(r"\bdecisions? (\d{4})\b|decisions/[\w-]+\.md#(\d{4})|\[(?:decision )?(\d{4})\]\(")
    files = [*PAGES, *(path for folder in REFERRING for path in (ROOT / folder).rglob("*.py"))]
    found = {
        number: name_of(path) for path in files for match in named.findall(text_of(path)) for number in match if number
    }
    assert len(found) >= 100
    assert not {number: place for number, place in found.items() if number not in held}


def commands(page: Path) -> list[str]:
    """Command lines of a page's code that begin with `torchweave`."""
    code = re.findall(r"^```(?:bash|sh)\n(.*?)^```|^((?:    .+\n)+)", text_of(page), flags=re.DOTALL | re.MULTILINE)
    lines = [line.strip() for block in code for line in "".join(block).replace("\\\n", " ").splitlines()]
    parts = [part.strip() for line in lines for part in re.sub(r"\s{2,}#.*", "", line).split("&&")]
    return [
        part for part in parts if re.match(r"torchweave [a-z]", part) and not re.search(r"\.\.\.|COMMAND| \[--", part)
    ]


COMMAND_LINES = sorted(
    {(line, name_of(page)) for page in PAGES if "results" not in page.parts for line in commands(page)}
)


@pytest.mark.parametrize(("line", "page"), COMMAND_LINES)
def test_command_lines_are_taken(line: str, page: str):
    """Every option of an example exists and takes its value; nothing is run."""
    name, *rest = shlex.split(line)[1:]
    assert name in COMMANDS
    command = import_module(f"torchweave.cli.commands.{name.replace('-', '_')}")
    if "--config" in rest:
        del rest[rest.index("--config") : rest.index("--config") + 2]
    (command.parser(rest.pop(0)) if name == "bench" else command.parser()).parse_argv(rest)


def test_there_are_command_lines():
    assert len(COMMAND_LINES) >= 60


@pytest.mark.parametrize("page", sorted((DOCS / "how-to").glob("*.md")), ids=lambda page: page.name)
def test_every_how_to_page_has_an_example_that_is_checked(page: Path):
    assert commands(page) or re.search(r"^```(python|py|bash)$", text_of(page), flags=re.MULTILINE)


def test_every_file_of_gpu_tests_says_what_it_needs():
    table = dict(
        re.findall(r"^\| `(test_\w+\.py)` \| (\d) \| ", text_of(DOCS / "develop" / "testing.md"), flags=re.MULTILINE)
    )
    files = {path.name: path for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert set(table) == set(files)
    several = {name for name, path in files.items() if "device_count()" in text_of(path)}
    assert several == {name for name, count in table.items() if count != "1"}


def test_the_home_page_links_to_every_page():
    linked = {link.partition("#")[0] for link in links(text_of(DOCS / "README.md"))}
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"README.md"}
    assert {page for page in pages if not page.startswith("develop/decisions/")} <= linked
