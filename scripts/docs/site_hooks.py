"""Hooks of mkdocs: pages link to files outside of docs/ as on a code host, and the site takes those files along.

A Markdown file becomes a page of the site at its path in the repository, any other file a file beside it; code gets the suffix
`.txt`, so that browsers show it. Links to a folder, which the site does not have, become text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs/"
SHOWN = (".md", ".svg", ".png", ".json", ".txt", ".html", ".css")
"""Suffixes that browsers show, or that mkdocs renders."""
ALWAYS = ("CONTRIBUTING.md", "CHANGELOG.md")
SEARCH = {
    "bench/results/": {"exclude": True},
    "CHANGELOG.md": {"exclude": True},
    "docs/develop/decisions/": {"boost": 0.3},
}
"""Pages that name every model and kernel, and would hide those that answer a question."""

_FENCE = re.compile(r"^(```.*?^```)", flags=re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def address(path: str) -> str:
    """Where a file of the repository lies in the site."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    return path if path.endswith(SHOWN) else f"{path}.txt"


def target(link: str, page: str) -> tuple[str, str]:
    """The path in the repository and the anchor of a link on a page; an empty path is no file: an address or an anchor."""
    path, _, anchor = link.partition("#")
    if not path or re.match(r"[a-z]+:", link):
        return "", anchor
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path)), anchor


def links(text: str) -> list[str]:
    """Links of a page, those in code left out."""
    return [link for part in _FENCE.split(text) if not part.startswith("```") for _, link in _LINK.findall(part)]


def rewritten(text: str, page: str) -> str:
    """A page with its links as the site needs them."""

    def one(match: re.Match[str]) -> str:
        path, anchor = target(match[2], page)
        if not path or not (ROOT / path).exists():
            return match[0]
        if (ROOT / path).is_dir():
            return match[1]
        to = posixpath.relpath(address(path), posixpath.dirname(address(page)) or ".")
        return f"[{match[1]}]({to}{'#' if anchor else ''}{anchor})"

    return "".join(part if part.startswith("```") else _LINK.sub(one, part) for part in _FENCE.split(text))


def outside() -> set[str]:
    """Files outside of docs/ that pages link to, and that these link to in turn."""
    waiting = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")] + list(ALWAYS)
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        text = (ROOT / page).read_text(encoding="utf-8")
        for path in {target(link, page)[0] for link in links(text)} - seen - {""}:
            if (ROOT / path).is_file() and not path.startswith(".."):
                seen.add(path)
                waiting += [path] if path.endswith(".md") else []
    return {path for path in seen if not path.startswith(DOCS)}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for path in sorted(outside()):
        files.append(File.generated(config, address(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = Path(page.file.abs_src_path or "").resolve().relative_to(ROOT).as_posix()
    rules = [rule for path, rule in SEARCH.items() if source.startswith(path)]
    if rules:
        meta: dict[str, Any] = page.meta
        meta["search"] = rules[0]
    return rewritten(markdown, source)
