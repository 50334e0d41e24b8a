"""Dynamo's source expressions of placeholders, resolved without `eval`.

Dynamo names each placeholder by an expression over the traced frame, for instance
`L['self']._modules['embed']._parameters['weight']`. Only names, attributes and constant subscripts are resolved, so that a
source from the compile cache can look up objects and do nothing else.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from typing import Any


class SourceError(Exception):
    """The expression is more than a look-up, or looks up a missing object."""


def resolve(source: str, roots: Mapping[str, Any]) -> Any:
    """The object that `source` names, starting from `roots` (`L`: the frame's locals, `G`: its globals)."""
    try:
        return _walk(_parse(source), roots)
    except (SyntaxError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise SourceError(f"{source} does not exist ({type(error).__name__}: {error})") from error


@functools.lru_cache(maxsize=4096)
def _parse(source: str) -> ast.expr:
    return ast.parse(source, mode="eval").body


def _walk(tree: ast.expr, roots: Mapping[str, Any]) -> Any:
    if isinstance(tree, ast.Name):
        return roots[tree.id]
    if isinstance(tree, ast.Attribute):
        return getattr(_walk(tree.value, roots), tree.attr)
    if isinstance(tree, ast.Subscript) and isinstance(tree.slice, ast.Constant):
        return _walk(tree.value, roots)[tree.slice.value]
    raise SourceError(f"{ast.unparse(tree)} is more than a look-up")
