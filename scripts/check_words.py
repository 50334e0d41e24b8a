"""List words of identifiers that stand in neither the glossary nor the list of ordinary programming words.

python scripts/check_words.py          # prints each unknown word with one identifier that has it; exit code 1 if there is one

Identifiers are split at underscores and capitals. The ordinary words are in scripts/ordinary_words.txt, one a line, sorted.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORDINARY = ROOT / "scripts" / "ordinary_words.txt"
_PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


def words(name: str) -> list[str]:
    """The words of an identifier, in lower case; single letters and numbers are left out."""
    return [part.lower() for part in _PART.findall(name) if len(part) > 1]


def names(tree: ast.AST) -> Iterator[str]:
    """Every identifier that a module defines: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def known_words() -> set[str]:
    """Words of the glossary's terms and the ordinary words."""
    glossary = (ROOT / "docs" / "develop" / "glossary.md").read_text(encoding="utf-8")
    terms = [line.split("|")[1] for line in glossary.splitlines() if line.startswith("| ")]
    return {word for term in terms for word in re.findall(r"[a-z]+", term.lower())} | set(ORDINARY.read_text().split())


def unknown_words() -> dict[str, str]:
    """Unknown words, each with a place where it stands."""
    known, found = known_words(), dict[str, str]()
    for path in sorted((ROOT / "torchweave").rglob("*.py")):
        for name in names(ast.parse(path.read_text())):
            for word in words(name):
                if word not in known:
                    found.setdefault(word, f"{path.relative_to(ROOT)}: {name}")
    return found


def main() -> int:
    found = unknown_words()
    for word, place in sorted(found.items()):
        print(f"{word}  ({place})")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
