"""Source analysis: the owner of a file, and the operation of an executed line."""

from __future__ import annotations

import ast
import linecache
import sysconfig
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

_TORCH = str(Path(torch.__file__).parent)
_STANDARD = (sysconfig.get_path("stdlib"), str(Path(__file__).parent))


def is_user_code(file: str) -> bool:
    """Whether a file belongs to the subject, not to torch, the standard library or the doctor."""
    if file.startswith(("<", _TORCH)):
        return False
    return "site-packages" in file or not file.startswith(_STANDARD)


def is_library(where: str) -> bool:
    """Whether a line, `file:line`, belongs to an installed package or the standard library."""
    return any(part in where for part in ("site-packages", "dist-packages")) or where.startswith(_STANDARD[0])


def innermost_user_line(frames: Iterable[Any]) -> str:
    """`file:line` of the innermost frame in the subject's code; "" if there is none."""
    own = [frame for frame in frames if is_user_code(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def source_line(where: str) -> str:
    file, _, line = where.rpartition(":")
    return linecache.getline(file, int(line)).strip() if line.isdigit() else ""


class Statement:
    """The innermost statement at a line; for a compound statement (`if`, `for`, `with`), its header only."""

    def __init__(self, node: ast.stmt | ast.expr | None, parents: tuple[ast.AST, ...] = ()) -> None:
        self.node, self.parents = node, parents

    def _header(self) -> Iterator[ast.AST]:
        if self.node is None:
            return
        for name, value in ast.iter_fields(self.node):
            if name in ("body", "orelse", "finalbody", "handlers", "decorator_list"):
                continue
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.AST):
                    yield from ast.walk(item)

    def calls(self) -> set[str]:
        """Names of the called functions, as `print` or `torch.nonzero`, and of methods, as `.item`."""
        names: set[str] = set()
        for node in self._header():
            if isinstance(node, ast.Call):
                if isinstance(node.func, ast.Attribute):
                    names |= {"." + node.func.attr, ast.unparse(node.func)}
                elif isinstance(node.func, ast.Name):
                    names.add(node.func.id)
        return names

    def is_branch(self) -> bool:
        tests = (ast.If, ast.While, ast.Assert)
        return isinstance(self.node, tests) or any(isinstance(node, (ast.IfExp, ast.BoolOp)) for node in self._header())

    def loop(self) -> ast.For | ast.While | None:
        """The innermost loop in the function that is or contains the statement."""
        for node in (self.node, *reversed(self.parents)):
            if isinstance(node, (ast.FunctionDef, ast.Lambda)):
                return None
            if isinstance(node, (ast.For, ast.While)):
                return node
        return None

    def comprehension(self) -> ast.expr | None:
        """The first comprehension or generator in the statement."""
        kinds = (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
        return next((node for node in self._header() if isinstance(node, kinds)), None)

    def iterates_modules(self) -> bool:
        """Whether a loop calls its items, as over the layers of a model: `layer(x)`, `self.layers[i](x)`."""
        if self.node is None:
            return False
        loops = [self.node] if isinstance(self.node, ast.For) else getattr(self.node, "generators", ())
        names = {name.id for loop in loops for name in ast.walk(loop.target) if isinstance(name, ast.Name)}
        return any(isinstance(node, ast.Call) and _is_one_of(node.func, names) for node in ast.walk(self.node))

    def reads_shape(self) -> bool:
        """Whether the header reads a size: `.shape`, `.size()`, `len()`, `.numel()`."""
        names = {node.attr for node in self._header() if isinstance(node, ast.Attribute)}
        return bool(names & {"shape", "size", "numel"}) or "len" in self.calls()

    def plain_object_method(self) -> bool:
        """Whether the line is in a method of a class that is no module."""
        for node in reversed(self.parents):
            if isinstance(node, ast.ClassDef):
                methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                bases = " ".join(ast.unparse(base) for base in node.bases)
                return "forward" not in methods and "Module" not in bases
        return False


def _is_one_of(function: ast.expr, names: set[str]) -> bool:
    """Whether the called expression is a loop variable, or an item indexed by one."""
    if isinstance(function, ast.Subscript):
        return any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(function.slice))
    return isinstance(function, ast.Name) and function.id in names


@lru_cache(maxsize=256)
def _statements_by_line(file: str) -> dict[int, Statement]:
    """Map each line of a file to its innermost statement."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    statements: dict[int, Statement] = {}

    def visit(node: ast.AST, parents: tuple[ast.AST, ...]) -> None:
        if isinstance(node, ast.stmt):
            statement = Statement(node, parents)
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno or node.lineno
            for line in range(node.lineno, max(last, node.lineno) + 1):
                statements[line] = statement
        for child in ast.iter_child_nodes(node):
            visit(child, (*parents, node))

    visit(tree, ())
    return statements


def statement(where: str) -> Statement:
    file, _, line = where.rpartition(":")
    return _statements_by_line(file).get(int(line), Statement(None)) if line.isdigit() else Statement(None)
